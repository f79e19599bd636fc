"""What a training of a draft model is asked to do, checked before any work starts."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from jaxserve.core.errors import ConfigError

ALGORITHMS = ("EAGLE", "EAGLE3", "DFLASH", "MTP")
_HEADS, _CHAINS = ("EAGLE", "EAGLE3", "DFLASH"), ("EAGLE", "EAGLE3")
# Settings that not every algorithm looks at.
_LOOKED_AT_BY = {
    "intermediate_size": _HEADS, "draft_vocab_size": _HEADS, "target_layers": ("EAGLE3", "DFLASH"),
    "draft_steps": _CHAINS, "step_decay": _CHAINS, "cross_entropy_weight": ("EAGLE",), "block_size": ("DFLASH",),
    "mask_token_id": ("DFLASH",), "anchors": ("DFLASH",), "block_decay": ("DFLASH",),
}  # fmt: skip


@dataclass(frozen=True)
class TrainSettings:
    """Settings of a training; names follow the flags of ``jaxserve train-draft``.

    Raises:
        ConfigError: a value that cannot work, or one that the algorithm would not look at.

    Attributes:
        algorithm: one of ``ALGORITHMS``.
        num_layers: of the draft; MTP: how many, each of which drafts one token.
        intermediate_size: of the draft's MLP; None takes the target's. Not of MTP, whose layers have the target's.
        draft_vocab_size: most target ids the draft knows, the most frequent ones; 0: all. EAGLE: those its
            cross-entropy is about. Not of MTP, which knows all.
        sequence_length: tokens of a training row; longer sequences are cut.
        batch_rows: rows of a step.
        epochs: times every row is used.
        learning_rate: its peak; it rises over the first ``warmup`` of all steps and falls along a cosine.
        weight_decay, clip_norm: of AdamW, and the largest norm of a gradient.
        draft_steps: EAGLE, EAGLE-3: guesses unrolled in training, each fed with the last one's output.
        step_decay: EAGLE, EAGLE-3: weight of each further guess in the loss, relative to the one before.
        cross_entropy_weight: EAGLE: of the cross-entropy in the loss, beside the distance of features.
        target_layers: EAGLE-3, DFLASH: layers of the target whose outputs the draft is given, counted from 0; None:
            the algorithm's usual ones.
        block_size: DFLASH: tokens of a block, the known one included.
        mask_token_id: DFLASH: token that stands for one to be guessed.
        anchors: DFLASH: blocks drawn per row and step.
        block_decay: DFLASH: tokens after which a place in the block counts 1/e in the loss.
        held_out: part of the rows kept for evaluation.
        eval_every, checkpoint_every: steps between; the end always has both.
        seed: of weights, order and anchors.
    """

    algorithm: str
    num_layers: int = 1
    intermediate_size: int | None = None
    target_layers: tuple[int, ...] | None = None
    draft_vocab_size: int = 6144
    sequence_length: int = 512
    batch_rows: int = 2
    epochs: float = 4.0
    learning_rate: float = 4e-4
    warmup: float = 0.05
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    draft_steps: int = 3
    step_decay: float = 0.8
    cross_entropy_weight: float = 0.1
    block_size: int = 8
    mask_token_id: int = 0
    anchors: int = 32
    block_decay: float = 4.0
    held_out: float = 0.05
    eval_every: int = 100
    checkpoint_every: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            known = ", ".join(name.lower() for name in ALGORITHMS)
            raise ConfigError(f"--algorithm must be one of {known}; got {self.algorithm.lower()}")
        for name, readers in _LOOKED_AT_BY.items():
            if self.algorithm not in readers and getattr(self, name) != getattr(type(self), name):
                raise ConfigError(
                    f"{flag_of(name)} is a setting of {', '.join(reader.lower() for reader in readers)}; "
                    f"--algorithm {self.algorithm.lower()} does not look at it: leave it out"
                )
        least = {
            "num_layers": 1, "sequence_length": 16, "batch_rows": 1, "draft_steps": 1, "block_size": 2, "anchors": 1,
            "eval_every": 1, "checkpoint_every": 1, "draft_vocab_size": 0, "mask_token_id": 0, "seed": 0,
        }  # fmt: skip
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigError(f"{flag_of(name)} must be at least {low}, got {getattr(self, name)}")
        if self.intermediate_size is not None and self.intermediate_size < 1:
            raise ConfigError(f"--intermediate-size must be at least 1, got {self.intermediate_size}")
        if self.target_layers is not None and (not self.target_layers or min(self.target_layers) < 0):
            raise ConfigError(
                f"--target-layers must be layer numbers from 0 on, such as 1,14,26, got {self.target_layers}"
            )
        for name in ("epochs", "learning_rate", "clip_norm", "block_decay"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ConfigError(f"{flag_of(name)} must be a number above 0, got {getattr(self, name)}")
        for name in ("weight_decay", "cross_entropy_weight"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ConfigError(f"{flag_of(name)} must be a number >= 0, got {getattr(self, name)}")
        for name, high in (("warmup", 1.0), ("held_out", 0.5), ("step_decay", 1.0)):
            if not 0 < getattr(self, name) <= high:
                raise ConfigError(f"{flag_of(name)} must be above 0 and at most {high:g}, got {getattr(self, name)}")
        if self.block_size >= self.sequence_length:
            raise ConfigError(
                f"--block-size {self.block_size} does not fit --sequence-length {self.sequence_length}; lower it"
            )

    def as_json(self) -> dict[str, Any]:
        """All of them, for the report and to tell whether a checkpoint belongs to this training."""
        layers = self.target_layers
        return {**asdict(self), "target_layers": None if layers is None else list(layers)}  # as JSON gives it back


def flag_of(name: str) -> str:
    """``draft_steps`` -> ``--draft-steps``."""
    return "--" + name.replace("_", "-")

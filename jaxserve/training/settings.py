"""What a training of a draft model is asked to do, checked before any work starts."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from jaxserve.core.errors import ConfigError

ALGORITHMS = ("EAGLE3", "DFLASH")


@dataclass(frozen=True)
class TrainSettings:
    """Settings of a training; names follow the flags of ``jaxserve train-draft``.

    Attributes:
        algorithm: ``"EAGLE3"`` or ``"DFLASH"``.
        num_layers, intermediate_size: of the draft; None takes the target's MLP size.
        draft_vocab_size: most target ids the draft knows, the most frequent ones; 0: all.
        sequence_length: tokens of a training row; longer sequences are cut.
        batch_rows: rows of a step.
        epochs: times every row is used.
        learning_rate: its peak; it rises over the first ``warmup`` of all steps and falls along a cosine.
        weight_decay, clip_norm: of AdamW, and the largest norm of a gradient.
        draft_steps: EAGLE-3: guesses unrolled in training, each fed with the last one's output.
        step_decay: EAGLE-3: weight of each further guess in the loss, relative to the one before.
        target_layers: layers of the target whose outputs the draft is given, counted from 0; None: the algorithm's
            usual ones.
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
            remedy = "MTP layers come with their model and are not trained here" if self.algorithm == "MTP" else ""
            known = " or ".join(name.lower() for name in ALGORITHMS)
            raise ConfigError(f"--algorithm must be {known}, got {self.algorithm.lower()}{'; ' * bool(remedy)}{remedy}")
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
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise ConfigError(f"--weight-decay must be a number >= 0, got {self.weight_decay}")
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

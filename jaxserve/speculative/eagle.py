"""EAGLE and EAGLE-3: drafts of a small head that builds on the target model's hidden states."""

from __future__ import annotations

import inspect
from pathlib import Path

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ModelLoadError
from jaxserve.models.draft import FINAL
from jaxserve.models.loading.draft import abstract_draft, default_draft_path, load_draft
from jaxserve.models.loading.draft_config import trained_steps_of
from jaxserve.models.loading.draft_files import open_draft_files
from jaxserve.models.loading.weights import LoadedModel
from jaxserve.speculative.draft_model import DraftModelAlgorithm
from jaxserve.text.tokenizer import Tokenizer


def refuse_unobservable(target: LoadedModel, algorithm: str) -> None:
    """Raises ModelLoadError if the target's class cannot be observed between its layers."""
    call = type(target.bind(target.leaves)).__call__
    if "observe" not in inspect.signature(call).parameters:
        raise ModelLoadError(
            f"{algorithm} drafts from what {target.config.architecture} computes between its layers, but its class "
            "takes no `observe`; add it to __call__, see jaxserve.models.llama, or choose another "
            "--speculative-algorithm"
        )


class HeadAlgorithm(DraftModelAlgorithm):
    """Loads a head trained for the target model; ``default`` is the one that comes with the default model."""

    @classmethod
    def head_path(cls, config: EngineConfig) -> Path:
        """The folder of the head."""
        path = config.speculative_draft_model_path
        assert path is not None
        return default_draft_path(cls.name) if path == "default" else Path(path).expanduser()

    @classmethod
    def default_steps(cls, config: EngineConfig) -> int:
        return trained_steps_of(open_draft_files(cls.head_path(config))) or super().default_steps(config)

    def load(self, target: LoadedModel, tokenizer: Tokenizer) -> None:
        self.draft = load_draft(self.head_path(self.context.config), self.name, target, self.context.dtype)
        if any(point != FINAL for point in self.feature_points):
            refuse_unobservable(target, self.name)

    def load_abstract(self, target: LoadedModel) -> None:
        self.draft = abstract_draft(self.head_path(self.context.config), self.name, target, self.context.dtype)


class EagleAlgorithm(HeadAlgorithm):
    """EAGLE (Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", 2024), chains."""

    name = "EAGLE"
    kv_lookahead = 1  # the entry of a position takes the token behind it


class Eagle3Algorithm(HeadAlgorithm):
    """EAGLE-3 (Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test",
    2025), chains."""

    name = "EAGLE3"
    kv_lookahead = 1

"""EAGLE and EAGLE-3: drafts of a small head that builds on the target model's hidden states."""

from __future__ import annotations

from pathlib import Path

from jaxserve.core.config import EngineConfig
from jaxserve.models.loading.draft import default_draft_path, load_draft
from jaxserve.models.loading.weights import LoadedModel
from jaxserve.speculative.draft_model import DraftModelAlgorithm
from jaxserve.text.tokenizer import Tokenizer


class HeadAlgorithm(DraftModelAlgorithm):
    """Loads a head trained for the target model; ``default`` is the one that comes with the default model."""

    @classmethod
    def head_path(cls, config: EngineConfig) -> Path:
        """The folder of the head."""
        path = config.speculative_draft_model_path
        assert path is not None
        return default_draft_path(cls.name) if path == "default" else Path(path).expanduser()

    def load(self, target: LoadedModel, tokenizer: Tokenizer) -> None:
        self.draft = load_draft(self.head_path(self.context.config), self.name, target, self.context.dtype)


class EagleAlgorithm(HeadAlgorithm):
    """EAGLE (Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", 2024), chains."""

    name = "EAGLE"


class Eagle3Algorithm(HeadAlgorithm):
    """EAGLE-3 (Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test",
    2025), chains."""

    name = "EAGLE3"

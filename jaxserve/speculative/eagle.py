"""EAGLE and EAGLE-3: drafts of a small head that builds on the target model's hidden states."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError, ModelLoadError
from jaxserve.models.draft import FINAL
from jaxserve.models.loading.draft import abstract_draft, default_draft_path, load_draft
from jaxserve.models.loading.draft_config import trained_steps_of
from jaxserve.models.loading.draft_files import open_draft_files
from jaxserve.models.loading.token_map import check_range, read_token_map, with_token_map
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
    refuses_token_map = ""

    @classmethod
    def settled(cls, config: EngineConfig) -> EngineConfig:
        path, topk = config.speculative_token_map, config.speculative_eagle_topk or 1
        if path is not None and read_token_map(path).size < topk:
            raise ConfigError(
                f"--speculative-token-map {path}: names {read_token_map(path).size} ids, fewer than "
                f"--speculative-eagle-topk {topk}, the continuations of each draft"
            )
        return super().settled(config)

    def load(self, target: LoadedModel, tokenizer: Tokenizer) -> None:
        ids = self._token_map()
        super().load(target, tokenizer)
        self.draft = self.draft if ids is None else with_token_map(self.draft, ids)

    def load_abstract(self, target: LoadedModel) -> None:
        ids = self._token_map()
        super().load_abstract(target)
        self.draft = self.draft if ids is None else with_token_map(self.draft, ids)

    def _token_map(self) -> np.ndarray | None:
        path = self.context.config.speculative_token_map
        if path is None:
            return None
        ids = read_token_map(path)
        check_range(path, ids, self.context.vocab_size)
        return ids


class Eagle3Algorithm(HeadAlgorithm):
    """EAGLE-3 (Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test",
    2025), chains."""

    name = "EAGLE3"
    kv_lookahead = 1
    refuses_token_map = "EAGLE-3 heads bring the ids they draft with them, in tensor d2t"

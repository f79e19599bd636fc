"""MTP, multi-layer EAGLE: drafts of the multi-token-prediction layers that come with a model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.mtp import abstract_mtp_layer, count_mtp_layers, dummy_mtp_layers, load_mtp_layers
from jaxserve.models.loading.weights import LoadedModel
from jaxserve.runner.draft_program import DraftTask
from jaxserve.runner.draft_runner import LayerDraftRunner
from jaxserve.speculative.draft_model import DEFAULT_STEPS, DraftModelAlgorithm
from jaxserve.text.tokenizer import Tokenizer


def _model_path(config: EngineConfig) -> Path:
    """The checkpoint that the model and its MTP layers are in."""
    if config.model == "default":
        raise ConfigError("MTP needs a model that comes with MTP layers, and the default model has none; give --model")
    return Path(config.model).expanduser()


class MultiLayerEagleAlgorithm(DraftModelAlgorithm):
    """Each MTP layer drafts one token; they run one after the other, each with a pool, fences and a mailbox of its own.

    Attributes:
        layers: first the one that drafts the nearest token; ``draft`` is the first.
    """

    name = "MTP"
    drafts_trees = False
    runner_class = LayerDraftRunner
    layers: list[LoadedModel]

    @classmethod
    def settled(cls, config: EngineConfig) -> EngineConfig:
        path, draft = _model_path(config), config.speculative_draft_model_path
        if draft is not None and Path(draft).expanduser().resolve() != path.resolve():
            raise ConfigError(
                f"MTP layers come with the model: leave out --speculative-draft-model-path, or give {path}, got {draft}"
            )
        steps, tokens = config.speculative_num_steps, config.speculative_num_draft_tokens
        if steps is None and tokens is None:
            steps = DEFAULT_STEPS if config.load_format == "dummy" else count_mtp_layers(open_checkpoint(path))
        return super().settled(
            dataclasses.replace(config, speculative_num_steps=steps, speculative_draft_model_path=str(path))
        )

    def load(self, target: LoadedModel, tokenizer: Tokenizer) -> None:
        config, dtype = self.context.config, self.context.dtype
        steps = config.speculative_num_steps
        assert steps is not None
        if config.load_format == "dummy":
            self.layers = dummy_mtp_layers(target, dtype, steps)
        else:
            checkpoint = open_checkpoint(_model_path(config))
            there = count_mtp_layers(checkpoint)
            if steps > there:
                raise ConfigError(
                    f"--speculative-num-steps {steps}: each MTP layer drafts one token, and {checkpoint.path} has "
                    f"{there}; lower it"
                )
            self.layers = load_mtp_layers(checkpoint, target, dtype, steps)
        self.draft = self.layers[0]

    def load_abstract(self, target: LoadedModel) -> None:
        steps = self.context.config.speculative_num_steps
        assert steps is not None
        self.layers = [abstract_mtp_layer(target, self.context.dtype)] * steps
        self.draft = self.layers[0]

    @property
    def models(self) -> list[LoadedModel]:
        return self.layers

    def draft_task(self, vocab_size: int, num_drafts: int, number: int = 0) -> DraftTask:
        return DraftTask(number + 1, True, vocab_size, self.context.vocab_size, layer=number)

"""MTP, multi-layer EAGLE: drafts of the multi-token-prediction layers that come with a model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.mtp import count_mtp_layers, dummy_mtp_layers, load_mtp_layers
from jaxserve.models.loading.weights import LoadedModel
from jaxserve.runner.draft_program import DraftTask
from jaxserve.runner.draft_runner import LayerDraftRunner
from jaxserve.runner.model_runner import ModelRunner
from jaxserve.runner.step_runner import StepRunner
from jaxserve.runner.worker import DraftWorker, TargetWorker
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

    def kv_bytes_per_page(self, page_size: int) -> int:
        return len(self.layers) * super().kv_bytes_per_page(page_size)

    def make_worker(self, runner: ModelRunner, step_runner: StepRunner) -> TargetWorker:
        kv = self._layout(runner.kv.num_pages, runner.kv.page_size)
        target, dtype = runner.model.config, self.context.dtype
        num_features = len(self.feature_points) * target.hidden_size
        made: list[ModelRunner] = []
        draft_runners: list[LayerDraftRunner] = []
        try:
            for number, layer in enumerate(self.layers):
                task = DraftTask(number + 1, True, target.vocab_size, self.context.vocab_size, layer=number)
                made.append(
                    ModelRunner(
                        layer, runner.backend, runner.rows, kv, runner.config, runner.platform, name=f"draft-{number}",
                        make_relay=LayerDraftRunner.make_relay(task, num_features, dtype),
                    )
                )  # fmt: skip
                draft_runners.append(
                    LayerDraftRunner(
                        made[-1], step_runner.buckets, step_runner.on_late_compile, task, num_features, dtype
                    )
                )
            return DraftWorker(runner, step_runner, *draft_runners)
        except BaseException:
            for model_runner in reversed(made):
                model_runner.close()  # their channels and threads would outlive everything else
            raise

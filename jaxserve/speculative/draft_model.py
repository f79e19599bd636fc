"""What algorithms with a draft model on the device have in common."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np

from jaxserve.attention.paged_kv import KVLayout
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.core.shapes import powers_of_two
from jaxserve.models.loading.weights import LoadedModel
from jaxserve.runner.draft_program import DraftTask
from jaxserve.runner.draft_runner import DraftRunner
from jaxserve.runner.model_runner import ModelRunner
from jaxserve.runner.step_program import DraftForm, DraftRows
from jaxserve.runner.step_runner import StepRunner
from jaxserve.runner.worker import DraftWorker, TargetWorker
from jaxserve.speculative.base import Proposals, SpeculativeAlgorithm
from jaxserve.text.tokenizer import Tokenizer

DEFAULT_STEPS = 3
DEFAULT_TREE_TOKENS = 8
RELAYED_CHAIN = DraftForm(DraftRows.RELAYED)


class DraftModelAlgorithm(SpeculativeAlgorithm):
    """Drafts are made on the device, behind each step, and handed to the next by the token relay.

    Nothing is proposed on the host, so steps are planned ahead as plain ones are; how many tokens each added is known
    when it is collected. A step of one token per row is this algorithm's plain step: its draft program computes the
    draft model's KV and drafts nothing.

    Attributes:
        draft: the draft model, once loaded.
        uses_features: whether it builds on what the target model computes.
        drafts_trees: whether ``--speculative-eagle-topk`` may be more than 1.
        runner_class, worker_class: what executes it.
    """

    uses_features = True
    drafts_trees = True
    kv_lookahead: ClassVar[int | None] = None  # nothing is shared until a subclass has thought about it
    runner_class: ClassVar[type[DraftRunner]] = DraftRunner
    worker_class: ClassVar[type[DraftWorker]] = DraftWorker
    draft: LoadedModel

    @classmethod
    def draft_form(cls, config: EngineConfig) -> DraftForm:
        return dataclasses.replace(RELAYED_CHAIN, is_tree=(config.speculative_eagle_topk or 1) > 1)

    @classmethod
    def default_steps(cls, config: EngineConfig) -> int:
        """Drafts in a row where nobody says how many."""
        return DEFAULT_STEPS

    @classmethod
    def settled(cls, config: EngineConfig) -> EngineConfig:
        if config.speculative_draft_model_path is None:
            raise ConfigError(f"{cls.name} needs a draft model; name it with --speculative-draft-model-path")
        if (config.speculative_eagle_topk or 1) > 1:
            return cls._settled_tree(config)
        steps, tokens = config.speculative_num_steps, config.speculative_num_draft_tokens
        if steps is None:
            steps = cls.default_steps(config) if tokens is None else tokens - 1
        if tokens is None:
            tokens = steps + 1
        if tokens != steps + 1:
            raise ConfigError(
                f"{cls.name} drafts chains: --speculative-num-draft-tokens must be --speculative-num-steps + 1, "
                f"{steps + 1}, got {tokens}; leave one of them out"
            )
        return dataclasses.replace(
            config, speculative_num_steps=steps, speculative_num_draft_tokens=tokens, speculative_eagle_topk=1
        )

    @classmethod
    def _settled_tree(cls, config: EngineConfig) -> EngineConfig:
        topk = config.speculative_eagle_topk or 1
        steps = config.speculative_num_steps or cls.default_steps(config)
        if not cls.drafts_trees:
            raise ConfigError(f"{cls.name} drafts chains only: leave out --speculative-eagle-topk {topk}")
        most = 1 + topk + (steps - 1) * topk * topk
        tokens = config.speculative_num_draft_tokens or min(most, DEFAULT_TREE_TOKENS)
        if not steps < tokens <= most:
            raise ConfigError(
                f"--speculative-num-draft-tokens must be in [{steps + 1}, {most}] with --speculative-num-steps {steps} "
                f"and --speculative-eagle-topk {topk}, got {tokens}"
            )
        return dataclasses.replace(config, speculative_num_steps=steps, speculative_num_draft_tokens=tokens)

    @classmethod
    def verify_tokens(cls, config: EngineConfig) -> tuple[int, ...]:
        most = config.speculative_num_draft_tokens
        assert most is not None
        if not config.speculative_adaptive:
            return (most,)
        return (1, most) if cls.draft_form(config).is_tree else powers_of_two(most)  # a tree is drafted whole

    @abstractmethod
    def load(self, target: LoadedModel, tokenizer: Tokenizer) -> None:
        """Loads the draft model into ``draft``."""

    @abstractmethod
    def load_abstract(self, target: LoadedModel) -> None:
        """As ``load``, with shapes and dtypes alone in place of weights: enough to compile programs."""

    @property
    def models(self) -> list[LoadedModel]:
        """The draft model; of several layers that run one after the other, each."""
        return [self.draft]

    @property
    def feature_points(self) -> tuple[int, ...]:
        if not self.uses_features:
            return ()
        return tuple(self.draft.bind(self.draft.leaves).feature_points)

    def kv_layout(self, num_pages: int, page_size: int) -> KVLayout:
        """Sizes of the pool of each of ``models``; its pages have the numbers of the target's."""
        config = self.draft.config
        return KVLayout(
            config.num_layers, config.num_kv_heads, config.head_dim, num_pages, page_size, self.context.dtype
        )

    def kv_bytes_per_page(self, page_size: int) -> int:
        return len(self.models) * self.kv_layout(1, page_size).bytes_per_page

    def propose(self, contexts: list[np.ndarray], num_drafts: int) -> Proposals:
        """Nothing: its drafts never pass the host."""
        shape = len(contexts), num_drafts
        return Proposals(np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(len(contexts), np.int32))

    def make_worker(self, runner: ModelRunner, step_runner: StepRunner) -> TargetWorker:
        kv = self.kv_layout(runner.kv.num_pages, runner.kv.page_size)
        made: list[ModelRunner] = []
        try:
            for number, model in enumerate(self.models):
                relay = self.runner_class.make_relay(self._task(step_runner, number), *self._features(step_runner))
                made.append(
                    ModelRunner(
                        model, runner.backend, runner.rows, kv, runner.config, runner.platform,
                        name="draft" if len(self.models) == 1 else f"draft-{number}", make_relay=relay,
                    )
                )  # fmt: skip
            draft_runners = [self.make_draft_runner(model, step_runner, i) for i, model in enumerate(made)]
            return self.worker_class(runner, step_runner, *draft_runners)
        except BaseException:
            for draft in reversed(made):
                draft.close()  # its channel and its thread would outlive everything else
            raise

    def draft_task(self, vocab_size: int, num_drafts: int, number: int = 0) -> DraftTask:
        """What the programs of ``models[number]`` are compiled for."""
        config = self.context.config
        return DraftTask(
            num_drafts, self.uses_features, vocab_size, self.context.vocab_size,
            topk=config.speculative_eagle_topk or 1, num_steps=config.speculative_num_steps or num_drafts,
        )  # fmt: skip

    def make_draft_runner(self, draft: ModelRunner, step_runner: StepRunner, number: int = 0) -> DraftRunner:
        """Launches the programs of ``draft``, which has ``models[number]``, behind those of ``step_runner``."""
        task = self._task(step_runner, number)
        return self.runner_class(
            draft, step_runner.buckets, step_runner.on_late_compile, task, *self._features(step_runner)
        )

    def _task(self, step_runner: StepRunner, number: int) -> DraftTask:
        vocab_size = step_runner.runner.model.config.vocab_size
        return self.draft_task(vocab_size, step_runner.buckets.most_drafts, number)

    def _features(self, step_runner: StepRunner) -> tuple[int, Any]:
        """How many numbers per token the target's programs hand over, and their dtype."""
        return len(self.feature_points) * step_runner.runner.model.config.hidden_size, self.context.dtype

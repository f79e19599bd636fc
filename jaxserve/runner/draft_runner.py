"""Runs a draft model behind the target model's launches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxserve.attention.base import StepShape
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.runner.batch import StepBatch
from jaxserve.runner.block_draft_program import make_block_draft_program
from jaxserve.runner.buckets import Buckets
from jaxserve.runner.draft_program import DraftOutputs, DraftTask, make_draft_prep_program, make_draft_program
from jaxserve.runner.handover import Handover
from jaxserve.runner.launch import Launch, Phase
from jaxserve.runner.layer_draft_program import LayerRelay, make_layer_draft_program
from jaxserve.runner.model_runner import ModelRunner
from jaxserve.runner.phase_runner import PhaseRunner, Private
from jaxserve.runner.program_arguments import (
    DRAFT_ARGUMENTS,
    DRAFT_PREP_ARGUMENTS,
    STEP_DONATES,
    draft_arguments,
    draft_prep_arguments,
    handover_arguments,
)
from jaxserve.runner.program_cache import ProgramCache
from jaxserve.runner.step_program import HostInputs, ProgramKey, RowSource
from jaxserve.runner.tree_draft_program import tree_from


class DraftRunner(PhaseRunner):
    """Runs draft programs of one draft model: EXTEND behind a prompt chunk, DRAFT_EXTEND behind verify.

    Args:
        runner: the draft model's own pool, fences and mailbox; its relay holds the drafts.
        num_features: numbers per token that the target model's programs hand over.
        features_dtype: their dtype.
    """

    kind = "draft"
    make_program: ClassVar[Callable[..., Callable]] = staticmethod(make_draft_program)

    def __init__(self, runner: ModelRunner, buckets: Buckets, on_late_compile: Callable[[str], None], task: DraftTask,
                 num_features: int, features_dtype: Any):  # fmt: skip
        super().__init__(runner, buckets)
        self.task = task
        self.num_features = num_features
        self.features_dtype = features_dtype
        layout, windows = runner.rows.layout, runner.model.config.attention_windows
        made = self.make_relay(task, num_features, features_dtype)
        relay = jax.eval_shape(lambda: made(layout.num_slots + 1, task.vocab_size))
        self.steps = ProgramCache(
            "draft",
            lambda key: self._maker()(key, self.backend, runner.model.bind, windows, task),
            lambda key: draft_arguments(
                key, layout, runner.model.leaves, runner.kv, self._handover(key), relay, task.extra_entries
            ),
            names=DRAFT_ARGUMENTS,
            donate=STEP_DONATES,
            late=on_late_compile,
            graph=runner.graph,
        )
        self.preps = ProgramCache(
            "draft prep",
            lambda key: make_draft_prep_program(key, self.backend, task),
            lambda key: draft_prep_arguments(key, layout, self._handover(key)),
            names=DRAFT_PREP_ARGUMENTS,
            donate=(),
            late=on_late_compile,
        )

    @staticmethod
    def make_relay(task: DraftTask, num_features: int, features_dtype: Any) -> Callable[[int, int], Any]:
        """Makes the relay of the draft model for a number of slots and one, and the vocabulary's size."""
        return lambda num_rows, vocab_size: jnp.zeros((num_rows, task.relay_width), jnp.int32)

    @property
    def drafted(self) -> jax.Array:
        """int32[slots + 1, D or 2 D], the drafts behind every slot's newest token; of trees, their parents too."""
        return self.runner.relay

    def _handover(self, key: ProgramKey) -> Handover:
        """What its programs are handed, as shapes and dtypes."""
        return handover_arguments(key, self.num_features, self.features_dtype, not self.reads_shared_rows)

    def _upstream(self, launch: Launch) -> tuple[Handover, tuple[int, ...]]:
        """What its program is handed behind a step so far, and the ids of the launches that compute it."""
        assert launch.handover is not None
        return launch.handover, (launch.number,)

    def _maker(self) -> Callable[..., Callable]:
        if self.task.topk == 1:
            return self.make_program
        return functools.partial(make_draft_program, drafts_from=tree_from)

    def _key(self, shape: StepShape, source: RowSource) -> ProgramKey:
        config = self.runner.config
        return ProgramKey(
            shape, source, end_record=self.runner.has_marker, hold_points=config.hold_points, noted=config.race_check
        )

    @staticmethod
    def mode_behind(mode: ForwardMode) -> ForwardMode:
        """What a draft model does behind a step of this mode."""
        return ForwardMode.EXTEND if mode is ForwardMode.EXTEND else ForwardMode.DRAFT_EXTEND

    def sizes(self) -> list[tuple[ForwardMode, int, int, int]]:
        return [
            (self.mode_behind(mode), batch, queries, width)
            for mode, batch, queries, width in self.buckets.all_sizes()
            if mode is not ForwardMode.DECODE
        ]

    def execute(self, batch: StepBatch, launch: Launch, inputs: HostInputs, write_done: int) -> Phase:
        """Launches the draft program behind a step of the target model.

        Args:
            batch: the step's plan.
            launch: the step so far: the target model's, with its handover, and those of the draft runners before.
            inputs: what the host sent with it.
            write_done: as the target's.

        Raises:
            FenceTimeout, RetraceError: see ``PhaseRunner``.
        """
        handover, after = self._upstream(launch)
        rows, queries = handover.tokens.shape
        shape = self._shape(self.mode_behind(batch.mode), rows, queries, batch.max_length)
        inputs = inputs._replace(masks=None)
        return self._launch(batch, shape, inputs, write_done, upstream=handover, after=after)

    def _call(self, key: ProgramKey, operand: Any, inputs: HostInputs, private: Private, upstream: Any) -> DraftOutputs:
        runner = self.runner
        tables = runner.rows.arrays()
        return self.steps.call(
            key, runner.model.leaves, runner.pool, runner.relay, operand, tables, inputs, private, upstream
        )

    def _call_prep(self, key: ProgramKey, operand: Any, inputs: HostInputs, upstream: Any) -> Private:
        return self.preps.call(key, operand, self.runner.rows.arrays(), inputs, upstream)

    def _keep(self, outputs: DraftOutputs) -> jax.Array:
        self.runner.pool, self.runner.relay = outputs.pool, outputs.relay
        return outputs.drafts


class BlockDraftRunner(DraftRunner):
    """Runs the draft programs of DFLASH, on rows handed over by the target's program."""

    reads_shared_rows = False
    make_program = staticmethod(make_block_draft_program)


class LayerDraftRunner(DraftRunner):
    """Runs the draft programs of one layer of a multi-layer draft model, behind those of the layers before it."""

    make_program = staticmethod(make_layer_draft_program)

    @staticmethod
    def make_relay(task: DraftTask, num_features: int, features_dtype: Any) -> Callable[[int, int], LayerRelay]:
        def made(num_rows: int, vocab_size: int) -> LayerRelay:
            drafts = jnp.zeros((num_rows, task.num_drafts), jnp.int32)
            tail = jnp.zeros((num_rows, task.layer, num_features), features_dtype) if task.layer else None
            return LayerRelay(drafts, tail)

        return made

    @property
    def drafted(self) -> jax.Array:
        return self.runner.relay.drafts

    def _handover(self, key: ProgramKey) -> Handover:
        handover = super()._handover(key)
        if not self.task.layer:
            return handover
        earlier: Any = jax.ShapeDtypeStruct((key.shape.batch, self.task.layer), jnp.int32)
        return handover._replace(drafts=earlier)

    def _upstream(self, launch: Launch) -> tuple[Handover, tuple[int, ...]]:
        handover, after = super()._upstream(launch)
        if not self.task.layer:
            return handover, after
        before = launch.later[-1]
        return handover._replace(drafts=before.outputs.drafts), (*after, before.number)

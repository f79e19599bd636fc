"""Executes planned batches on the target model: picks the program, launches it, and hands the results on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from jaxserve.attention.base import StepShape
from jaxserve.barrier import journal
from jaxserve.core.errors import ConfigError
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.core.shapes import bucket_for, ceil_div
from jaxserve.runner.batch import StepBatch
from jaxserve.runner.buckets import Buckets
from jaxserve.runner.count_seeds import CountSeeds
from jaxserve.runner.launch import Launch
from jaxserve.runner.logit_controls import FREE, MASK_BITS, TokenMasks
from jaxserve.runner.model_runner import ModelRunner
from jaxserve.runner.phase_runner import PhaseRunner, Private
from jaxserve.runner.program_arguments import (
    PREP_ARGUMENTS,
    STEP_ARGUMENTS,
    STEP_DONATES,
    prep_arguments,
    step_arguments,
)
from jaxserve.runner.program_cache import ProgramCache
from jaxserve.runner.prompt_reader import PromptReader
from jaxserve.runner.step_program import (
    CHAIN,
    DraftForm,
    HostInputs,
    ProgramKey,
    RowSource,
    StepOutputs,
    make_prep_program,
    make_step_program,
)


class DraftSource(Protocol):
    """Who has the drafts that verify programs take.

    Attributes:
        runner: whose newest launch computes them.
        drafted: int32[slots + 1, D].
    """

    runner: ModelRunner

    @property
    def drafted(self) -> jax.Array: ...


class StepRunner(PhaseRunner):
    """Runs EXTEND, DECODE and TARGET_VERIFY steps of one model runner.

    Args:
        num_ids: token ids the tokenizer knows; vocabulary rows behind them are never sampled. None: all are known.
        drafts: what verify programs are compiled for.
        feature_points: where a draft model observes the target model, see ``models.draft``.

    Attributes:
        draft_source: who has the drafts that verify programs take, where drafts are RELAYED.
    """

    def __init__(self, runner: ModelRunner, buckets: Buckets, on_late_compile: Callable[[str], None],
                 num_ids: int | None = None, drafts: DraftForm = CHAIN,
                 feature_points: tuple[int, ...] = ()):  # fmt: skip
        super().__init__(runner, buckets)
        if runner.captured is not None and drafts.is_tree and any(runner.model.config.attention_windows):
            raise ConfigError(
                "--graph-backend cuda-graph verifies trees by one mask for all layers, and this model has windows; "
                "draft chains (--speculative-eagle-topk 1, --speculative-ngram-max-bfs-breadth 1), or choose xla-cmdbuf"
            )
        self.drafts = drafts
        self.num_ids = num_ids
        self.on_late_compile = on_late_compile
        self.draft_source: DraftSource | None = None
        self._feature_points = feature_points
        windows, vocab_size = runner.model.config.attention_windows, runner.model.config.vocab_size
        self._count_seeds = CountSeeds(runner.rows.layout.num_slots + 1, vocab_size, on_late_compile)
        self._prompt_reader = PromptReader(runner.model, runner.kv.dtype, num_ids, on_late_compile)
        self._mask_words = ceil_div(vocab_size, MASK_BITS)
        self._free_masks: dict[tuple[int, int], TokenMasks] = {}  # (rows, queries); nothing is sent when all are free
        self.steps = ProgramCache(
            "step",
            lambda key: make_step_program(key, self.backend, runner.model.bind, windows, num_ids, runner.captured),
            lambda key: step_arguments(
                key, runner.rows.layout, runner.model.leaves, runner.kv, vocab_size, buckets.most_drafts
            ),
            names=STEP_ARGUMENTS,
            donate=STEP_DONATES,
            late=on_late_compile,
            graph=runner.graph,
        )
        self.preps = ProgramCache(
            "prep",
            lambda key: make_prep_program(key, self.backend),
            lambda key: prep_arguments(key, runner.rows.layout),
            names=PREP_ARGUMENTS,
            donate=(),
            late=on_late_compile,
        )

    def _key(self, shape: StepShape, source: RowSource) -> ProgramKey:
        config = self.runner.config
        return ProgramKey(
            shape, source, end_record=self.runner.has_marker, hold_points=config.hold_points, noted=config.race_check,
            drafts=self.drafts if shape.mode is ForwardMode.TARGET_VERIFY else None,
            hands_over=self.drafts.is_relayed, hands_rows=self.drafts.hands_rows, feature_points=self._feature_points,
            takes_masks=config.grammar_backend is not None,
        )  # fmt: skip

    def sizes(self) -> list[tuple[ForwardMode, int, int, int]]:
        sizes = self.buckets.all_sizes()
        # Where every step verifies, no program decodes.
        return [size for size in sizes if not (self.drafts.is_relayed and size[0] is ForwardMode.DECODE)]

    def warm_up(self, progress: Callable[[str, float], None]) -> None:
        super().warm_up(progress)
        self._count_seeds.compile()
        self._count_seeds.warm = True
        self._prompt_reader.warm_up(self.buckets.prefill_tokens)

    def execute(self, batch: StepBatch, write_done: int, wants_logprobs: bool) -> Launch:
        """Launches a step and publishes its read-done event, if it has one. Returns without waiting for results.

        Args:
            batch: the plan.
            write_done: generation of the row writes the step must see (0: the rows are already there).
            wants_logprobs: whether the host will collect logprobs.

        Raises:
            FenceTimeout: the row writes did not come; nothing was launched.
            RetraceError: the batch does not fit the compiled program.
        """
        return self.execute_inputs(batch, *self.inputs(batch), write_done, wants_logprobs)

    def execute_inputs(
        self, batch: StepBatch, shape: StepShape, inputs: HostInputs, write_done: int, wants_logprobs: bool
    ) -> Launch:
        """As ``execute``, with the program shape and host inputs that ``inputs`` made of the batch."""
        for slot, history in batch.histories.items():
            relay = self.runner.relay
            counts = self._count_seeds.counted_anew(relay.token_counts, slot, history)
            self.runner.relay = relay._replace(token_counts=counts)
        drafted: jax.Array | None = None
        after: tuple[int, ...] = ()
        if self.draft_source is not None and batch.mode is ForwardMode.TARGET_VERIFY:
            drafted, after = self.draft_source.drafted, (self.draft_source.runner.newest_launch,)
        phase = self._launch(batch, shape, inputs, write_done, upstream=drafted, after=after)
        out: StepOutputs = phase.outputs
        assert phase.read_ends is not None
        launch = Launch(
            batch, phase.read_ends, phase.step_done, out.sampled, phase.read_done, wants_logprobs, out.counts,
            number=phase.number, handover=out.handover,
        )  # fmt: skip
        if batch.prompt_use is None:
            return launch
        try:
            assert out.hidden is not None
            return dataclasses.replace(launch, prompt=self._prompt_reader.read(batch, out.hidden, inputs))
        except BaseException:
            # The step fails, but what was launched runs, and reads rows that whoever recovers is about to write.
            journal.gave_up(launch.number)
            launch.settle(self.runner.config.fence_timeout_s)
            raise

    def _call(self, key: ProgramKey, operand: Any, inputs: HostInputs, private: Private, upstream: Any) -> StepOutputs:
        runner = self.runner
        tables = runner.rows.arrays()
        return self.steps.call(
            key, runner.model.leaves, runner.pool, runner.relay, operand, tables, inputs, private, upstream
        )

    def _call_prep(self, key: ProgramKey, operand: Any, inputs: HostInputs, upstream: Any) -> Private:
        lengths = self.runner.relay.lengths if key.drafts is not None and key.drafts.is_relayed else None
        return self.preps.call(key, operand, self.runner.rows.arrays(), inputs._replace(masks=None), lengths)

    def _keep(self, outputs: StepOutputs) -> jax.Array:
        self.runner.pool, self.runner.relay = outputs.pool, outputs.relay
        return outputs.sampled.tokens

    def inputs(self, batch: StepBatch) -> tuple[StepShape, HostInputs]:
        """The program shape of a batch and its private host inputs, padded to the bucket."""
        if batch.mode is ForwardMode.EXTEND:
            return self._prompt_inputs(batch)
        rows = bucket_for(len(batch.owners), self.buckets.decode_batch)
        queries = 1
        if batch.mode is ForwardMode.TARGET_VERIFY:
            queries = bucket_for(batch.queries, self.buckets.verify_tokens)
        shape = self._shape(batch.mode, rows, queries, batch.max_length)
        slots = self._padded_slots(batch, rows)
        nothing: Any = np.zeros(rows, np.int32)
        inputs = HostInputs(slots, nothing[:, None], nothing, slots, nothing, self._masks(batch, rows, queries))
        return shape, inputs

    def _prompt_inputs(self, batch: StepBatch) -> tuple[StepShape, HostInputs]:
        """``inputs`` of EXTEND. Padding rows have one token and the null slot."""
        assert batch.tokens is not None
        num_rows, longest = batch.tokens.shape
        rows, queries = self.buckets.prompt_size(num_rows, longest)
        tokens: Any = np.zeros((rows, queries), np.int32)
        counts: Any = np.ones(rows, np.int32)
        tokens[:num_rows, :longest] = batch.tokens
        counts[:num_rows] = longest if batch.num_tokens is None else batch.num_tokens
        slots = self._padded_slots(batch, rows)
        relay_slots = slots if batch.samples else np.full_like(slots, self.runner.rows.layout.null_slot)
        following: Any = np.full(rows, batch.next_token, np.int32)
        inputs = HostInputs(slots, tokens, counts, relay_slots, following, self._masks(batch, rows, 1))
        return self._shape(batch.mode, rows, queries, batch.max_length), inputs

    def _padded_slots(self, batch: StepBatch, rows: int) -> Any:
        slots = np.full(rows, self.runner.rows.layout.null_slot, np.int32)
        slots[: len(batch.slots)] = batch.slots
        return slots

    def _masks(self, batch: StepBatch, rows: int, queries: int) -> TokenMasks | None:
        """The masks of a launch, padded to its bucket."""
        if self.runner.config.grammar_backend is None:
            return None
        if batch.masks is None:
            key = rows, queries
            if key not in self._free_masks:
                words = np.full((rows * queries, self._mask_words), FREE, np.uint32)
                self._free_masks[key] = TokenMasks(*jax.device_put((words, np.int32(0), np.zeros(rows, bool))))
            return self._free_masks[key]
        padded = np.full((rows, queries, self._mask_words), FREE, np.uint32)
        padded[: batch.masks.shape[0], : batch.masks.shape[1]] = batch.masks
        undrafted = np.zeros(rows, bool)
        if batch.undrafted is not None:
            undrafted[: len(batch.undrafted)] = batch.undrafted
        return TokenMasks(padded.reshape(rows * queries, -1), np.int32(1), undrafted)  # type: ignore[arg-type]

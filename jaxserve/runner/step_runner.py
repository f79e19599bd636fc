"""Executes planned batches: picks the program, resolves where reads end, launches, publishes the read-done event."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from jaxserve.attention.base import AttentionBackend, SharedReadEnds, StepMetadata, StepRows, StepShape
from jaxserve.barrier import journal
from jaxserve.barrier.faults import pass_fault
from jaxserve.barrier.tickets import Event, launch_of, ticket_facts
from jaxserve.core.errors import FenceTimeout
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.core.shapes import bucket_for, ceil_div
from jaxserve.runner.batch import StepBatch
from jaxserve.runner.buckets import Buckets
from jaxserve.runner.count_seeds import CountSeeds
from jaxserve.runner.demotions import Demotions
from jaxserve.runner.launch import Launch
from jaxserve.runner.logit_controls import FREE, MASK_BITS, TokenMasks
from jaxserve.runner.model_runner import ModelRunner
from jaxserve.runner.program_arguments import STEP_DONATES, prep_arguments, step_arguments
from jaxserve.runner.program_cache import ProgramCache
from jaxserve.runner.step_program import (
    CHAIN,
    DraftForm,
    HostInputs,
    ProgramKey,
    RowSource,
    make_prep_program,
    make_step_program,
)
from jaxserve.timeline.recorder import RECORDER, Span, span


class StepRunner:
    """Runs EXTEND, DECODE and TARGET_VERIFY steps of one model runner.

    Args:
        num_ids: token ids the tokenizer knows; vocabulary rows behind them are never sampled. None: all are known.
        drafts: what verify programs are compiled for.

    Attributes:
        steps, preps: compiled programs.
        demotions: executions that did not get the read end their backend declared.

    Programs are keyed by shape; ``warm_up`` compiles all that the buckets allow, so that serving compiles nothing.
    """

    def __init__(self, runner: ModelRunner, buckets: Buckets, on_late_compile: Callable[[str], None],
                 num_ids: int | None = None, drafts: DraftForm = CHAIN):  # fmt: skip
        self.drafts = drafts
        self.runner = runner
        self.backend = runner.backend
        self.buckets = buckets
        windows = runner.model.config.attention_windows
        self.demotions = Demotions()
        self.steps = ProgramCache(
            "step",
            lambda key: make_step_program(key, self.backend, runner.model.bind, windows, num_ids),
            lambda key: step_arguments(
                key, runner.rows.layout, runner.model.leaves, runner.kv, runner.model.config.vocab_size
            ),
            donate=STEP_DONATES,
            late=on_late_compile,
        )
        self.preps = ProgramCache(
            "prep",
            lambda key: make_prep_program(key, self.backend),
            lambda key: prep_arguments(key, runner.rows.layout),
            donate=(),
            late=on_late_compile,
        )
        num_rows, vocab_size = runner.rows.layout.num_slots + 1, runner.model.config.vocab_size
        self._count_seeds = CountSeeds(num_rows, vocab_size, on_late_compile)
        self._mask_words = ceil_div(vocab_size, MASK_BITS)
        self._free_masks: dict[int, TokenMasks] = {}  # by rows; nothing has to be sent when nobody is constrained

    # -- where reads end -------------------------------------------------------------------------------------------

    def _resolve_shared_read_ends(self, forward_mode: ForwardMode) -> SharedReadEnds:
        """Where this execution's reads of shared rows end: what the backend says, asked once, with no gate on it.

        IN_REPLAY needs the marker. Without it the answer is PRE_REPLAY, made true by launching the backend's prep as a
        program of its own; reads that cannot be hoisted end with the program.
        """
        declared, resolved = self.read_ends(forward_mode)
        self.demotions.note(self.backend, forward_mode, declared, resolved)
        return resolved

    def read_ends(self, forward_mode: ForwardMode) -> tuple[SharedReadEnds, SharedReadEnds]:
        """What the backend declares, and what an execution makes of it; counts and logs nothing."""
        return resolve_read_ends(
            self.backend,
            forward_mode,
            has_marker=self.runner.has_marker,
            unsound=self.runner.config.compat_unsound_fallback,
        )

    def _row_source(self, ends: SharedReadEnds) -> RowSource:
        unsound = self.runner.config.compat_unsound_fallback and not self.runner.has_marker
        if ends is SharedReadEnds.PRE_REPLAY and not unsound:
            return RowSource.PRIVATE
        return RowSource.SNAPSHOT if self.runner.has_marker else RowSource.COPY

    # -- programs --------------------------------------------------------------------------------------------------

    def _shape(self, mode: ForwardMode, batch: int, queries: int, max_length: int) -> StepShape:
        width_tokens = self.buckets.width_for(max_length)
        page_size = self.runner.kv.page_size
        return StepShape(mode, batch, queries, ceil_div(width_tokens, page_size), page_size)

    def _key(self, shape: StepShape, source: RowSource) -> ProgramKey:
        config = self.runner.config
        return ProgramKey(
            shape, source, end_record=self.runner.has_marker, hold_points=config.hold_points, noted=config.race_check,
            drafts=self.drafts if shape.mode is ForwardMode.TARGET_VERIFY else None,
            takes_masks=config.grammar_backend is not None,
        )  # fmt: skip

    def _prep_key(self, shape: StepShape) -> ProgramKey:
        return self._key(shape, RowSource.SNAPSHOT if self.runner.has_marker else RowSource.COPY)

    def program_keys(self) -> tuple[list[ProgramKey], list[ProgramKey]]:
        """Keys of every (step, prep) program the buckets allow."""
        steps, preps = [], []
        for mode, batch, queries, tokens in self.buckets.all_sizes():
            shape = self._shape(mode, batch, queries, tokens)
            source = self._row_source(self.read_ends(mode)[1])
            steps.append(self._key(shape, source))
            if source is RowSource.PRIVATE:
                preps.append(self._prep_key(shape))
        return list(dict.fromkeys(steps)), list(dict.fromkeys(preps))

    def warm_up(self, progress: Callable[[str, float], None]) -> None:
        """Compiles every program the buckets allow; afterwards a compilation is an incident to be logged."""
        steps, preps = self.program_keys()
        self.steps.warm_up(steps, progress)
        self.preps.warm_up(preps, progress)
        self._count_seeds.compile()
        self.steps.warm = self.preps.warm = self._count_seeds.warm = True

    # -- execution -------------------------------------------------------------------------------------------------

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
        runner = self.runner
        runner.shared_read_done_event = None  # a phase starts: from here on an old event must not be found
        shape, inputs = self._inputs(batch)
        ends = self._resolve_shared_read_ends(batch.mode)
        source = self._row_source(ends)
        step_done = runner.channel.reserve_step_done()
        read_done = None
        private, after = None, [runner.newest_launch]
        try:
            if ends is not SharedReadEnds.UNKNOWN:
                read_done = runner.channel.reserve_read_done()
            if not runner.has_marker:
                self._await_writes(write_done)
            if source is RowSource.PRIVATE:
                private, prep = self._launch_prep(batch, shape, inputs, write_done, read_done, step_done)
                after.append(prep)
                write_done = 0  # the step itself reads no shared row
            if ends is SharedReadEnds.PRE_REPLAY:
                if not runner.has_marker and read_done is not None:
                    read_done.record()
                runner.shared_read_done_event = read_done
            ticket = runner.channel.ticket(
                write_done=write_done,
                marker=read_done if ends is SharedReadEnds.IN_REPLAY else None,
                end=read_done if ends is SharedReadEnds.POST_REPLAY else None,
                step_done=step_done,
                step_number=batch.step_number,
            )
            key, tables = self._key(shape, source), runner.rows.arrays()
            label = f"{runner.name}, {key.label}"
            pass_fault("launch", "step program")
            if batch.history is not None:
                counts = self._count_seeds.counted_anew(runner.relay.token_counts, int(batch.slots[0]), batch.history)
                runner.relay = runner.relay._replace(token_counts=counts)
            with self._span(label, batch, ticket), runner.channel.dispatching(ticket, label, after) as operand:
                out = self.steps.call(
                    key, runner.model.leaves, runner.pool, runner.relay, operand, tables, inputs, private
                )
            pass_fault("dispatched", "step program")
        except BaseException:
            # Nobody may wait for records that will never come, nor meet this phase's event.
            runner.shared_read_done_event = None
            for prep in after[1:]:
                journal.gave_up(prep)
            for event in (read_done, step_done):
                if event is not None:
                    event.abandon()
            raise
        runner.pool, runner.relay = out.pool, out.relay
        runner.newest_launch = launch_of(ticket)
        if runner.watcher is not None:
            late = [read_done] if read_done is not None and ends is SharedReadEnds.POST_REPLAY else []
            runner.watcher.watch(out.sampled.tokens, [*late, step_done], launch_of(ticket))
        if ends in (SharedReadEnds.IN_REPLAY, SharedReadEnds.POST_REPLAY):
            runner.shared_read_done_event = read_done
        return Launch(
            batch, ends, step_done, out.sampled, read_done, wants_logprobs, out.counts, number=launch_of(ticket)
        )

    def _await_writes(self, write_done: int) -> None:
        """Blocks until the row writes of a launch are done, for programs that cannot wait themselves.

        Raises:
            FenceTimeout: the schedule stream gave them up; its error says why.
        """
        rows = self.runner.rows
        if write_done and not Event(rows.write_done, write_done).sync(self.runner.config.fence_timeout_s):
            raise FenceTimeout(f"the row writes of this step were given up: {rows.stream.error}")

    def _launch_prep(
        self, batch: StepBatch, shape: StepShape, inputs: HostInputs, write_done: int, read_done: Event | None,
        step_done: Event,
    ) -> tuple[tuple[StepRows, StepMetadata], int]:  # fmt: skip
        """Launches the prep program: every read of a shared row happens in it, ahead of the step. Returns its outputs
        and its launch id.

        It has no end record. That its ticket names ``step_done`` matters if it fails: the step then never runs, and the
        prep's handler gives up both records.
        """
        runner = self.runner
        ticket = runner.channel.ticket(
            write_done=write_done, marker=read_done, end=None, step_done=step_done, step_number=batch.step_number
        )
        key = self._prep_key(shape)
        label = f"{runner.name} prep, {key.label}"
        pass_fault("launch", "prep program")
        with self._span(label, batch, ticket), runner.channel.dispatching(ticket, label) as operand:
            private = self.preps.call(key, operand, runner.rows.arrays(), inputs._replace(masks=None))
        if not runner.has_marker:
            try:
                jax.block_until_ready(
                    private
                )  # nothing inside the program can say that its reads ended; the host looks
            except BaseException:
                journal.gave_up(launch_of(ticket))
                raise
            journal.collected(launch_of(ticket))
        return private, launch_of(ticket)

    @staticmethod
    def _span(label: str, batch: StepBatch, ticket: np.ndarray) -> Span:
        """The host's span of a launch, with what the timeline says of its execution."""
        dispatch = span("dispatch", step=batch.step_number)
        if RECORDER.on:
            dispatch.note(program=label, mode=batch.mode.name, batch=len(batch.owners), **ticket_facts(ticket))
            if batch.mode is ForwardMode.TARGET_VERIFY:
                dispatch.note(tokens_per_row=batch.queries, drafted=batch.num_drafted)
        return dispatch

    def _inputs(self, batch: StepBatch) -> tuple[StepShape, HostInputs]:
        """The program shape of a batch and its private host inputs, padded to the bucket."""
        null = self.runner.rows.layout.null_slot
        if batch.mode is ForwardMode.EXTEND:
            assert batch.tokens is not None
            count = batch.tokens.shape[1]
            queries = bucket_for(count, self.buckets.prefill_tokens)
            shape = self._shape(batch.mode, 1, queries, batch.max_length)
            tokens = np.zeros((1, queries), np.int32)
            tokens[0, :count] = batch.tokens[0]
            relay_slots = batch.slots if batch.samples else np.array([null], np.int32)
            masks = self._masks(batch, 1, 1)
            return shape, HostInputs(batch.slots, tokens, np.int32(count), relay_slots, masks)  # type: ignore[arg-type]
        rows = bucket_for(len(batch.owners), self.buckets.decode_batch)
        queries = 1
        if batch.mode is ForwardMode.TARGET_VERIFY:
            queries = bucket_for(batch.queries, self.buckets.verify_tokens)
        shape = self._shape(batch.mode, rows, queries, batch.max_length)
        slots = np.full(rows, null, np.int32)
        slots[: len(batch.slots)] = batch.slots
        tokens = np.zeros((rows, 1), np.int32)
        masks = self._masks(batch, rows, queries)
        return shape, HostInputs(slots, tokens, np.int32(queries), slots, masks)  # type: ignore[arg-type]

    def _masks(self, batch: StepBatch, rows: int, queries: int) -> TokenMasks | None:
        """The masks of a launch, padded to its bucket."""
        if self.runner.config.grammar_backend is None:
            return None
        if batch.masks is None:
            if rows * queries not in self._free_masks:
                words = np.full((rows * queries, self._mask_words), FREE, np.uint32)
                self._free_masks[rows * queries] = TokenMasks(*jax.device_put((words, np.int32(0))))
            return self._free_masks[rows * queries]
        padded = np.full((rows, queries, self._mask_words), FREE, np.uint32)
        padded[: batch.masks.shape[0], : batch.masks.shape[1]] = batch.masks
        return TokenMasks(padded.reshape(rows * queries, -1), np.int32(1))  # type: ignore[arg-type]


def resolve_read_ends(backend: AttentionBackend, mode: ForwardMode, *, has_marker: bool,
                      unsound: bool = False) -> tuple[SharedReadEnds, SharedReadEnds]:  # fmt: skip
    """Where a backend declares that reads of shared rows end in ``mode``, and where they are taken to end.

    Args:
        has_marker: whether programs hold the read-done marker.
        unsound: ``compat_unsound_fallback``.
    """
    declared = backend.shared_read_ends(mode)
    if declared is SharedReadEnds.IN_REPLAY and not has_marker:
        hoistable = not backend.reads_live or unsound
        return declared, SharedReadEnds.PRE_REPLAY if hoistable else SharedReadEnds.POST_REPLAY
    return declared, declared

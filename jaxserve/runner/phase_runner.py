"""One phase of a step: resolves where its reads end, launches its programs, publishes the read-done event."""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxserve.attention.base import AttentionBackend, SharedReadEnds, StepMetadata, StepRows, StepShape
from jaxserve.barrier import journal
from jaxserve.barrier.faults import pass_fault
from jaxserve.barrier.tickets import Event, launch_of, ticket_facts
from jaxserve.core.errors import FenceTimeout
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.core.shapes import ceil_div
from jaxserve.runner.batch import StepBatch
from jaxserve.runner.buckets import Buckets
from jaxserve.runner.demotions import Demotions
from jaxserve.runner.launch import Phase
from jaxserve.runner.model_runner import ModelRunner
from jaxserve.runner.program_cache import ProgramCache
from jaxserve.runner.step_program import HostInputs, ProgramKey, RowSource
from jaxserve.timeline.recorder import RECORDER, Span, span

Private = tuple[StepRows, StepMetadata] | None


class PhaseRunner(ABC):
    """Launches programs of one model runner; subclasses say which, and what they are given.

    Attributes:
        steps, preps: compiled programs.
        demotions: executions that did not get the read end their backend declared.
        kind: what messages call its programs.

    Programs are keyed by shape; ``warm_up`` compiles all that the buckets allow, so that serving compiles nothing.
    """

    kind = "step"
    reads_shared_rows = True  # False: its programs work on rows that were handed to them
    steps: ProgramCache
    preps: ProgramCache

    def __init__(self, runner: ModelRunner, buckets: Buckets):
        self.runner = runner
        self.backend: AttentionBackend = runner.backend
        self.buckets = buckets
        self.demotions = Demotions()

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

    @abstractmethod
    def _key(self, shape: StepShape, source: RowSource) -> ProgramKey:
        """The key of a program."""

    @abstractmethod
    def sizes(self) -> list[tuple[ForwardMode, int, int, int]]:
        """(mode, batch, queries, width in tokens) of every program there is to be."""

    @functools.cached_property
    def has_greedy_programs(self) -> bool:
        """Whether batches that ask for nothing but likeliest tokens have programs of their own.

        On a GPU for the time they take, see ``runner.either``. On a CPU one program serves all, for what nobody wants
        is not run, unless the configuration says otherwise.
        Not asked when it is made: jax looks for devices then, and programs can be compiled for others.
        """
        return self.runner.config.greedy_programs or jax.default_backend() != "cpu"

    def _variants(self, key: ProgramKey) -> list[ProgramKey]:
        """The programs a key stands for: the one for whatever rows want first, the one for greedy rows last."""
        return [key, dataclasses.replace(key, is_greedy=True)] if self.has_greedy_programs else [key]

    def modes(self) -> list[ForwardMode]:
        """The forward modes there are programs for."""
        return list(dict.fromkeys(size[0] for size in self.sizes()))

    def _shape(self, mode: ForwardMode, batch: int, queries: int, max_length: int) -> StepShape:
        width_tokens = self.buckets.width_for(max_length)
        page_size = self.runner.kv.page_size
        return StepShape(mode, batch, queries, ceil_div(width_tokens, page_size), page_size)

    def _prep_key(self, shape: StepShape) -> ProgramKey:
        return self._key(shape, RowSource.SNAPSHOT if self.runner.has_marker else RowSource.COPY)

    def program_keys(self) -> tuple[list[ProgramKey], list[ProgramKey]]:
        """Keys of every (step, prep) program the buckets allow."""
        steps, preps = [], []
        for mode, batch, queries, tokens in self.sizes():
            shape = self._shape(mode, batch, queries, tokens)
            source = self._row_source(self.read_ends(mode)[1]) if self.reads_shared_rows else RowSource.HANDED
            steps += self._variants(self._key(shape, source))
            if source is RowSource.PRIVATE:
                preps.append(self._prep_key(shape))
        return list(dict.fromkeys(steps)), list(dict.fromkeys(preps))

    def warm_up(self, progress: Callable[[str, float], None]) -> None:
        """Compiles every program the buckets allow; afterwards a compilation is an incident to be logged."""
        steps, preps = self.program_keys()
        self.steps.warm_up(steps, progress)
        self.preps.warm_up(preps, progress)
        self.steps.warm = self.preps.warm = True

    # -- execution -------------------------------------------------------------------------------------------------

    @abstractmethod
    def _call(self, key: ProgramKey, operand: Any, inputs: HostInputs, private: Private, upstream: Any) -> Any:
        """Launches the phase's program."""

    @abstractmethod
    def _call_prep(self, key: ProgramKey, operand: Any, inputs: HostInputs, upstream: Any) -> Any:
        """Launches the program that reads for it."""

    @abstractmethod
    def _keep(self, outputs: Any) -> Any:
        """Takes over the device state in a launch's outputs; returns an array that is ready when the launch ended."""

    def _launch(
        self, batch: StepBatch, shape: StepShape, inputs: HostInputs, write_done: int, *, upstream: Any = None,
        after: tuple[int, ...] = (),
    ) -> Phase:  # fmt: skip
        """Launches a phase and publishes its read-done event, if it has one. Returns without waiting for results.

        Args:
            batch: the plan of the step.
            shape: of this phase's program.
            inputs: what the host sends.
            write_done: generation of the row writes the phase must see (0: it sees them, or reads none).
            upstream: outputs of other launches that its programs take.
            after: launch ids of those.

        Raises:
            FenceTimeout: the row writes did not come; nothing was launched.
            RetraceError: the batch does not fit the compiled program.
        """
        runner = self.runner
        runner.shared_read_done_event = None  # a phase starts: from here on an old event must not be found
        ends = self._resolve_shared_read_ends(shape.mode) if self.reads_shared_rows else None
        source = RowSource.HANDED if ends is None else self._row_source(ends)
        step_done = runner.channel.reserve_step_done()
        read_done = None
        private: Private = None
        preceding = [runner.newest_launch, *after]
        prep = 0
        try:
            if ends not in (None, SharedReadEnds.UNKNOWN):
                read_done = runner.channel.reserve_read_done()
            if not runner.has_marker:
                self._await_writes(write_done)
            if source is RowSource.PRIVATE:
                private, prep = self._launch_prep(
                    batch, shape, inputs, write_done, read_done, step_done, upstream, after
                )
                preceding.append(prep)
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
            key = self._variants(self._key(shape, source))[-1 if batch.is_greedy else 0]
            label = f"{runner.name}, {key.label}"
            pass_fault("launch", f"{self.kind} program")
            with self._span(label, batch, ticket), runner.channel.dispatching(ticket, label, preceding) as operand:
                outputs = self._call(key, operand, inputs, private, upstream)
            if source is RowSource.SNAPSHOT and runner.graph.holds_markers(shape.mode):
                # The graph's records are issued, and know no generations: whoever waits from now on finds these.
                for event in (read_done if ends is SharedReadEnds.IN_REPLAY else None, step_done):
                    if event is not None:
                        event.ring.note_graph_record(event.generation)
            pass_fault("dispatched", f"{self.kind} program")
        except BaseException:
            # Nobody may wait for records that will never come, nor meet this phase's event.
            runner.shared_read_done_event = None
            if prep:
                journal.gave_up(prep)
            for event in (read_done, step_done):
                if event is not None:
                    event.abandon()
            raise
        runner.newest_launch = launch_of(ticket)
        ready = self._keep(outputs)
        if runner.watcher is not None:
            late = [read_done] if read_done is not None and ends is SharedReadEnds.POST_REPLAY else []
            runner.watcher.watch(ready, [*late, step_done], launch_of(ticket))
        if ends in (SharedReadEnds.IN_REPLAY, SharedReadEnds.POST_REPLAY):
            runner.shared_read_done_event = read_done
        return Phase(outputs, ready, ends, read_done, step_done, launch_of(ticket))

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
        step_done: Event, upstream: Any, after: tuple[int, ...],
    ) -> tuple[Private, int]:  # fmt: skip
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
        preceding = [0, *after] if after else []  # it takes no pool
        pass_fault("launch", "prep program")
        with self._span(label, batch, ticket), runner.channel.dispatching(ticket, label, preceding) as operand:
            private = self._call_prep(key, operand, inputs, upstream)
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

"""A dispatched step, and how its results are read."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxserve.attention.base import SharedReadEnds
from jaxserve.barrier import journal
from jaxserve.barrier.faults import pass_fault
from jaxserve.barrier.tickets import Event
from jaxserve.runner.batch import StepBatch
from jaxserve.runner.handover import Handover
from jaxserve.runner.prompt_reader import PooledChunk, PromptScores
from jaxserve.runner.sampler import Sampled


@dataclass(frozen=True)
class StepResult:
    """Host copies of a step's results, one row per live batch row. Q is 1 outside TARGET_VERIFY.

    Attributes:
        counts: int32[B], tokens each row emits, at least 1; what lies behind them means nothing.
        tokens: int32[B, Q]; logprobs: float32[B, Q]; top_ids: int32[B, Q, 20]; top_logprobs: float32[B, Q, 20];
            finite: bool[B, Q]. The three about logprobs are empty unless they were asked for.
        prompt: what was read of a prompt chunk, as arrays of the host.
    """

    counts: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    finite: np.ndarray
    prompt: PromptScores | PooledChunk | None = None


class Phase(NamedTuple):
    """One launch of one runner; a step is one of them, or several in a row.

    Attributes:
        outputs: what its program returns.
        ready: an array that is ready when its program has ended.
        read_ends: where its reads of shared rows end, as resolved; None: it reads none.
        read_done: recorded there; None where nobody records that.
        step_done: recorded when its program ends.
        number: its launch id.
    """

    outputs: Any
    ready: jax.Array
    read_ends: SharedReadEnds | None
    read_done: Event | None
    step_done: Event
    number: int


@dataclass(frozen=True)
class Launch:
    """A step in flight.

    Attributes:
        batch: its plan.
        read_ends: where its reads of shared rows end, as resolved.
        step_done: recorded when its program ends; the full-execution fence.
        sampled, counts: device results, see ``StepOutputs``.
        read_done: recorded where those reads end; None where nobody records that.
        coarse_reason: why a worker cleared the mailbox after this launch, so that the full-execution fence is counted
            under that name (``ngram``). It becomes a label of ``jaxserve:fences_total``: few values, each a word.
            None: nothing to add to what the read ends say.
        number: its launch id.
        handover: what a draft model goes on from, on the device; None where there is none.
        later: what was launched after the target model's program, in order; ``read_ends``, ``read_done`` and
            ``step_done`` are those of the last one that reads shared rows.
        other_events: records of the others.
        prompt: what is read of a prompt chunk, on the device.
    """

    batch: StepBatch
    read_ends: SharedReadEnds
    step_done: Event
    sampled: Sampled
    read_done: Event | None
    wants_logprobs: bool = False
    counts: jax.Array | None = None
    coarse_reason: str | None = None
    number: int = 0
    handover: Handover | None = None
    later: tuple[Phase, ...] = ()
    other_events: tuple[Event, ...] = ()
    prompt: PromptScores | PooledChunk | None = None

    def followed_by(self, phase: Phase) -> Launch:
        """The step with one more phase, which ends it."""
        if phase.read_ends is None:
            return dataclasses.replace(
                self, later=(*self.later, phase), other_events=(*self.other_events, phase.step_done)
            )
        events = [event for event in (self.read_done, self.step_done) if event is not None]
        return dataclasses.replace(
            self, read_ends=phase.read_ends, read_done=phase.read_done, step_done=phase.step_done,
            later=(*self.later, phase), other_events=(*self.other_events, *events),
        )  # fmt: skip

    def is_done(self) -> bool:
        """Polls: the executions have ended, well or not."""
        phases = [(self.sampled.tokens, self.number), *((phase.ready, phase.number) for phase in self.later)]
        ended = all(ready.is_ready() for ready, _ in phases)  # type: ignore[attr-defined]
        if ended:
            for _, number in phases:
                journal.collected(number)
        return ended

    def settle(self, timeout_s: float) -> None:
        """Blocks until the execution has ended, well or not, but no longer than that; then gives up what it still owes.

        An execution that failed records nothing more, and what stands behind its records in the schedule stream may be
        what the next execution waits for.
        """
        deadline = time.monotonic() + timeout_s
        while not self.is_done() and time.monotonic() < deadline:
            time.sleep(0.001)
        for event in (*self.other_events, self.read_done, self.step_done):
            if event is not None:
                event.abandon()

    def collect(self) -> StepResult:
        """Blocks until the results are on the host. Raises whatever the execution raised."""
        pass_fault("collect", "results")
        num_rows = len(self.batch.owners)
        counts = np.ones(num_rows, np.int32) if self.counts is None else np.asarray(self.counts)[:num_rows]
        queries = 1 if self.counts is None else self.sampled.tokens.shape[0] // self.counts.shape[0]

        def fetch(values: jax.Array) -> np.ndarray:
            found = np.asarray(values)
            return found.reshape(-1, queries, *found.shape[1:])[:num_rows]

        tokens, finite = fetch(self.sampled.tokens), fetch(self.sampled.finite)
        journal.collected(self.number)
        if self.wants_logprobs:  # three more transfers, so only on request
            logprobs, top_ids, top_logprobs = (
                fetch(x) for x in (self.sampled.logprobs, self.sampled.top_ids, self.sampled.top_logprobs)
            )
        else:
            logprobs = top_ids = top_logprobs = np.zeros(0)
        prompt = None if self.prompt is None else type(self.prompt)(*(np.asarray(x) for x in self.prompt))
        return StepResult(counts, tokens, logprobs, top_ids, top_logprobs, finite, prompt)

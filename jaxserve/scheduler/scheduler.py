"""The engine's view of scheduling: sequences come and go, steps are planned, launched behind the barrier, committed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jaxserve.barrier.shared_rows import SharedRows
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.core.request import FinishReason, TokenLogprob
from jaxserve.core.sequence import Sequence, Status
from jaxserve.core.shapes import ceil_div
from jaxserve.runner.batch import StepBatch
from jaxserve.runner.buckets import Buckets
from jaxserve.runner.launch import Launch, StepResult
from jaxserve.runner.logit_controls import MASK_BITS
from jaxserve.runner.worker import TargetWorker
from jaxserve.scheduler.kv_memory import KVMemory
from jaxserve.scheduler.logprobs import keep_prompt_results, output_logprob
from jaxserve.scheduler.page_pool import PagePool
from jaxserve.scheduler.residency import Residency
from jaxserve.scheduler.step_planner import StepPlanner
from jaxserve.scheduler.token_masks import advance
from jaxserve.scheduler.waiting_queue import WaitingQueue
from jaxserve.scheduler.war_barrier import WarBarrier
from jaxserve.speculative.figures import VerifiedRow
from jaxserve.speculative.speculation import Speculation


@dataclass(frozen=True)
class Committed:
    """A token a step added to a sequence.

    Attributes:
        finite: false: the logits were not numbers and the token means nothing.
        length: tokens of the sequence, this one included.
        place: which of the tokens that this step added to the sequence, from 0.
        verified: the drafts it was among, or followed; None if the step had none for the sequence.
    """

    sequence: Sequence
    token_id: int
    logprob: TokenLogprob | None
    finite: bool
    length: int
    place: int = 0
    verified: VerifiedRow | None = None

    @property
    def is_draft(self) -> bool:
        """Whether it is a draft that held."""
        return self.verified is not None and self.place < self.verified.num_accepted


class Scheduler:
    """Who resides, what is planned, and the barrier that guards the rows both write."""

    def __init__(self, worker: TargetWorker, rows: SharedRows, memory: KVMemory, barrier: WarBarrier, *,
                 buckets: Buckets, longest_gap_s: float, vocab_size: int, eos_token_ids: tuple[int, ...] = (),
                 speculation: Speculation | None = None):  # fmt: skip
        self.speculation = speculation
        self.worker = worker
        self.rows = rows
        self.memory = memory
        self.barrier = barrier
        self.residency = Residency(rows, memory, vocab_size, eos_token_ids)
        mask_words = ceil_div(vocab_size, MASK_BITS)
        self.planner = StepPlanner(self.residency, buckets, longest_gap_s, mask_words, speculation)

    # -- entering and leaving ----------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence."""
        self.residency.add(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence: what is in flight for it will be dropped, its slot and pages return. Idempotent."""
        if sequence.status is Status.FINISHED:
            return
        if self.speculation is not None:
            self.speculation.forget(sequence)
        self.residency.finish(sequence, reason)

    def plan(self) -> StepBatch[Sequence] | None:
        """The next step, with the rows it needs written; None when nothing can be computed now."""
        return self.planner.plan()

    # -- launching and committing ------------------------------------------------------------------------------------

    def launch(self, batch: StepBatch[Sequence]) -> Launch:
        """Dispatches a planned step, then fences every later row write behind its reads."""
        wants_logprobs = any(s.request.params.logprobs is not None for s in batch.owners)
        launch = self.worker.execute(batch, self.rows.publish(), wants_logprobs)
        try:
            self._apply_war_barrier(launch)
            if batch.mode is ForwardMode.EXTEND:
                for sequence in batch.owners:
                    self.memory.share(sequence)
            self._retire(batch.owners)
        except BaseException:
            # Nobody will know of the launch. It reads the rows, which whoever recovers is about to write.
            launch.settle(self.rows.timeout_s)
            raise
        return launch

    def _apply_war_barrier(self, launch: Launch) -> None:
        self.barrier.apply(launch)

    def _retire(self, sequences: Iterable[Sequence]) -> None:
        """Frees slot and pages of sequences whose last step is launched, one step before its result is known.

        Only behind the barrier: the rows are cleared in place, and that launch is about to read them."""
        for sequence in sequences:
            if sequence.status is Status.RUNNING and sequence.fully_planned:
                self.residency.release(sequence)

    def commit(self, launch: Launch, result: StepResult) -> list[Committed]:
        """Applies a step's tokens to its sequences. Tokens of sequences that ended meanwhile are dropped."""
        batch: StepBatch[Sequence] = launch.batch
        keep_prompt_results(batch, result)
        if not batch.samples:
            return []
        committed = []
        for row, sequence in enumerate(batch.owners):
            sequence.num_in_flight -= 1
            sequence.awaits_verify = False
            if sequence.status is Status.FINISHED:
                continue
            count, num_relayed = int(result.counts[row]), 0
            if self.speculation is not None and self.speculation.is_relayed:
                num_relayed = 0 if batch.drafted is None else int(batch.drafted[row])
                sequence.num_scheduled -= batch.queries - count
                count = min(count, sequence.max_total - len(sequence.token_ids))  # not even drafts know the limit
            elif batch.mode is ForwardMode.TARGET_VERIFY:
                sequence.num_scheduled += count
            before = len(sequence.token_ids)
            sequence.token_ids += result.tokens[row, :count].tolist()
            if sequence.constraint is not None:
                advance(sequence.constraint, sequence.token_ids[before:])
            verified = None
            if self.speculation is not None:
                verified = self.speculation.committed(sequence, count, num_relayed)
            committed += [
                Committed(
                    sequence, sequence.token_ids[before + place], output_logprob(sequence, result, row, place),
                    bool(result.finite[row, place]), before + place + 1, place, verified,
                )
                for place in range(count)
            ]  # fmt: skip
        return committed

    def timed(self, batch: StepBatch[Sequence], seconds: float) -> None:
        """A step took ``seconds``, the host's share that nothing overlapped included. Later plans go by it."""
        self.planner.took(batch, seconds)

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def pool(self) -> PagePool:
        """The free pages."""
        return self.memory.pool

    @property
    def waiting(self) -> WaitingQueue:
        """Sequences that wait for a slot."""
        return self.residency.waiting

    @property
    def running(self) -> list[Sequence]:
        """Admitted sequences, in that order."""
        return self.residency.running

    @property
    def free_slots(self) -> list[int]:
        """Slots nobody has."""
        return self.residency.free_slots

    @property
    def num_preemptions(self) -> int:
        """Sequences whose slot and pages were taken away."""
        return self.residency.num_preemptions

    @property
    def step_number(self) -> int:
        """Of the newest plan."""
        return self.planner.step_number

    @property
    def has_work(self) -> bool:
        """Whether some sequence is not finished."""
        return bool(self.waiting or self.running)

    def check_integrity(self) -> None:
        """Raises JaxserveError if slots or pages were lost or doubled."""
        self.residency.check_integrity()

"""Decides what each step computes, and writes the plan into the shared rows.

A step is either one prefill chunk, or one token, or with speculation several, for every sequence that decodes; the two
alternate while both have work. Plans run ahead of results: a step is planned while the one before it runs, from what is
certain without its tokens. Drafts follow the newest token, so a verify step is planned only when that is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jaxserve.barrier.shared_rows import SharedRows
from jaxserve.core.errors import JaxserveError
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.core.request import FinishReason, TokenLogprob
from jaxserve.core.sequence import Sequence, Status
from jaxserve.core.shapes import ceil_div
from jaxserve.runner.batch import History, StepBatch
from jaxserve.runner.launch import Launch, StepResult
from jaxserve.runner.logit_controls import MASK_BITS
from jaxserve.runner.sampling_rows import bias_row, sampling_row
from jaxserve.runner.worker import TargetWorker
from jaxserve.scheduler.logprobs import keep_prompt_results, output_logprob, prompt_use
from jaxserve.scheduler.page_pool import PagePool
from jaxserve.scheduler.token_masks import advance, masks_of
from jaxserve.scheduler.war_barrier import WarBarrier
from jaxserve.speculative.figures import VerifiedRow
from jaxserve.speculative.speculation import Speculation
from jaxserve.speculative.trees import EMPTY


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
    """Waiting and running sequences, their pages and slots, and the barrier that guards the rows it writes."""

    def __init__(self, worker: TargetWorker, rows: SharedRows, pool: PagePool, barrier: WarBarrier, *,
                 chunk_size: int, vocab_size: int, eos_token_ids: tuple[int, ...] = (),
                 speculation: Speculation | None = None):  # fmt: skip
        self.speculation = speculation
        self.worker = worker
        self.rows = rows
        self.pool = pool
        self.barrier = barrier
        self.chunk_size = chunk_size
        self.vocab_size = vocab_size
        self._mask_words = ceil_div(vocab_size, MASK_BITS)
        self.eos_token_ids = eos_token_ids
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.free_slots = list(range(rows.layout.num_slots - 1, -1, -1))
        self.step_number = 0
        self.num_preemptions = 0
        self._decode_next = False  # a prefill chunk went last, so decoding sequences go first

    # -- entering and leaving ----------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence."""
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence: what is in flight for it will be dropped, its slot and pages return. Idempotent."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        if self.speculation is not None:
            self.speculation.forget(sequence)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Returns slot and pages. Sound while a launched step still reads them: the barrier of that launch is already
        ahead of every write issued from here on, and the pool is passed from step to step."""
        if sequence.slot is None:
            return
        slot, page_ids = sequence.slot, sequence.page_ids
        sequence.slot, sequence.page_ids = None, []
        self.free_slots.append(slot)
        self.pool.free(page_ids)
        self.rows.clear_slot(slot, len(page_ids))  # last: a failed write must not lose the slot or the pages

    # -- planning ----------------------------------------------------------------------------------------------------

    def plan(self) -> StepBatch[Sequence] | None:
        """The next step, with the rows it needs written; None when nothing can be computed now."""
        self._admit()
        prefill = self._next_prefill()
        decode = self._decodable()
        if prefill is not None and not (decode and self._decode_next):
            return self._plan_prefill(prefill)
        batch = self._plan_tokens(decode) if decode else None
        if batch is None and (prefill := self._next_prefill()) is not None:  # meanwhile
            return self._plan_prefill(prefill)
        return batch

    def _next_prefill(self) -> Sequence | None:
        return next((s for s in self.running if s.prefilling), None)

    def _decodable(self) -> list[Sequence]:
        return [s for s in self.running if not s.prefilling and not s.fully_planned]

    def _admit(self) -> None:
        """Moves waiting sequences to running, first come first served, while a slot and the prompt's pages are free."""
        while self.waiting and self.free_slots:
            sequence = self.waiting[0]
            if sequence.num_in_flight:  # preempted a moment ago; its last token is still to be committed
                return
            needed = ceil_div(len(sequence.token_ids) + 1, self.pool.page_size)
            pages = self.pool.allocate(min(needed, ceil_div(sequence.max_total, self.pool.page_size)))
            if pages is None:
                return
            self.waiting.popleft()
            sequence.status = Status.RUNNING
            sequence.slot = self.free_slots.pop()
            sequence.page_ids = pages
            sequence.num_scheduled = 0
            sequence.prefill_len = len(sequence.token_ids)
            self.running.append(sequence)
            self.rows.set_pages(sequence.slot, 0, pages)
            params = sequence.request.params
            sequence.is_counted = not params.has_penalties
            row = sampling_row(params, sequence.seed, self.vocab_size, sequence.prompt_len)
            self.rows.set_sampling(sequence.slot, *row)
            if (bias := bias_row(params, self.eos_token_ids)) is not None:
                self.rows.set_bias(sequence.slot, *bias)

    def _plan_prefill(self, sequence: Sequence) -> StepBatch[Sequence]:
        start = sequence.num_scheduled
        chunk = sequence.token_ids[start : min(start + self.chunk_size, sequence.prefill_len)]
        assert sequence.slot is not None
        slots = np.array([sequence.slot], np.int32)
        self.rows.set_lengths(slots, np.array([start], np.int32))
        sequence.num_scheduled += len(chunk)
        last = not sequence.prefilling
        sequence.num_in_flight += last
        self._decode_next = True
        history = None
        if not sequence.is_counted:
            history = History(np.array(sequence.token_ids, np.int32), sequence.prompt_len)
            sequence.is_counted = True
        return StepBatch(
            self._next_step(), ForwardMode.EXTEND, (sequence,), slots, start + len(chunk),
            tokens=np.array([chunk], np.int32), history=history, masks=self._masks([sequence]) if last else None,
            samples=last, next_token=-1 if last else sequence.token_ids[sequence.num_scheduled],
            prompt_use=prompt_use(sequence),
        )  # fmt: skip

    def _plan_tokens(self, sequences: list[Sequence]) -> StepBatch[Sequence] | None:
        """A decode or a verify step; None while it depends on tokens that are in flight.

        What a constrained sequence may say follows from its last token. The others wait with it: apart they would not
        be faster, a step takes as long with a row less, and it would be half as fast.
        """
        if any(s.constraint is not None and s.num_in_flight for s in sequences):
            return None
        if self.speculation is None:
            return self._plan_decode(sequences)
        if self.speculation.is_relayed:
            return self._plan_relayed(sequences, self.speculation.queries_for(sequences))
        if any(s.awaits_verify for s in sequences):
            return None
        queries = self.speculation.queries_for(sequences)
        if queries == 1:
            return self._plan_decode(sequences)
        if any(s.num_in_flight for s in sequences):
            return None
        return self._plan_verify(self.speculation, sequences, queries)

    def _plan_verify(
        self, speculation: Speculation, sequences: list[Sequence], queries: int
    ) -> StepBatch[Sequence] | None:
        trees = dict(zip(sequences, speculation.draft(sequences, queries - 1), strict=True))
        if not any(tree.tokens for tree in trees.values()):
            return self._plan_decode(sequences)
        ready = [s for s in sequences if self._grow(s)]
        ready = [s for s in ready if s.status is Status.RUNNING]
        self._decode_next = False
        if not ready:
            return None
        tokens = np.zeros((len(ready), queries - 1), np.int32)
        parents = np.full((len(ready), queries - 1), -1, np.int32)
        num_drafted = 0
        for row, sequence in enumerate(ready):
            tree = trees[sequence]
            if not self._allot(sequence, 1 + tree.depth):
                tree = EMPTY  # drafts are not worth another sequence's pages
            tokens[row, : len(tree.tokens)] = tree.tokens
            parents[row, : len(tree.parents)] = tree.parents
            num_drafted += len(tree.tokens)
            speculation.sent(sequence, tree)
        slots = np.array([s.slot for s in ready], np.int32)
        self.rows.set_lengths(slots, np.array([s.num_scheduled for s in ready], np.int32))
        self.rows.set_drafts(slots, tokens, parents)
        for sequence in ready:
            sequence.awaits_verify = True
            sequence.num_in_flight += 1
        longest = max(min(s.num_scheduled + queries, s.max_total) for s in ready)
        return StepBatch(
            self._next_step(), ForwardMode.TARGET_VERIFY, tuple(ready), slots, longest,
            queries=queries, num_drafted=num_drafted,
            masks=masks_of(ready, self._mask_words, list(zip(tokens, parents, strict=True)), queries),
        )  # fmt: skip

    def _plan_relayed(self, sequences: list[Sequence], queries: int) -> StepBatch[Sequence] | None:
        """A verify step whose drafts a draft model makes on the device. How many held in the steps in flight is not
        known, so room is made for all of them; ``num_scheduled`` counts them until the step is committed."""
        ready = [s for s in sequences if self._grow(s, queries)]
        ready = [s for s in ready if s.status is Status.RUNNING]
        self._decode_next = False
        if not ready:
            return None
        for sequence in ready:
            sequence.num_scheduled += queries
            sequence.num_in_flight += 1
        return StepBatch(
            self._next_step(), ForwardMode.TARGET_VERIFY, tuple(ready), np.array([s.slot for s in ready], np.int32),
            max(min(s.num_scheduled, s.max_total) for s in ready), queries=queries,
            num_drafted=len(ready) * (queries - 1), masks=self._masks(ready),
            undrafted=np.array([s.constraint is not None for s in ready]),  # no mask fits drafts nobody here knows
        )  # fmt: skip

    def _plan_decode(self, sequences: list[Sequence]) -> StepBatch[Sequence] | None:
        ready = [s for s in sequences if self._grow(s)]
        ready = [s for s in ready if s.status is Status.RUNNING]  # one that was ready may have been preempted since
        self._decode_next = False
        if not ready:
            return None
        slots = np.array([s.slot for s in ready], np.int32)
        self.rows.set_batch(slots)
        self.rows.set_lengths(slots, np.array([s.num_scheduled for s in ready], np.int32))
        for sequence in ready:
            sequence.num_scheduled += 1
            sequence.num_in_flight += 1
        return StepBatch(
            self._next_step(), ForwardMode.DECODE, tuple(ready), slots, max(s.num_scheduled for s in ready),
            masks=self._masks(ready),
        )  # fmt: skip

    def _masks(self, sequences: list[Sequence]) -> np.ndarray | None:
        return masks_of(sequences, self._mask_words)

    def _next_step(self) -> int:
        self.step_number += 1
        return self.step_number

    def _grow(self, sequence: Sequence, count: int = 1) -> bool:
        """Makes room for more tokens, taking pages from the youngest sequence when none is free."""
        while sequence.status is Status.RUNNING:
            if self._allot(sequence, count):
                return True
            self._preempt(next(s for s in reversed(self.running) if s.slot is not None))
        return False

    def _allot(self, sequence: Sequence, count: int) -> bool:
        """Makes room for ``count`` more tokens, none beyond its limit, from free pages; False, and nothing taken, when
        they do not suffice."""
        assert sequence.slot is not None
        first = len(sequence.page_ids)
        tokens = min(sequence.num_scheduled + count, sequence.max_total)
        missing = ceil_div(tokens, self.pool.page_size) - first
        if missing <= 0:
            return True
        pages = self.pool.allocate(missing)
        if pages is None:
            return False
        sequence.page_ids += pages  # before the write, which may fail: an owner knows its pages
        self.rows.set_pages(sequence.slot, first, pages)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Takes a sequence's slot and pages; it will be prefilled again, output included. The oldest sequence is only
        taken when it is alone, and then has the whole pool, so somebody always gets on."""
        self.running.remove(sequence)
        sequence.status = Status.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)
        self._release(sequence)

    # -- launching and committing ------------------------------------------------------------------------------------

    def launch(self, batch: StepBatch[Sequence]) -> Launch:
        """Dispatches a planned step, then fences every later row write behind its reads."""
        wants_logprobs = any(s.request.params.logprobs is not None for s in batch.owners)
        launch = self.worker.execute(batch, self.rows.publish(), wants_logprobs)
        try:
            self._apply_war_barrier(launch)
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
                self._release(sequence)

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
                num_relayed = batch.queries - 1
                sequence.num_scheduled -= batch.queries - count if num_relayed else 0
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

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether some sequence is not finished."""
        return bool(self.waiting or self.running)

    def check_integrity(self) -> None:
        """Raises JaxserveError if slots or pages were lost or doubled."""
        self.pool.check_integrity()
        owned = sum(len(s.page_ids) for s in (*self.running, *self.waiting))
        if owned != self.pool.num_usable - self.pool.num_free:
            raise JaxserveError(
                f"pages are lost: {self.pool.num_usable - self.pool.num_free} in use, sequences own {owned}"
            )
        held = [s.slot for s in self.running if s.slot is not None]
        slots = sorted(held + self.free_slots)
        if slots != list(range(self.rows.layout.num_slots)):
            raise JaxserveError(f"slots are inconsistent: {sorted(held)} held and {sorted(self.free_slots)} free")

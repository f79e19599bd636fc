"""Who waits, who runs, in which slot, and with which pages."""

from __future__ import annotations

import itertools

from jaxserve.barrier.shared_rows import SharedRows
from jaxserve.core.errors import JaxserveError
from jaxserve.core.request import FinishReason
from jaxserve.core.sequence import Sequence, Status
from jaxserve.runner.sampling_rows import bias_row, sampling_row
from jaxserve.scheduler.kv_memory import KVMemory
from jaxserve.scheduler.waiting_queue import WaitingQueue


class Residency:
    """Brings sequences in and out, and writes the rows that say where they are: block table, sampling, bias.

    Attributes:
        waiting: not admitted, or preempted.
        running: admitted, in that order; one whose last step is launched may have returned slot and pages.
        free_slots: slots nobody has.
        num_preemptions: sequences whose slot and pages were taken away.
    """

    def __init__(self, rows: SharedRows, memory: KVMemory, vocab_size: int, eos_token_ids: tuple[int, ...]):
        self.rows = rows
        self.memory = memory
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.free_slots = list(range(rows.layout.num_slots - 1, -1, -1))
        self.num_preemptions = 0
        self._arrivals = itertools.count()

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence."""
        sequence.arrival = next(self._arrivals)
        self.waiting.push(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence that has not ended: its slot and pages return."""
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Returns slot and pages. Sound while a launched step still reads them: the barrier of that launch is already
        ahead of every write issued from here on, and the pool is passed from step to step."""
        if sequence.slot is None:
            return
        slot, sequence.slot = sequence.slot, None
        self.free_slots.append(slot)
        num_pages = self.memory.release(sequence, is_sound=sequence.finish_reason != "error")
        self.rows.clear_slot(slot, num_pages)  # last: a failed write must not lose the slot or the pages

    def admit(self) -> None:
        """Moves waiting sequences to running, the most urgent first, while a slot and the prompt's pages are there."""
        while self.free_slots and (sequence := self.waiting.first()) is not None:
            if sequence.num_in_flight:  # preempted a moment ago; its last token is still to be committed
                return
            if not self.memory.admit(sequence):
                return
            self.waiting.remove(sequence)
            sequence.status = Status.RUNNING
            sequence.slot = self.free_slots.pop()
            sequence.prefill_len = len(sequence.token_ids)
            self.running.append(sequence)
            self.rows.set_pages(sequence.slot, 0, sequence.page_ids)
            params = sequence.request.params
            sequence.is_counted = not params.has_penalties
            row = sampling_row(params, sequence.seed, self.vocab_size, sequence.prompt_len)
            self.rows.set_sampling(sequence.slot, *row)
            if (bias := bias_row(params, self.eos_token_ids)) is not None:
                self.rows.set_bias(sequence.slot, *bias)

    def reuse(self, sequence: Sequence) -> None:
        """Ahead of a prompt chunk: skips what others have computed meanwhile."""
        first, pages = self.memory.reuse(sequence)
        assert sequence.slot is not None
        self.rows.set_pages(sequence.slot, first, pages)

    def grow(self, sequence: Sequence, count: int = 1) -> bool:
        """Makes room for more tokens, taking pages from the least urgent sequence when there are none."""
        while sequence.status is Status.RUNNING:
            if self.allot(sequence, count):
                return True
            self.preempt(max((s for s in self.running if s.slot is not None), key=lambda s: s.rank))
        return False

    def allot(self, sequence: Sequence, count: int) -> bool:
        """Makes room for ``count`` more tokens, none beyond its limit, without preempting; False, and nothing taken,
        when there is none."""
        assert sequence.slot is not None
        first = len(sequence.page_ids)
        pages = self.memory.extend(sequence, min(sequence.num_scheduled + count, sequence.max_total))
        if pages:
            self.rows.set_pages(sequence.slot, first, pages)
        return pages is not None

    def preempt(self, sequence: Sequence) -> None:
        """Takes a sequence's slot and pages; it will be prefilled again, output included. The most urgent sequence is
        only taken when it is alone, and then has the whole pool, so somebody always gets on."""
        self.running.remove(sequence)
        sequence.status = Status.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.push(sequence)
        self.release(sequence)

    def check_integrity(self) -> None:
        """Raises JaxserveError if slots or pages were lost or doubled."""
        self.memory.check_integrity([*self.running, *self.waiting])
        held = [s.slot for s in self.running if s.slot is not None]
        slots = sorted(held + self.free_slots)
        if slots != list(range(self.rows.layout.num_slots)):
            raise JaxserveError(f"slots are inconsistent: {sorted(held)} held and {sorted(self.free_slots)} free")

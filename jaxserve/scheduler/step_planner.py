"""Decides what each step computes, and writes the lengths and drafts it needs into the shared rows.

A step is either a prefill chunk, or what is left of several prompts, or one token, or with speculation several, for
every sequence that decodes; the two alternate while both have work. Plans run ahead of results: a step is planned while
the one before it runs, from what is certain without its tokens. Drafts follow the newest token, so a verify step is
planned only when that is known.
"""

from __future__ import annotations

import numpy as np

from jaxserve.core.forward_mode import ForwardMode
from jaxserve.core.sequence import Sequence, Status
from jaxserve.runner.batch import History, StepBatch
from jaxserve.runner.buckets import Buckets
from jaxserve.scheduler.chunk_sizes import ChunkSizes
from jaxserve.scheduler.logprobs import prompt_use
from jaxserve.scheduler.prompt_groups import PromptGroups
from jaxserve.scheduler.residency import Residency
from jaxserve.scheduler.token_masks import masks_of
from jaxserve.speculative.speculation import Speculation
from jaxserve.speculative.trees import EMPTY


class StepPlanner:
    """Plans steps for those who reside.

    Attributes:
        step_number: of the newest plan.
    """

    def __init__(self, residency: Residency, buckets: Buckets, longest_gap_s: float, mask_words: int,
                 speculation: Speculation | None):  # fmt: skip
        self.speculation = speculation
        self.residency = residency
        self.rows = residency.rows
        self._buckets = buckets
        self._chunks = ChunkSizes(buckets.prefill_steps, longest_gap_s)
        self._groups = PromptGroups(buckets, residency)
        self.step_number = 0
        self._mask_words = mask_words
        self._decode_next = False  # a prefill chunk went last, so decoding sequences go first
        self._shortest_next = False  # the chunk before was of the sequence whose turn it is

    def plan(self) -> StepBatch[Sequence] | None:
        """The next step, with the rows it needs written; None when nothing can be computed now."""
        self.residency.admit()
        prefill = self._next_prefill()
        decode = self._decodable()
        if prefill is not None and not (decode and self._decode_next):
            return self._plan_prefill(prefill, bool(decode))
        batch = self._plan_tokens(decode) if decode else None
        if batch is None and (prefill := self._next_prefill()) is not None:  # meanwhile
            return self._plan_prefill(prefill, bool(decode))
        return batch

    def _next_prefill(self) -> Sequence | None:
        """Whose chunk is next. The first in line and the one with the least left take turns: a short prompt does not
        wait for all of a long one, and a long one gets every second chunk however many short ones come."""
        prefilling = [s for s in self.residency.running if s.prefilling]
        if len(prefilling) < 2:
            return prefilling[0] if prefilling else None
        if self._shortest_next:
            return min(prefilling, key=lambda s: (s.prefill_len - s.num_scheduled, s.rank))
        return min(prefilling, key=lambda s: s.rank)

    def _decodable(self) -> list[Sequence]:
        return [s for s in self.residency.running if not s.prefilling and not s.fully_planned]

    def _plan_prefill(self, first: Sequence, others_decode: bool) -> StepBatch[Sequence]:
        """A chunk of ``first``, or all that is left of it and of others."""
        self.residency.reuse(first)
        most_tokens = self._chunks.most_tokens(others_decode)
        others = [s for s in self.residency.running if s.prefilling]
        group = self._groups.around(first, others, most_tokens)
        if len(group) == 1:
            most_tokens = min(most_tokens, self._buckets.prefill_tokens[-1])
        starts = [s.num_scheduled for s in group]
        chunks = [s.token_ids[n : min(n + most_tokens, s.prefill_len)] for s, n in zip(group, starts, strict=True)]
        slots = np.array([s.slot for s in group], np.int32)
        self.rows.set_lengths(slots, np.array(starts, np.int32))
        counts = np.array([len(chunk) for chunk in chunks], np.int32)
        tokens = np.zeros((len(group), counts.max()), np.int32)
        histories = {}
        for row, (sequence, chunk) in enumerate(zip(group, chunks, strict=True)):
            tokens[row, : len(chunk)] = chunk
            sequence.num_scheduled += len(chunk)
            if self.speculation is not None:
                sequence.num_drafts = self.speculation.num_relayed
            if not sequence.is_counted:
                assert sequence.slot is not None
                histories[sequence.slot] = History(np.array(sequence.token_ids, np.int32), sequence.prompt_len)
                sequence.is_counted = True
        last = not first.prefilling
        for sequence in group:
            sequence.num_in_flight += last
        self._decode_next = True
        self._shortest_next = not self._shortest_next
        return StepBatch(
            self._next_step(), ForwardMode.EXTEND, tuple(group), slots, max(s.num_scheduled for s in group),
            tokens=tokens, num_tokens=counts, histories=histories, masks=self._masks(group) if last else None,
            samples=last, next_token=-1 if last else first.token_ids[first.num_scheduled],
            prompt_use=prompt_use(first), is_greedy=not last or _all_greedy(group),
        )  # fmt: skip

    def took(self, batch: StepBatch[Sequence], seconds: float) -> None:
        """A step took ``seconds``, the host's share that nothing overlapped included. Later plans go by it."""
        if batch.tokens is not None:
            rows, tokens = self._buckets.prompt_size(*batch.tokens.shape)
            self._chunks.took(rows * tokens, seconds)
        if self.speculation is not None:
            self.speculation.timed(batch, seconds)

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
        ready = [s for s in sequences if self.residency.grow(s)]
        ready = [s for s in ready if s.status is Status.RUNNING]
        self._decode_next = False
        if not ready:
            return None
        tokens = np.zeros((len(ready), queries - 1), np.int32)
        parents = np.full((len(ready), queries - 1), -1, np.int32)
        num_drafted = 0
        for row, sequence in enumerate(ready):
            tree = trees[sequence]
            if not self.residency.allot(sequence, 1 + tree.depth):
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
            is_greedy=_all_greedy(ready),
        )  # fmt: skip

    def _plan_relayed(self, sequences: list[Sequence], queries: int) -> StepBatch[Sequence] | None:
        """A verify step whose drafts a draft model makes on the device. How many held in the steps in flight is not
        known, so room is made for all of them; ``num_scheduled`` counts them until the step is committed."""
        ready = [s for s in sequences if self.residency.grow(s, queries)]
        ready = [s for s in ready if s.status is Status.RUNNING]
        self._decode_next = False
        if not ready:
            return None
        # No mask fits drafts nobody here knows.
        drafted = np.array([0 if s.constraint is not None else min(s.num_drafts, queries - 1) for s in ready], np.int32)
        for sequence in ready:
            sequence.num_scheduled += queries
            sequence.num_in_flight += 1
            sequence.num_drafts = queries - 1
        return StepBatch(
            self._next_step(), ForwardMode.TARGET_VERIFY, tuple(ready), np.array([s.slot for s in ready], np.int32),
            max(min(s.num_scheduled, s.max_total) for s in ready), queries=queries,
            num_drafted=int(drafted.sum()), drafted=drafted, masks=self._masks(ready),
            undrafted=np.array([s.constraint is not None for s in ready]), is_greedy=_all_greedy(ready),
        )  # fmt: skip

    def _plan_decode(self, sequences: list[Sequence]) -> StepBatch[Sequence] | None:
        ready = [s for s in sequences if self.residency.grow(s)]
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
            masks=self._masks(ready), is_greedy=_all_greedy(ready),
        )  # fmt: skip

    def _masks(self, sequences: list[Sequence]) -> np.ndarray | None:
        return masks_of(sequences, self._mask_words)

    def _next_step(self) -> int:
        self.step_number += 1
        return self.step_number


def _all_greedy(sequences: list[Sequence]) -> bool:
    return all(s.constraint is None and s.request.params.takes_likeliest for s in sequences)

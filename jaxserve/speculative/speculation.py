"""Speculation as the scheduler sees it: whether to draft, what, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from jaxserve.core.forward_mode import ForwardMode
from jaxserve.core.sequence import Sequence
from jaxserve.core.shapes import bucket_for
from jaxserve.runner.batch import StepBatch
from jaxserve.runner.buckets import Buckets
from jaxserve.speculative.base import SpeculativeAlgorithm
from jaxserve.speculative.figures import SpeculationFigures, VerifiedRow
from jaxserve.speculative.pacing import Record, StepTimes, best_queries
from jaxserve.speculative.relayed_pacing import RelayedPacing
from jaxserve.speculative.trees import EMPTY, DraftTree, trimmed
from jaxserve.speculative.watch import AcceptanceWatch


class Speculation:
    """Drafts for the sequences of one engine.

    Args:
        algorithm: who drafts.
        buckets: sizes verify programs exist for.
        num_ids: ids below it may be drafted.
        relayed_depth: where drafts are made on the device and never pass the host, how many of them can hold; else 0.
        is_adaptive: whether the number of drafts follows what earlier ones brought; else every step that has drafts
            verifies as many as the largest program takes.

    Attributes:
        figures: of every sequence since warm-up.
    """

    def __init__(self, algorithm: SpeculativeAlgorithm, buckets: Buckets, num_ids: int, is_adaptive: bool,
                 relayed_depth: int = 0):  # fmt: skip
        self.algorithm = algorithm
        self.is_relayed = relayed_depth > 0
        self._relayed_depth = relayed_depth
        self.figures = SpeculationFigures()
        self.times = StepTimes()
        self._buckets = buckets
        self._num_ids = num_ids
        self.is_adaptive = is_adaptive
        self._records: dict[Sequence, Record] = {}
        self._observed: set[Sequence] = set()  # their prompts, too
        self._sent: dict[Sequence, DraftTree] = {}  # of the step in flight
        self._watch = AcceptanceWatch(algorithm.name)
        self._pacing = RelayedPacing({q: self._depth_of(q - 1) for q in buckets.verify_tokens}, self.times)

    def reset_figures(self) -> None:
        """Counts from zero."""
        self.figures = SpeculationFigures()

    def timed(self, batch: StepBatch, seconds: float) -> None:
        """A step took ``seconds``, the host's share that nothing overlapped included."""
        if batch.mode is not ForwardMode.EXTEND:
            rows = bucket_for(len(batch.owners), self._buckets.decode_batch)
            self.times.add(batch.queries, rows, seconds)

    @property
    def num_relayed(self) -> int:
        """Drafts a draft model leaves on the device behind a prompt."""
        return self._most_drafts if self.is_relayed else 0

    def _depth_of(self, num_drafts: int) -> int:
        """How many of a draft model's drafts can hold."""
        return min(num_drafts, self._relayed_depth)

    @property
    def _most_drafts(self) -> int:
        return self._buckets.verify_tokens[-1] - 1

    def queries_for(self, sequences: Many[Sequence]) -> int:
        """Tokens per row of these sequences' next step; 1: a plain step. Tokens in flight need not be known."""
        if not self.is_adaptive:
            return self._buckets.verify_tokens[-1]
        batch = bucket_for(len(sequences), self._buckets.decode_batch)
        if self.is_relayed:
            drafting = [self._record(s) for s in sequences if s.constraint is None]  # no mask fits the others' drafts
            return self._pacing.queries_for(drafting, len(sequences), batch)
        records = [self._record(s) for s in sequences]
        stale = [i for i, record in enumerate(records) if not record.predicted]
        if stale:
            trees = self._propose([sequences[i] for i in stale], [self._most_drafts] * len(stale), self._most_drafts)
            for i, tree in zip(stale, trees, strict=True):
                records[i].predicted = tree.first_path
        costs = {queries: self.times.cost(queries, batch) for queries in self._buckets.verify_tokens}
        return best_queries(records, self._buckets.verify_tokens, costs)

    def draft(self, sequences: Many[Sequence], num_drafts: int) -> list[DraftTree]:
        """Drafts behind each sequence's newest token, none that could go beyond its limit."""
        room = [s.max_total - len(s.token_ids) - 1 for s in sequences]  # the verify step adds one token of its own
        return self._propose(sequences, room, num_drafts)

    def sent(self, sequence: Sequence, tree: DraftTree) -> None:
        """These drafts of a sequence go into the next step."""
        self._sent[sequence] = tree

    def committed(self, sequence: Sequence, num_new: int, num_relayed: int = 0) -> VerifiedRow | None:
        """The last ``num_new`` tokens of a sequence were committed; returns what came of its drafts, if it had any.

        Args:
            num_relayed: drafts of the step that a draft model made on the device.
        """
        # Not from the records: with overlap a step is planned, and a record made, before the first token is known.
        is_new = sequence not in self._observed
        self._observed.add(sequence)
        if num_relayed:
            relayed, depth = VerifiedRow(num_relayed, num_new - 1), self._depth_of(num_relayed)
            self.figures.verified(relayed, depth)
            failed = int(relayed.num_accepted < depth)
            for record in (self._record(sequence), self._pacing.common):
                record.tried(relayed.num_accepted, failed)
            self._watch.committed(num_new, relayed.num_accepted, failed, verified=True)
            self.algorithm.observe(sequence.token_ids, len(sequence.token_ids) if is_new else num_new)
            return relayed
        record = self._record(sequence)
        tree = self._sent.pop(sequence, None)
        row = None
        if tree is not None and tree.tokens:
            row, depth = VerifiedRow(len(tree.tokens), num_new - 1), tree.depth
            held, failed = row.num_accepted, int(row.num_accepted < depth)
            record.predicted = []
            record.tried(held, failed)
            self.figures.verified(row, depth)
        else:
            held, failed = record.met(sequence.token_ids[-num_new:])
        self._watch.committed(num_new, held, failed, verified=row is not None)
        self.algorithm.observe(sequence.token_ids, len(sequence.token_ids) if is_new else num_new)
        return row

    def forget(self, sequence: Sequence) -> None:
        """A sequence ended."""
        self._records.pop(sequence, None)
        self._observed.discard(sequence)
        self._sent.pop(sequence, None)

    def _record(self, sequence: Sequence) -> Record:
        record = self._records.get(sequence)
        if record is None:
            record = self._pacing.new_record() if self.is_relayed else Record()
            self._records[sequence] = record
        return record

    def _propose(self, sequences: Many[Sequence], max_depths: list[int], num_drafts: int) -> list[DraftTree]:
        window = self.algorithm.context_window
        contexts = [np.array(s.token_ids[-window:] if window else s.token_ids, np.int32) for s in sequences]
        tokens, parents, counts = self.algorithm.propose(contexts, num_drafts)
        return [
            trimmed(tokens[i, : counts[i]], parents[i, : counts[i]], depth, self._num_ids) if depth > 0 else EMPTY
            for i, depth in enumerate(max_depths)
        ]

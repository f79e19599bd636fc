"""Sequences that wait for a slot, most urgent first."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from jaxserve.core.sequence import Sequence


class WaitingQueue:
    """Ordered by ``Sequence.rank``: priority (0 for all where it is not used), then arrival. A preempted sequence keeps
    its rank, so it comes before those that arrived after it. Every operation takes logarithmic time or less."""

    def __init__(self) -> None:
        self._waiting: dict[Sequence, None] = {}
        self._heap: list[tuple[tuple[int, int], int, Sequence]] = []  # those that left meanwhile included
        self._ties = itertools.count()

    def push(self, sequence: Sequence) -> None:
        """Adds a sequence."""
        self._waiting[sequence] = None
        heapq.heappush(self._heap, (sequence.rank, next(self._ties), sequence))

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence that waits. Raises KeyError if it does not."""
        del self._waiting[sequence]
        if len(self._heap) > 2 * len(self._waiting) + 64:
            self._heap = [(each.rank, next(self._ties), each) for each in self._waiting]
            heapq.heapify(self._heap)

    def first(self) -> Sequence | None:
        """The next one; None if nobody waits."""
        while self._heap and self._heap[0][2] not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

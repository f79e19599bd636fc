"""Counting values by bucket, cheaply: one thread adds, any thread reads. Plus how fast a count has grown lately."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from prometheus_client.utils import floatToGoString

# Buckets in seconds are vLLM's, with finer ones ahead of them: small models and accepted drafts are faster than those.
FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
PER_TOKEN_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_SECONDS = (
    0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def lengths_up_to(limit: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 ... up to ``limit``: buckets of token counts."""
    steps = (digit * 10**power for power in range(len(str(limit))) for digit in (1, 2, 5))
    return tuple(step for step in steps if step <= limit)


class Distribution:
    """How many values fell into each bucket.

    Attributes:
        total: the sum of all values.
    """

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]):
        self._bounds = tuple(bounds)  # upper ends, each in its bucket; one more bucket has none
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Counts one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, int]]:
        """(upper bound, values up to it), as Prometheus has it; the last bound is +Inf."""
        bounds = [*(floatToGoString(bound) for bound in self._bounds), "+Inf"]
        return list(zip(bounds, accumulate(list(self._counts)), strict=True))


class Pace:
    """How fast a count grew over the newest ``window_s`` seconds."""

    def __init__(self, window_s: float = 10.0, mark_every_s: float = 0.25):
        self._window_s, self._mark_every_s = window_s, mark_every_s
        self._marks: tuple[tuple[float, int], ...] = ()  # (time, count then), replaced as a whole: others read it
        self._next_s = 0.0

    def note(self, now_s: float, count: int) -> None:
        """Tells what the count is; call it ahead of what makes it grow. Costs a comparison most of the time."""
        if now_s >= self._next_s:
            self._next_s = now_s + self._mark_every_s
            recent = [mark for mark in self._marks if mark[0] >= now_s - self._window_s]
            self._marks = (*recent, (now_s, count))

    def per_second(self, now_s: float, count: int) -> float:
        """The pace as of ``now_s``; 0 when nothing has been noted within the window."""
        oldest = next((mark for mark in self._marks if mark[0] >= now_s - self._window_s), None)
        if oldest is None or now_s <= oldest[0]:
            return 0.0
        return (count - oldest[1]) / (now_s - oldest[0])

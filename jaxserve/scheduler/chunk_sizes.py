"""How many prompt tokens a step computes: all that fit, unless somebody would wait too long for a next token."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from jaxserve.core.shapes import bucket_for

SAMPLES = 9  # step times kept per size; their median is used
LITTLE_GAINED = 1.25  # where no size keeps the bound, the largest of those that take up to this much of the least time


class ChunkSizes:
    """Sizes of prompt chunks, with what they take.

    A chunk holds up everybody who decodes. While somebody does, it is the largest that is expected to take no longer
    than the bound; the times are measured while serving. Nobody there: the largest.
    """

    def __init__(self, sizes: Sequence[int], longest_s: float):
        """
        Args:
            sizes: tokens of the prefill programs, rising.
            longest_s: seconds a chunk may hold up those who decode; 0: any time.
        """
        self._sizes = sizes
        self._longest_s = longest_s
        self._seconds: dict[int, deque[float]] = {}

    def took(self, num_tokens: int, seconds: float) -> None:
        """A chunk of ``num_tokens`` took ``seconds``. The first of its size is not believed: it may compile or tune."""
        size = bucket_for(num_tokens, self._sizes)
        if size in self._seconds:
            self._seconds[size].append(seconds)
        else:
            self._seconds[size] = deque(maxlen=SAMPLES)

    def most_tokens(self, others_decode: bool) -> int:
        """Of the next chunk."""
        if not others_decode or not self._longest_s:
            return self._sizes[-1]
        expected = self._expected()
        bound = max(self._longest_s, LITTLE_GAINED * min(expected.values()))
        return max(size for size, seconds in expected.items() if seconds <= bound)

    def _expected(self) -> dict[int, float]:
        """Seconds of a chunk of each size; 0.0 where nothing is known.

        Larger chunks cost less a token, so the smaller ones limit what a larger one can take: that corrects a size that
        was slow by chance and is not used since. A size below all known ones is taken for as cheap as its tokens.
        """
        known = {size: statistics.median(seconds) for size, seconds in self._seconds.items() if seconds}
        expected = {}
        for size in self._sizes:
            below = [seconds * size / other for other, seconds in known.items() if other <= size]
            above = [seconds * size / other for other, seconds in sorted(known.items()) if other > size]
            expected[size] = min(below) if below else above[0] if above else 0.0
        return expected

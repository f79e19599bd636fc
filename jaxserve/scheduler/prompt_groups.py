"""Which prompts are read together by one step.

A step costs about as much as LAUNCH_TOKENS tokens before its first one, for the weights are read once whatever their
number. So short prompts gain by company, as far as the padding of the program for several prompts costs less.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxserve.core.sequence import Sequence
from jaxserve.core.shapes import bucket_for
from jaxserve.runner.buckets import Buckets
from jaxserve.scheduler.logprobs import prompt_use
from jaxserve.scheduler.residency import Residency

LAUNCH_TOKENS = 16  # measured on two CPU cores, see docs/performance.md; more on a GPU, where padding matters less


class PromptGroups:
    """Chooses company for a prompt whose turn it is."""

    def __init__(self, buckets: Buckets, residency: Residency):
        self._buckets = buckets
        self._residency = residency

    def around(self, first: Sequence, others: Iterable[Sequence], most_tokens: int) -> list[Sequence]:
        """``first`` and those of ``others``, the most urgent ones, whose prompts are read in the same step.

        Only what ends its prompt is read in company. Prompts that one would find in the cache once the other is read
        are not: they are read one after the other.

        Args:
            others: admitted sequences with something to prefill.
            most_tokens: that the step may compute, padding included.
        """
        sizes = [
            (tokens, rows) for tokens, rows in self._buckets.prompt_rows.items()
            if rows * tokens <= most_tokens and self._left(first) <= tokens
        ]  # fmt: skip
        if not sizes or prompt_use(first) is not None:
            return [first]
        largest = max(tokens for tokens, _ in sizes)
        candidates: list[Sequence] = []
        for sequence in sorted(others, key=lambda s: s.rank):
            if sequence is first or prompt_use(sequence) is not None:
                continue
            self._residency.reuse(sequence)
            if self._left(sequence) <= largest:
                candidates.append(sequence)
        best, best_gain = [first], 0
        for tokens, rows in sizes:
            group = self._filled(first, candidates, tokens, rows)
            apart = sum(bucket_for(self._left(s), self._sizes) + LAUNCH_TOKENS for s in group)
            gain = apart - (tokens * rows + LAUNCH_TOKENS)
            if len(group) > 1 and gain > best_gain and bucket_for(max(map(self._left, group)), self._sizes) == tokens:
                best, best_gain = group, gain
        return best

    @property
    def _sizes(self) -> tuple[int, ...]:
        return self._buckets.prefill_tokens

    def _filled(self, first: Sequence, candidates: list[Sequence], tokens: int, rows: int) -> list[Sequence]:
        group = [first]
        for sequence in candidates:
            if len(group) == rows:
                break
            fits = self._left(sequence) <= tokens
            if fits and not any(self._residency.memory.would_share(member, sequence) for member in group):
                group.append(sequence)
        return group

    @staticmethod
    def _left(sequence: Sequence) -> int:
        """Tokens it has to prefill yet."""
        return sequence.prefill_len - sequence.num_scheduled

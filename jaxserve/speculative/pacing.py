"""How many drafts are worth verifying, from what came of earlier ones and from what steps cost.

A verify step of Q tokens costs c(Q) plain steps and emits one token and the accepted drafts. With p the chance that a
draft holds if the one before it did, n drafts are worth p + p^2 + ... + p^n tokens (Leviathan et al., 2023, eq. 1).
The Q with the most tokens per cost is chosen; Q = 1 is the plain step.

p is learned without speculating, too: while a sequence decodes plainly, what would have been drafted is compared with
the tokens that come.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

PRIOR_HITS, PRIOR_TRIALS = 0.8, 2.0  # a new sequence's p is 0.4: too little to speculate on, little enough to rise soon
MEMORY = 24.0  # trials after which older ones count less
GAIN_WANTED = 1.05  # drafts must promise this much over the plain step: their cost and chance are estimates
SAMPLES = 9  # step times kept per size; their median is used
PRIOR_COST_PER_TOKEN = 0.05  # of a plain step, for sizes that have hardly run yet: low, so that they are tried
LEAST_SAMPLES = 3  # before they are believed: a size whose first step was slow by chance would never be tried again


@dataclass
class Record:
    """What came of one sequence's drafts.

    Attributes:
        predicted: tokens expected next, of drafts that were not sent.
        hits, trials: drafts that held, and drafts whose predecessors held; older ones fade.
        memory: trials after which they do.
    """

    predicted: list[int] = field(default_factory=list)
    hits: float = PRIOR_HITS
    trials: float = PRIOR_TRIALS
    memory: float = MEMORY

    @property
    def chance(self) -> float:
        """Estimate of p."""
        return self.hits / self.trials

    def tried(self, held: int, failed: int) -> None:
        """Adds drafts that held and (0 or 1) one that did not."""
        self.hits += held
        self.trials += held + failed
        if self.trials > self.memory:
            self.hits *= self.memory / self.trials
            self.trials = self.memory

    def met(self, tokens: Iterable[int]) -> tuple[int, int]:
        """Compares tokens that came without speculation with what was expected; returns how many held and failed."""
        held = failed = 0
        for token in tokens:
            if not self.predicted:
                break
            if self.predicted.pop(0) == token:
                held += 1
            else:
                failed += 1
                self.predicted = []
        self.tried(held, failed)
        return held, failed


class StepTimes:
    """Seconds of steps, by tokens per row and batch bucket."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=SAMPLES))

    def add(self, queries: int, batch: int, seconds: float) -> None:
        """A step took ``seconds``."""
        self._seconds[queries, batch].append(seconds)

    def count(self, queries: int, batch: int) -> int:
        """Steps that are remembered."""
        return len(self._seconds.get((queries, batch), ()))

    def cost(self, queries: int, batch: int) -> float:
        """A step of ``queries`` tokens per row, in plain steps of the same batch."""
        if queries == 1:
            return 1.0
        wide, plain = self._seconds.get((queries, batch)), self._seconds.get((1, batch))
        if not wide or not plain or len(wide) < LEAST_SAMPLES:
            return 1 + PRIOR_COST_PER_TOKEN * (queries - 1)
        return statistics.median(wide) / statistics.median(plain)


def best_queries(records: Sequence[Record], sizes: Sequence[int], costs: dict[int, float]) -> int:
    """Tokens per row of the next step: 1, or one of ``sizes``.

    Args:
        records: the sequences that decode together. One without a prediction has nothing to draft.
        sizes: tokens per row verify programs exist for.
        costs: size -> cost in plain steps.
    """
    expected = {q: sum(1 + worth(r.chance, min(q - 1, len(r.predicted))) for r in records) for q in sizes}
    return most_per_cost(len(records), expected, costs)


def most_per_cost(num_rows: int, expected: Mapping[int, float], costs: Mapping[int, float]) -> int:
    """The size with the most tokens per cost; 1 if none is worth its risk.

    Args:
        expected: tokens per row -> tokens a step of that size brings all ``num_rows`` rows.
        costs: tokens per row -> cost in plain steps.
    """
    best, most = 1, GAIN_WANTED * num_rows
    for queries, tokens in expected.items():
        if tokens / costs[queries] > most:
            best, most = queries, tokens / costs[queries]
    return best


def worth(chance: float, num_drafts: int) -> float:
    """Drafts expected to hold, of a chain of ``num_drafts``."""
    if chance >= 1.0:
        return float(num_drafts)
    return chance * (1 - chance**num_drafts) / (1 - chance)

"""How many drafts a draft model makes behind a step, for the next one to verify.

As in ``pacing``, the size with the most tokens per cost is chosen, and one token per row is the plain step. But of
drafts that were not made nothing can be learned, and none are made behind a plain step. So now and then a few steps are
run at another size: they tell what it costs, and whether drafts hold by now. Each such burst waits longer than the one
before, and new sequences, which may be of another kind, bring the next one closer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxserve.speculative.pacing import LEAST_SAMPLES, PRIOR_TRIALS, Record, StepTimes, most_per_cost, worth

BURST = 3  # steps; behind a plain step the first has no drafts to verify
SHORTEST_WAIT, LONGEST_WAIT = 24, 256  # steps between bursts: the longest costs a hundredth, the shortest hardly hurts
COMMON_MEMORY = 500.0  # trials of all sequences together


class RelayedPacing:
    """Chooses the tokens per row of verify steps whose drafts a draft model makes.

    Args:
        depths: tokens per row of each program there is -> drafts in a row that makes; 1 -> 0 among them.
        times: what steps took.

    Attributes:
        common: what came of the drafts of all sequences.
    """

    def __init__(self, depths: Mapping[int, int], times: StepTimes):
        self._depths = dict(depths)
        self._times = times
        self.common = Record(memory=COMMON_MEMORY)
        self._wait, self._since_burst = SHORTEST_WAIT, 0
        self._burst_size, self._burst_left, self._turn = 1, 0, 0

    def new_record(self) -> Record:
        """Of a sequence that begins: it is expected to do as others did."""
        self._wait = max(SHORTEST_WAIT, self._wait // 2)
        return Record(hits=PRIOR_TRIALS * self.common.chance, trials=PRIOR_TRIALS)

    def queries_for(self, records: Sequence[Record], num_rows: int, batch: int) -> int:
        """Tokens per row of the next step.

        Args:
            records: of the sequences whose drafts may hold.
            num_rows: sequences that decode together.
            batch: rows of the program.
        """
        if not records or self._times.count(1, batch) < LEAST_SAMPLES:
            return 1
        if self._burst_left:
            self._burst_left -= 1
            return self._burst_size
        expected = {q: num_rows + sum(worth(r.chance, depth) for r in records) for q, depth in self._depths.items()}
        costs = {q: self._times.cost(q, batch) for q in self._depths}
        best = most_per_cost(num_rows, expected, costs)
        self._since_burst += 1
        if self._since_burst < self._wait:
            return best
        others = [q for q in self._depths if q != best]
        self._burst_size, self._burst_left = others[self._turn % len(others)], BURST - 1
        self._turn, self._since_burst, self._wait = self._turn + 1, 0, min(LONGEST_WAIT, 2 * self._wait)
        return self._burst_size

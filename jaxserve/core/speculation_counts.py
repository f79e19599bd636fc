"""What speculation did for an output, as its client is told."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any


@dataclass(frozen=True)
class SpeculationCounts:
    """Counts of one output, or of several together, over its verified rows (its drafts of one step).

    Drafts that held but lie behind the token that ended the output are not in it, so they are not accepted here.

    Attributes:
        num_drafted: drafts that were verified.
        num_emitted: tokens of the output that came from verified rows: accepted drafts, and the target model's own.
        rows_by_accepted: entry i is the number of rows of which i drafts became tokens of the output.
    """

    num_drafted: int = 0
    num_emitted: int = 0
    rows_by_accepted: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        """Verified rows."""
        return sum(self.rows_by_accepted)

    @property
    def num_accepted(self) -> int:
        """Drafts that became tokens of the output."""
        return sum(accepted * rows for accepted, rows in enumerate(self.rows_by_accepted))

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of the drafts, 0 to 1; 0 before the first."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Tokens a verified row gave the output on average, the target model's own included; 0 before the first."""
        num_rows = self.num_rows
        return self.num_emitted / num_rows if num_rows else 0.0

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "num_rows": self.num_rows,
            "num_drafted": self.num_drafted,
            "num_accepted": self.num_accepted,
            "num_emitted": self.num_emitted,
            "rows_by_accepted": list(self.rows_by_accepted),
            "mean_accepted_length": self.mean_accepted_length,
        }

    def with_row(self, num_drafted: int, num_accepted: int, num_emitted: int) -> SpeculationCounts:
        """These counts and one more row."""
        rows = list(self.rows_by_accepted)
        rows.extend([0] * (num_accepted + 1 - len(rows)))
        rows[num_accepted] += 1
        return SpeculationCounts(self.num_drafted + num_drafted, self.num_emitted + num_emitted, tuple(rows))

    def __add__(self, other: SpeculationCounts) -> SpeculationCounts:
        rows = zip_longest(self.rows_by_accepted, other.rows_by_accepted, fillvalue=0)
        return SpeculationCounts(
            self.num_drafted + other.num_drafted, self.num_emitted + other.num_emitted, tuple(a + b for a, b in rows)
        )


def total(counts: list[SpeculationCounts]) -> SpeculationCounts | None:
    """All of them together; None for none, which is what outputs without speculation have."""
    return sum(counts[1:], start=counts[0]) if counts else None

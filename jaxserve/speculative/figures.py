"""How well drafts do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

RECENT_ROWS = 1000.0  # verified rows after which older ones count less for the recent figures


class VerifiedRow(NamedTuple):
    """What came of one sequence's drafts in one verify step.

    Attributes:
        num_drafted: drafts verified (nodes of a tree).
        num_accepted: drafts that held; the row emitted one token more.
    """

    num_drafted: int
    num_accepted: int


class _Rates:
    """What follows from counts of rows, drafts and accepted drafts."""

    num_rows: float
    num_drafted: float
    num_accepted: float

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of the drafts, 0 to 1; 0 before the first."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Tokens a verified row emits on average, the target model's own included; 0 before the first."""
        return 1 + self.num_accepted / self.num_rows if self.num_rows else 0.0


@dataclass(frozen=True)
class RecentFigures(_Rates):
    """Counts of the newest verified rows; older ones fade. Immutable, so another thread may read it any time."""

    num_rows: float = 0.0
    num_drafted: float = 0.0
    num_accepted: float = 0.0

    def with_row(self, row: VerifiedRow) -> RecentFigures:
        """These counts and one more row."""
        keep = min(1.0, RECENT_ROWS / (self.num_rows + 1))
        return RecentFigures(
            keep * (self.num_rows + 1),
            keep * (self.num_drafted + row.num_drafted),
            keep * (self.num_accepted + row.num_accepted),
        )


@dataclass
class SpeculationFigures(_Rates):
    """Counts of verified rows: one row is one sequence in one verify step.

    Raw: accepted drafts are counted as verified, whether or not they are delivered; those behind the token that ended
    an output are not. ``SpeculationCounts`` counts what was.

    Attributes:
        num_rows: verified rows.
        num_drafted: drafts proposed (nodes of trees).
        num_accepted: drafts accepted.
        drafted_at, accepted_at: rows whose drafts reach that many tokens beyond the newest one (index 0: one), and rows
            in which the draft there was accepted.
        recent: of the newest rows.
    """

    num_rows: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    recent: RecentFigures = field(default_factory=RecentFigures)

    def verified(self, row: VerifiedRow, depth: int) -> None:
        """Adds a row whose drafts reach ``depth`` tokens beyond the newest one."""
        self.num_rows += 1
        self.num_drafted += row.num_drafted
        self.num_accepted += row.num_accepted
        for counts, reached in ((self.drafted_at, depth), (self.accepted_at, row.num_accepted)):
            counts.extend([0] * (depth - len(counts)))
            for position in range(reached):
                counts[position] += 1
        self.recent = self.recent.with_row(row)

    @property
    def rate_per_position(self) -> list[float]:
        """Accepted share at each distance from the newest token. Another thread may ask."""
        accepted_at = list(self.accepted_at)  # first, as it grows last: never longer, nor its counts larger
        return [a / d if d else 0.0 for a, d in zip(accepted_at, list(self.drafted_at), strict=False)]

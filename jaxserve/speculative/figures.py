"""How well drafts do."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SpeculationFigures:
    """Counts of verified rows: one row is one sequence in one verify step.

    Accepted drafts are counted as verified, whether or not they are delivered: those behind an end-of-sequence token
    are not. Tokens delivered are counted where outputs are.

    Attributes:
        num_rows: verified rows.
        num_drafted: drafts proposed (nodes of trees).
        num_accepted: drafts accepted.
        drafted_at, accepted_at: rows whose drafts reach that many tokens beyond the newest one (index 0: one), and rows
            in which the draft there was accepted.
    """

    num_rows: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def verified(self, num_drafted: int, depth: int, num_accepted: int) -> None:
        """A row with ``num_drafted`` drafts, of which ``num_accepted`` in a path of up to ``depth`` held."""
        self.num_rows += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        for counts, reached in ((self.drafted_at, depth), (self.accepted_at, num_accepted)):
            counts.extend([0] * (depth - len(counts)))
            for position in range(reached):
                counts[position] += 1

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of the drafts, 0 to 1; 0 before the first."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Tokens a verified row emits on average, the target model's own included; 0 before the first."""
        return 1 + self.num_accepted / self.num_rows if self.num_rows else 0.0

    @property
    def rate_per_position(self) -> list[float]:
        """Accepted share at each distance from the newest token."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]

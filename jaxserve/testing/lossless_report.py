"""What a losslessness check found."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from jaxserve.core.errors import JaxserveError


class LosslessError(JaxserveError, AssertionError):
    """Two ways of decoding that must say the same do not; the message says where."""


@dataclass(frozen=True)
class Difference:
    """The first token of an output that is not that of plain decoding.

    Attributes:
        prompt: index of the prompt.
        position: index of the token in the output.
        wanted, got: token ids, of plain decoding and of the other way.
        margin: nats by which plain decoding preferred ``wanted``, random numbers of a sampled token included; infinite
            if ``got`` is not among the tokens whose probability it reports.
        is_tie: whether that is less than the tie margin, so that rounding may decide.
    """

    prompt: int
    position: int
    wanted: int
    got: int
    margin: float
    is_tie: bool

    def __str__(self) -> str:
        margin = f"by {self.margin:.2g} nats" if math.isfinite(self.margin) else "by far"
        return (
            f"prompt {self.prompt}, token {self.position}: got {self.got}, plain decoding says {self.wanted} ({margin})"
        )


@dataclass
class Comparison:
    """One way of decoding against plain decoding, over all prompts.

    Attributes:
        way: what is compared.
        kind: ``"greedy"``, ``"sampled"`` or ``"controlled"``.
        batch: prompts that decode together.
        num_tokens: compared; an output counts up to its first difference.
        num_drafted, num_accepted: drafts that were verified, and those that held; None without speculation.
        logprob_gap: nats, largest difference between the log-probabilities of an equal token.
        differences: at most one per prompt.
    """

    way: str
    kind: str
    batch: int
    num_tokens: int = 0
    num_drafted: int | None = None
    num_accepted: int | None = None
    logprob_gap: float = 0.0
    differences: list[Difference] = field(default_factory=list)

    @property
    def num_ties(self) -> int:
        """Differences that rounding explains."""
        return sum(each.is_tie for each in self.differences)


@dataclass(frozen=True)
class Distribution:
    """Sampled tokens against the probabilities the model reports for them.

    Attributes:
        way: what was sampled with.
        temperature, top_k: of the draws.
        observed, expected: tokens drawn, and their expected number, by rank of the token among the likeliest ones; the
            last entry is all other tokens. Ranks too rare for the test are joined.
        num_impossible: tokens drawn that have no probability.
        num_drafted, num_accepted: while drawing.
        statistic, degrees, p_value: of the chi-square test.
    """

    way: str
    temperature: float
    top_k: int
    observed: tuple[int, ...]
    expected: tuple[float, ...]
    num_impossible: int
    num_drafted: int | None
    num_accepted: int | None
    statistic: float
    degrees: int
    p_value: float

    @property
    def num_draws(self) -> int:
        return sum(self.observed)


@dataclass
class LosslessReport:
    """All of a check.

    Attributes:
        tie_margin: nats, below which a different token is a tie.
        logprob_tolerance: nats by which log-probabilities of an equal token may differ.
        significance: p-values below it are violations.
        comparisons: a row per way, kind and batch.
        distributions: a row per way that was drawn from.
    """

    tie_margin: float
    logprob_tolerance: float
    significance: float
    comparisons: list[Comparison] = field(default_factory=list)
    distributions: list[Distribution] = field(default_factory=list)

    @property
    def violations(self) -> list[str]:
        """Everything wrong; empty when nothing is."""
        return [*self._wrong_tokens(), *self._wrong_distributions()]

    def _wrong_tokens(self) -> Iterator[str]:
        for each in self.comparisons:
            where = f"{each.way}, {each.kind}, batch {each.batch}"
            yield from (f"{where}: {difference}" for difference in each.differences if not difference.is_tie)
            if not each.logprob_gap <= self.logprob_tolerance:
                yield (
                    f"{where}: log-probabilities of the same tokens differ by {each.logprob_gap:.2g} nats, more than "
                    f"{self.logprob_tolerance:g}"
                )

    def _wrong_distributions(self) -> Iterator[str]:
        for each in self.distributions:
            where = f"{each.way}, sampled at temperature {each.temperature:g}, top_k {each.top_k}"
            if each.num_impossible:
                yield f"{where}: {each.num_impossible} of {each.num_draws} tokens have no probability"
            if each.p_value < self.significance:
                yield (
                    f"{where}: tokens by rank {list(each.observed)}, expected "
                    f"{[round(value, 1) for value in each.expected]}: chi-square {each.statistic:.1f} with "
                    f"{each.degrees} degrees of freedom, p = {each.p_value:.2g}"
                )

    @property
    def notes(self) -> list[str]:
        """Ties, by name, and ways of speculating in which no draft was verified, so that nothing is known of them."""
        found = []
        for each in self.comparisons:
            where = f"{each.way}, {each.kind}, batch {each.batch}"
            found += [f"tie in {where}: {difference}" for difference in each.differences if difference.is_tie]
        drafted: dict[str, int] = {}
        rows: list[Comparison | Distribution] = [*self.comparisons, *self.distributions]
        for row in rows:
            if row.num_drafted is not None:
                drafted[row.way] = drafted.get(row.way, 0) + row.num_drafted
        return found + [f"{way}: no draft was verified" for way, count in drafted.items() if not count]

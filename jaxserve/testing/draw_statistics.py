"""Are sampled tokens distributed as the model says?

Every token is drawn behind a context of its own, so it is sorted by its rank among the likeliest ones there, and
compared with the probabilities of the ranks there. Summed over the draws, the counts vary no more than those of one
distribution with the mean probabilities would (the mean of p * p is at least the square of the mean), so the test errs
on the side of believing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxserve.core.errors import ConfigError
from jaxserve.core.request import TokenLogprob
from jaxserve.core.sampling_params import MAX_LOGPROBS

LEAST_EXPECTED = 5.0  # draws, of a rank that is tested by itself: the usual rule for chi-square
NO_PROBABILITY = -30.0  # nats: all tokens of a vocabulary together at such odds do not come in a million draws


class Counts(NamedTuple):
    """Draws by rank; the last entry is every token behind the reported ranks.

    Attributes:
        observed: int64[R + 1].
        expected: float64[R + 1].
        num_impossible: draws that have no probability.
    """

    observed: np.ndarray
    expected: np.ndarray
    num_impossible: int


class ChiSquare(NamedTuple):
    """Result of the test, and the ranks it was made with."""

    observed: tuple[int, ...]
    expected: tuple[float, ...]
    statistic: float
    degrees: int
    p_value: float


def count_ranks(draws: Sequence[TokenLogprob], temperature: float, top_k: int) -> Counts:
    """Counts draws that report their ``MAX_LOGPROBS`` likeliest tokens.

    Raises:
        ConfigError: probabilities that the likeliest tokens do not determine.
    """
    if top_k > MAX_LOGPROBS or (top_k <= 0 and temperature != 1.0):
        raise ConfigError(
            f"probabilities at temperature {temperature:g} and top_k {top_k} are not known from the {MAX_LOGPROBS} "
            f"likeliest tokens; take top_k 1 .. {MAX_LOGPROBS}, or temperature 1 without it"
        )
    num_ranks = top_k if top_k > 0 else MAX_LOGPROBS
    logprobs = np.array([[p for _, p in draw.top[:num_ranks]] for draw in draws], np.float64)  # [draw, rank]
    ids = np.array([[token for token, _ in draw.top[:num_ranks]] for draw in draws])
    chosen = np.array([draw.token_id for draw in draws])
    probabilities = np.exp((logprobs - logprobs[:, :1]) / temperature)
    if top_k > 0:
        probabilities /= probabilities.sum(1, keepdims=True)
    else:
        probabilities *= np.exp(logprobs[:, :1])
    rest = np.maximum(0.0, 1.0 - probabilities.sum(1))
    is_rank = ids == chosen[:, None]
    behind = ~is_rank.any(1)
    impossible = behind if top_k > 0 else np.array([draw.logprob < NO_PROBABILITY for draw in draws])
    return Counts(
        np.append(is_rank.sum(0), behind.sum()), np.append(probabilities.sum(0), rest.sum()), int(impossible.sum())
    )


def chi_square(observed: Sequence[int], expected: Sequence[float]) -> ChiSquare:
    """Pearson's test. Entries of which too few are expected are joined."""
    rare = [value < LEAST_EXPECTED for value in expected]
    pairs: list[tuple[int, float]] = [
        (o, e) for o, e, is_rare in zip(observed, expected, rare, strict=True) if not is_rare
    ]
    num_rare = sum(o for o, is_rare in zip(observed, rare, strict=True) if is_rare)
    expected_rare = sum(e for e, is_rare in zip(expected, rare, strict=True) if is_rare)
    if expected_rare >= LEAST_EXPECTED or not pairs:
        pairs.append((num_rare, expected_rare))
    else:  # with the rarest of the others
        o, e = pairs.pop(min(range(len(pairs)), key=lambda i: pairs[i][1]))
        pairs.append((o + num_rare, e + expected_rare))
    statistic = sum((o - e) ** 2 / e for o, e in pairs if e > 0)
    degrees = len(pairs) - 1
    p_value = float(jax.scipy.special.gammaincc(degrees / 2, statistic / 2)) if degrees else 1.0
    return ChiSquare(
        tuple(int(o) for o, _ in pairs), tuple(float(e) for _, e in pairs), float(statistic), degrees,
        0.0 if math.isnan(p_value) else p_value,
    )  # fmt: skip

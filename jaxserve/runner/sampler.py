"""From logits to tokens, inside the program.

Logits first change as requests want it (``runner.logit_controls``). Order of the filters: temperature, top-k, top-p,
min-p; then one draw by the Gumbel-max trick. A token's random numbers come from (seed, position) alone, so they do not
depend on the batch, the row, or a preemption.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.core.sampling_params import MAX_LOGPROBS
from jaxserve.runner.either import either
from jaxserve.runner.logit_controls import Controls
from jaxserve.runner.sampling_rows import FLAGS, MIN_P, SEED_HIGH, SEED_LOW, TEMPERATURE, TOP_K, TOP_P, WANTS_LOGPROBS

MIN_TEMPERATURE = 1e-6  # below this float32 logits overflow; the result is greedy either way


class Sampled(NamedTuple):
    """What the sampler returns for R rows.

    Attributes:
        tokens: int32[R].
        logprobs: float32[R], log-softmax of the raw logits at the token; zero unless some row asked.
        top_ids: int32[R, 20]; top_logprobs: float32[R, 20]: most likely tokens, falling; zero unless some row asked.
        finite: bool[R], false where the logits a token was chosen by hold NaN or no finite maximum.
    """

    tokens: jax.Array
    logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array
    finite: jax.Array


def _ordered_bits(x: jax.Array) -> jax.Array:
    """uint32 keys that compare as the float32 values do (the usual sign-magnitude to two's-order map)."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest_key(reached: Callable[[jax.Array], jax.Array], rows: int) -> jax.Array:
    """The largest key uint32[R] for which ``reached(key)`` still holds, found bit by bit.

    ``reached`` must be true at 0 and fall monotonously. 32 passes over the vocabulary, whatever k or p is: a full sort
    costs several times that on the CPU.
    """

    def refine(i, key):
        candidate = key | (jnp.uint32(1) << (jnp.uint32(31) - i.astype(jnp.uint32)))
        return jnp.where(reached(candidate), candidate, key)

    return jax.lax.fori_loop(0, 32, refine, jnp.zeros(rows, jnp.uint32))


def filtered_logits(logits: jax.Array, floats: jax.Array, ints: jax.Array) -> jax.Array:
    """Temperature-scaled logits float32[R, V] with filtered-out tokens at -inf; tokens tied at a threshold all stay."""
    rows = logits.shape[0]
    temperature = jnp.maximum(floats[:, TEMPERATURE], MIN_TEMPERATURE)[:, None]
    scaled = (logits - logits.max(-1, keepdims=True)) / temperature  # <= 0, the best token at 0
    keys = _ordered_bits(scaled)

    def top_k_filter(scaled):
        k = jnp.where(ints[:, TOP_K] > 0, ints[:, TOP_K], 1)[:, None]
        kth = _largest_key(lambda key: jnp.sum(keys >= key[:, None], -1, keepdims=True)[:, 0] >= k[:, 0], rows)
        keep = (keys >= kth[:, None]) | (ints[:, TOP_K] == 0)[:, None]
        return jnp.where(keep, scaled, -jnp.inf)

    def top_p_filter(scaled):
        probabilities = jax.nn.softmax(scaled, -1)
        p = floats[:, TOP_P]
        threshold = _largest_key(
            lambda key: jnp.sum(jnp.where(keys >= key[:, None], probabilities, 0.0), -1) >= jnp.minimum(p, 0.999999),
            rows,
        )
        best = keys.max(-1)  # top_p 0 keeps the best token
        threshold = jnp.minimum(threshold, best)
        keep = (keys >= threshold[:, None]) | (p >= 1.0)[:, None]
        return jnp.where(keep, scaled, -jnp.inf)

    scaled = either(jnp.any(ints[:, TOP_K] > 0), top_k_filter, lambda s: s, scaled)
    scaled = either(jnp.any(floats[:, TOP_P] < 1.0), top_p_filter, lambda s: s, scaled)
    min_p = floats[:, MIN_P][:, None]
    return jnp.where((scaled >= jnp.log(min_p)) | (scaled == 0.0), scaled, -jnp.inf)


def gumbel_noise(seed_low: jax.Array, seed_high: jax.Array, position: jax.Array, vocab: int) -> jax.Array:
    """float32[V] that decides the draw of the token that will stand at ``position``; all int32[]."""
    key = jax.random.fold_in(jax.random.key(seed_low.astype(jnp.uint32)), seed_high)
    return jax.random.gumbel(jax.random.fold_in(key, position), (vocab,), jnp.float32)


def draw(logits: jax.Array, ints: jax.Array, positions: jax.Array) -> jax.Array:
    """One token int32[R] per row from filtered logits [R, V]; ``positions`` int32[R]: where the tokens will stand."""
    noise = jax.vmap(functools.partial(gumbel_noise, vocab=logits.shape[-1]))
    gumbel = noise(ints[:, SEED_LOW], ints[:, SEED_HIGH], positions)
    return jnp.argmax(logits + gumbel, -1).astype(jnp.int32)


def best_tokens(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first token of the highest logit, int32[R], and whether that logit is finite, bool[R], of logits [R, V].

    A row that holds NaN is not finite, and gets some token. XLA's own argmax reduces pairs of value and index one by
    one on the CPU: 0.2 ms a row and 49152 tokens, eight to nine times this.
    """
    highest = jnp.max(logits, -1)
    tokens = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    first = jnp.min(jnp.where(logits == highest[:, None], tokens, logits.shape[-1] - 1), -1)
    return first, jnp.isfinite(highest)


def sample(
    logits: jax.Array, floats: jax.Array, ints: jax.Array, positions: jax.Array, num_ids: int | None = None,
    controls: Controls | None = None, is_greedy: bool = False,
) -> Sampled:  # fmt: skip
    """Chooses a token per row.

    Args:
        logits: float32[R, V].
        floats, ints: sampling rows [R, 8].
        positions: int32[R], position each chosen token will have.
        num_ids: ids the tokenizer knows. Rows of the vocabulary behind them are padding, and count as impossible.
        controls: what requests do to the logits their tokens are chosen by; reported logprobs are of the raw ones.
        is_greedy: the host knows that every row takes its likeliest token, and that nobody asks for logprobs or
            controls: nothing else is compiled.
    """
    rows, vocab = logits.shape
    if num_ids is not None and num_ids < vocab:
        logits = jnp.where(jnp.arange(vocab) < num_ids, logits, -jnp.inf)
    random = floats[:, TEMPERATURE] > 0

    def controlled(use: Callable[[jax.Array], Any]) -> Any:
        """``use(logits)`` after the controls. Not one array for all uses: it would be a copy when nobody asks."""
        if controls is None:
            return use(logits)
        return either(controls.asked, lambda x: use(controls.apply(x)), use, logits)

    num_top = min(MAX_LOGPROBS, vocab)

    def without(_):
        return (
            jnp.zeros(rows, jnp.float32),
            jnp.zeros((rows, MAX_LOGPROBS), jnp.int32),
            jnp.zeros((rows, MAX_LOGPROBS), jnp.float32),
        )

    if is_greedy:
        tokens, finite = best_tokens(logits)
        logprobs, top_ids, top_logprobs = without(None)
        return Sampled(tokens, logprobs, top_ids, top_logprobs, finite)
    greedy, finite = controlled(best_tokens)

    def sampled(_):
        drawn = draw(filtered_logits(controlled(lambda x: x), floats, ints), ints, positions)
        return jnp.where(random, drawn, greedy)

    # Most batches are all greedy; noise for a whole vocabulary costs more than the head of a small model.
    tokens = either(jnp.any(random), sampled, lambda _: greedy, None)

    def with_logprobs(_):
        log_probabilities = jax.nn.log_softmax(logits, -1)
        chosen = jnp.take_along_axis(log_probabilities, tokens[:, None], 1)[:, 0]
        top, ids = jax.lax.top_k(log_probabilities, num_top)
        pad = ((0, 0), (0, MAX_LOGPROBS - num_top))
        return chosen, jnp.pad(ids.astype(jnp.int32), pad), jnp.pad(top, pad, constant_values=-jnp.inf)

    wanted = jnp.any(ints[:, FLAGS] & WANTS_LOGPROBS > 0)
    logprobs, top_ids, top_logprobs = either(wanted, with_logprobs, without, None)
    return Sampled(tokens, logprobs, top_ids, top_logprobs, finite)

"""From logits to tokens, inside the program.

Logits first change as requests want it (``runner.logit_controls``). Order of the filters: temperature, top-k, top-p,
min-p; then one draw by the Gumbel-max trick. A token's random numbers come from (seed, position) alone, so they do not
depend on the batch, the row, or a preemption.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.core.sampling_params import MAX_LOGPROBS
from jaxserve.runner.either import either
from jaxserve.runner.logit_controls import Controls
from jaxserve.runner.sampling_rows import FLAGS, MIN_P, SEED_HIGH, SEED_LOW, TEMPERATURE, TOP_K, TOP_P, WANTS_LOGPROBS

MAX_TOP_P = 0.999999  # rounded probabilities may add up to less than 1
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
    """Temperature-scaled logits float32[R, V] with filtered-out tokens at -inf; tokens tied at a threshold all stay.

    Top-k and top-p are one filter: tokens stay from the best one on until their weights add up to a target. With top-k
    every token weighs 1, with top-p its probability among those that top-k left. So one loop is compiled for both.
    """
    rows = logits.shape[0]
    temperature = jnp.maximum(floats[:, TEMPERATURE], MIN_TEMPERATURE)[:, None]
    scaled = (logits - logits.max(-1, keepdims=True)) / temperature  # <= 0, the best token at 0
    keys = _ordered_bits(scaled)
    has_top_k, has_top_p = ints[:, TOP_K] > 0, floats[:, TOP_P] < 1.0

    def cut(is_top_p: jax.Array, scaled: jax.Array) -> jax.Array:
        weights = jnp.where(is_top_p, jax.nn.softmax(scaled, -1), 1.0)
        target = jnp.where(is_top_p, jnp.minimum(floats[:, TOP_P], MAX_TOP_P), ints[:, TOP_K].astype(jnp.float32))
        threshold = _largest_key(lambda key: jnp.sum(jnp.where(keys >= key[:, None], weights, 0.0), -1) >= target, rows)
        threshold = jnp.minimum(threshold, keys.max(-1))  # top_p 0 keeps the best token
        asked = jnp.where(is_top_p, has_top_p, has_top_k)
        return jnp.where((keys >= threshold[:, None]) | ~asked[:, None], scaled, -jnp.inf)

    def cut_if_asked(number: jax.Array, scaled: jax.Array) -> jax.Array:
        is_top_p = number == 1
        asked = jnp.where(is_top_p, has_top_p, has_top_k).any()
        return either(asked, functools.partial(cut, is_top_p), lambda scaled: scaled, scaled)

    scaled = jax.lax.fori_loop(0, 2, cut_if_asked, scaled)
    min_p = floats[:, MIN_P][:, None]
    return jnp.where((scaled >= jnp.log(min_p)) | (scaled == 0.0), scaled, -jnp.inf)


def threefry(key: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Two words uint32 for every key and counter of two words each: Threefry-2x32 with 20 rounds (Salmon et al.,
    "Parallel Random Numbers: As Easy as 1, 2, 3", 2011).

    The same numbers as jax's own operation. That one is a loop, or on a GPU a call; this one XLA fuses with whatever
    uses it, which takes half the time to compile and two thirds to run.
    """
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    first, second = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for distance in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            first += second
            second = first ^ (second << distance | second >> (32 - distance))
        first += keys[(group + 1) % 3]
        second += keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return first, second


def gumbel_noise(seed_low: jax.Array, seed_high: jax.Array, positions: jax.Array, vocab: int) -> jax.Array:
    """float32[R, V] that decides the draws of the tokens that will stand at ``positions``; all int32[R].

    One hash for every two numbers: the seed is its key, position and token are its counter.
    """
    rows, half = seed_low.shape[0], -(-vocab // 2)

    def column(values: jax.Array) -> jax.Array:
        return jnp.broadcast_to(values.astype(jnp.uint32)[:, None], (rows, half))

    token = jax.lax.broadcasted_iota(jnp.uint32, (rows, half), 1)
    words = threefry((column(seed_low), column(seed_high)), (column(positions), token))
    bits = jnp.concatenate(words, 1)[:, :vocab]
    # 23 random bits and a last one set: evenly spaced over (0, 1), neither end reached.
    uniform = (bits >> 9 << 1 | 1).astype(jnp.float32) * jnp.float32(2.0**-24)
    return -jnp.log(-jnp.log(uniform))


def perturbed_logits(logits: jax.Array, floats: jax.Array, ints: jax.Array, noise: jax.Array) -> jax.Array:
    """Filtered logits plus noise, float32[R, V]: the token of the highest one is drawn."""
    return filtered_logits(logits, floats, ints) + noise


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
    random = floats[:, TEMPERATURE] > 0

    def drawn(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        if controls is not None:
            logits = either(controls.asked, controls.apply, lambda x: x, logits)
        greedy, finite = best_tokens(logits)

        def sampled(logits):
            noise = gumbel_noise(ints[:, SEED_LOW], ints[:, SEED_HIGH], positions, vocab)
            return jnp.where(random, best_tokens(perturbed_logits(logits, floats, ints, noise))[0], greedy)

        return either(random.any(), sampled, lambda _: greedy, logits), finite

    # Most batches are all greedy; noise for a whole vocabulary costs more than the head of a small model. And logits
    # that requests may change are an array of their own, a copy when nobody asks.
    asked = random.any() if controls is None else random.any() | controls.asked
    tokens, finite = either(asked, drawn, best_tokens, logits)

    def with_logprobs(_):
        log_probabilities = jax.nn.log_softmax(logits, -1)
        chosen = jnp.take_along_axis(log_probabilities, tokens[:, None], 1)[:, 0]
        top, ids = jax.lax.top_k(log_probabilities, num_top)
        pad = ((0, 0), (0, MAX_LOGPROBS - num_top))
        return chosen, jnp.pad(ids.astype(jnp.int32), pad), jnp.pad(top, pad, constant_values=-jnp.inf)

    wanted = jnp.any(ints[:, FLAGS] & WANTS_LOGPROBS > 0)
    logprobs, top_ids, top_logprobs = either(wanted, with_logprobs, without, None)
    return Sampled(tokens, logprobs, top_ids, top_logprobs, finite)

"""The slow, obvious way to the right answer: recompute everything, every time.

No cache, no batching, no buckets, no overlap. Everything the engine does must equal this (float32, greedy, where the
margin between the two best tokens is larger than rounding).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.loading.weights import LoadedModel

_PADDING = 64  # sequences are padded at the end to multiples of this, to compile seldom


def full_attention(windows: tuple[int | None, ...]):
    """An ``attend`` over rows that are all one sequence, in order."""

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
        num_rows, num_heads, head_dim = q.shape
        group = num_heads // k.shape[1]
        k, v = (jnp.repeat(x, group, axis=1).astype(jnp.float32) for x in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q.astype(jnp.float32), k) / np.sqrt(head_dim)
        distance = np.arange(num_rows)[:, None] - np.arange(num_rows)[None, :]
        seen = distance >= 0
        if windows[layer] is not None:
            seen &= distance < windows[layer]
        scores = jnp.where(seen, scores, -jnp.inf)
        if sinks is not None:  # one more score in each row, whose weight nobody gets
            column = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None, None], (num_heads, num_rows, 1))
            scores = jnp.concatenate([scores, column], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[:, :, :num_rows]
        return jnp.einsum("hqk,khd->qhd", weights, v).astype(q.dtype)

    return attend


@cache
def _program(bind: Any, windows: tuple[int | None, ...]) -> Any:
    def all_logits(leaves: list[jax.Array], token_ids: jax.Array) -> jax.Array:
        model = bind(leaves)
        positions = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
        return model.logits(model(token_ids, positions, full_attention(windows)))

    return jax.jit(all_logits)


def full_recompute_logits(loaded: LoadedModel, token_ids: Sequence[int]) -> np.ndarray:
    """Logits after every token: Float32[len(token_ids), vocab]."""
    num_padded = -(-len(token_ids) // _PADDING) * _PADDING
    padded = np.zeros(num_padded, np.int32)  # later tokens cannot change earlier logits
    padded[: len(token_ids)] = token_ids
    program = _program(loaded.bind, loaded.config.attention_windows)
    return np.asarray(program(loaded.leaves, padded))[: len(token_ids)]


def greedy_full_recompute(
    loaded: LoadedModel, prompt_ids: Sequence[int], max_tokens: int, eos_token_ids: Sequence[int] = ()
) -> list[int]:
    """Most likely continuation; ends after an id of ``eos_token_ids`` (which is included) or ``max_tokens``."""
    token_ids = list(prompt_ids)
    for _ in range(max_tokens):
        token_ids.append(int(full_recompute_logits(loaded, token_ids)[-1].argmax()))
        if token_ids[-1] in eos_token_ids:
            break
    return token_ids[len(prompt_ids) :]


def smallest_margin(loaded: LoadedModel, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> float:
    """Smallest gap between the best and second best logit over the steps that gave ``output_ids``."""
    logits = full_recompute_logits(loaded, [*prompt_ids, *output_ids])
    best_two = np.sort(logits[len(prompt_ids) - 1 : -1], axis=-1)[:, -2:]
    return float((best_two[:, 1] - best_two[:, 0]).min())

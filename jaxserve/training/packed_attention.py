"""Attention over packed rows, differentiable: for features of the target, for drafts in chains, layers and blocks."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def attend_packed(
    q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, own: Sequence[tuple[jax.Array, jax.Array]] = (),
    sinks: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Attention to the keys of a row, and to keys of each query's own.

    Args:
        q: Float[B, Q, H, D].
        k, v: Float[B, K, KV, D].
        seen: Bool[B, Q, K].
        own: keys and values Float[B, Q, KV, D]; query i sees entry i of each.
        sinks: Float[H] or None: one more logit per head in every softmax, which takes weight and gives no value.

    Returns:
        Float[B, Q, H, D].
    """
    batch, queries, heads, dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(batch, queries, kv_heads, heads // kv_heads, dim)
    scale = dim**-0.5
    scores = jnp.einsum("bqngd,bknd->bngqk", grouped, k, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(seen[:, None, None], scores, -1e30)
    extra = [jnp.einsum("bqngd,bqnd->bngq", grouped, key)[..., None] * scale for key, _ in own]
    if sinks is not None:
        per_head = sinks.astype(scores.dtype).reshape(kv_heads, -1, 1, 1)
        extra.append(jnp.broadcast_to(per_head, (*scores.shape[:-1], 1)))
    weights = jax.nn.softmax(jnp.concatenate([scores, *extra], axis=-1), axis=-1).astype(q.dtype)
    mixed = jnp.einsum("bngqk,bknd->bqngd", weights[..., : k.shape[1]], v)
    for number, (_, value) in enumerate(own):
        weight = weights[..., k.shape[1] + number].transpose(0, 3, 1, 2)[..., None]  # [B, Q, KV, G, 1]
        mixed += weight * value[:, :, :, None]
    return mixed.reshape(batch, queries, heads, dim)


def seen_in_rows(segments: jax.Array, window: int | None = None) -> jax.Array:
    """Bool[B, L, L]: each token sees itself and those before it in its own sequence, the last ``window`` at most.

    Args:
        segments: Int32[B, L], see ``packing.PackedRows``.
    """
    length = segments.shape[1]
    distance = jnp.arange(length)[:, None] - jnp.arange(length)
    near = (distance >= 0) & (distance < (length if window is None else window))
    return near & (segments[:, :, None] == segments[:, None, :])


def attend_blocks(
    q: jax.Array, k: jax.Array, v: jax.Array, context: tuple[jax.Array, jax.Array], seen: jax.Array
) -> jax.Array:
    """Attention of blocks: every row of a block to the context before it and to the whole block.

    Args:
        q: Float[B, N, S, H, D], N blocks of S rows; k, v: Float[B, N, S, KV, D].
        context: keys and values Float[B, L, KV, D].
        seen: Bool[B, N, L], which context a block sees.

    Returns:
        Float[B, N, S, H, D].
    """
    batch, blocks, size, heads, dim = q.shape
    kv_heads = k.shape[3]
    grouped = q.reshape(batch, blocks, size, kv_heads, heads // kv_heads, dim)
    keys, values = context
    before = jnp.einsum("bmsngd,blnd->bmngsl", grouped, keys, preferred_element_type=jnp.float32)
    before = jnp.where(seen[:, :, None, None, None], before * dim**-0.5, -1e30)
    inside = jnp.einsum("bmsngd,bmtnd->bmngst", grouped, k, preferred_element_type=jnp.float32) * dim**-0.5
    weights = jax.nn.softmax(jnp.concatenate([before, inside], axis=-1), axis=-1).astype(q.dtype)
    length = keys.shape[1]
    mixed = jnp.einsum("bmngsl,blnd->bmsngd", weights[..., :length], values)
    mixed += jnp.einsum("bmngst,bmtnd->bmsngd", weights[..., length:], v)
    return mixed.reshape(batch, blocks, size, heads, dim)

"""Attention in plain XLA operations over gathered pages: ``xla``, ``xla-live`` and ``planned``.

All three compute the same; they differ in when they read the shared rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.attention.base import AttentionBackend, AttentionStep, SharedReadEnds, StepMetadata
from jaxserve.barrier import ops
from jaxserve.core.forward_mode import ForwardMode

NEGATIVE = -1e30  # a score that never wins; finite, so that a fully masked block gives zeros instead of NaN


class XlaBackend(AttentionBackend):
    """Reads block tables and lengths once, by the snapshot at the head of the program. The oracle of the kernels."""

    name = "xla"
    supports_trees = True
    supports_sinks = True

    def shared_read_ends(self, forward_mode: ForwardMode) -> SharedReadEnds:
        if forward_mode is ForwardMode.DRAFT_EXTEND:  # audited: the snapshot is all it reads there, too
            return SharedReadEnds.IN_REPLAY
        return super().shared_read_ends(forward_mode)

    def attend(
        self, step: AttentionStep, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None
    ) -> jax.Array:
        metadata = self.live_metadata(step, layer, q)
        batch, queries, heads, dim = q.shape
        kv_heads = k.shape[2]
        scale = dim**-0.5
        window = step.windows[layer]
        grouped = q.reshape(batch, queries, kv_heads, heads // kv_heads, dim)

        # new tokens among themselves
        seen_fresh, depths = _fresh(step, batch, queries)
        fresh_scores = jnp.einsum("bqkgd,bskd->kbgqs", grouped, k, preferred_element_type=jnp.float32) * scale
        if window is not None:
            seen_fresh &= depths[:, :, None] - depths[:, None, :] < window
        fresh_scores = jnp.where(seen_fresh[None, :, None], fresh_scores, NEGATIVE)

        # new tokens over the cached context
        keys, values = step.pool.gather(layer, metadata.block_tables)  # [KV, B, S, D]
        context_scores = jnp.einsum("bqkgd,kbsd->kbgqs", grouped, keys, preferred_element_type=jnp.float32) * scale
        context = jnp.arange(keys.shape[2])
        seen = context[None, :] < metadata.lengths[:, None]  # [B, S]
        seen = seen[:, None, :]  # [B, 1, S]
        if window is not None:
            token_positions = metadata.lengths[:, None] + depths  # [B, Q]
            seen = seen & (context > token_positions[:, :, None] - window)
        context_scores = jnp.where(seen[None, :, None], context_scores, NEGATIVE)
        # A weight of zero does not silence a value that is not a number, and recycled pages may hold such.
        values = jnp.where((context[None, :] < metadata.lengths[:, None])[None, :, :, None], values, 0)

        highest = jnp.maximum(context_scores.max(-1, keepdims=True), fresh_scores.max(-1, keepdims=True))
        if sinks is not None:
            sink_scores = sinks.astype(jnp.float32).reshape(kv_heads, 1, heads // kv_heads, 1, 1)
            highest = jnp.maximum(highest, sink_scores)
        context_weights = jnp.exp(context_scores - highest)
        fresh_weights = jnp.exp(fresh_scores - highest)
        total = context_weights.sum(-1, keepdims=True) + fresh_weights.sum(-1, keepdims=True)
        if sinks is not None:
            total += jnp.exp(sink_scores - highest)
        out = jnp.einsum("kbgqs,kbsd->kbgqd", context_weights.astype(values.dtype), values,
                         preferred_element_type=jnp.float32)  # fmt: skip
        out += jnp.einsum("kbgqs,bskd->kbgqd", fresh_weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return (out / total).transpose(1, 3, 0, 2, 4).reshape(batch, queries, heads, dim).astype(q.dtype)


def _fresh(step: AttentionStep, batch: int, queries: int) -> tuple[jax.Array, jax.Array]:
    """Which new tokens see which, bool[B or 1, Q, Q], and their depths int32[B or 1, Q]; a chain without a tree."""
    if step.tree is not None:
        return step.tree.seen, step.tree.depths
    depths = jnp.arange(queries, dtype=jnp.int32)[None]
    return depths[:, :, None] >= depths[:, None, :], depths


class XlaLiveBackend(XlaBackend):
    """Reads the block table and the lengths anew in every layer, from the shared buffers, while the program runs."""

    name = "xla-live"
    reads_live = True

    def shared_read_ends(self, forward_mode: ForwardMode) -> SharedReadEnds:
        if forward_mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND):
            return SharedReadEnds.POST_REPLAY
        return SharedReadEnds.UNKNOWN

    def live_metadata(self, step: AttentionStep, layer: int, after: jax.Array) -> StepMetadata:
        live = step.live
        width = step.shape.table_width
        if not live.ffi:
            return step.metadata._replace(
                block_tables=live.block_tables[live.slots, :width], lengths=live.lengths[live.slots, 0]
            )
        # Tied to this layer's queries, or XLA would do every layer's reads at the start and prove nothing.
        slots = live.slots + ops.hold("layer.before_reads", after)
        _, (tables, lengths) = ops.snapshot(
            jnp.zeros(16, jnp.uint32), slots, [live.block_tables, live.lengths],
            num_rows=step.shape.batch, widths=[width, 1],
        )  # fmt: skip
        return step.metadata._replace(block_tables=tables, lengths=lengths[:, 0])


class PlannedBackend(XlaBackend):
    """Plans the step in a program of its own, launched first: reads of shared rows end before the step starts."""

    name = "planned"

    def shared_read_ends(self, forward_mode: ForwardMode) -> SharedReadEnds:
        return SharedReadEnds.PRE_REPLAY

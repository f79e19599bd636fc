"""Attention by the paged kernel in ``csrc/``: the default on CPU for float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.attention.base import AttentionStep
from jaxserve.attention.xla import XlaBackend


class NativeBackend(XlaBackend):
    """Reads as ``xla`` does, by the snapshot at the head of the program; its kernel walks the private block table.

    Cost follows the real context lengths, so one program per batch size serves every length.
    """

    name = "native"
    width_buckets = False

    def attend(
        self, step: AttentionStep, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None
    ) -> jax.Array:
        metadata = self.live_metadata(step, layer, q)
        window = step.windows[layer] or 0
        kernel = jax.ffi.ffi_call("jaxserve_paged_attention", jax.ShapeDtypeStruct(q.shape, jnp.float32))
        return kernel(
            q, k, v, step.pool.data, metadata.block_tables, metadata.lengths, *tree_operands(step, window),
            jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32),
            layer=np.int64(layer), scale=np.float32(q.shape[-1] ** -0.5), window=np.int64(window),
        )  # fmt: skip


def tree_operands(step: AttentionStep, window: int) -> tuple[jax.Array, jax.Array]:
    """Seen new tokens uint8[B, Q, Q] and depths int32[B, Q]; empty for a chain."""
    if step.tree is None:
        return jnp.zeros((0, 0, 0), jnp.uint8), jnp.zeros((0, 0), jnp.int32)
    seen, depths = step.tree
    if window:
        seen = seen & (depths[:, :, None] - depths[:, None, :] < window)
    return seen.astype(jnp.uint8), depths

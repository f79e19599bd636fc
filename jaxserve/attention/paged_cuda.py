"""Attention on NVIDIA GPUs: the paged kernel of ``csrc/cuda`` for decode and verify, cuDNN for prompts."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.attention.base import AttentionStep
from jaxserve.attention.native import tree_operands
from jaxserve.attention.xla import XlaBackend
from jaxserve.core.errors import ConfigError
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.core.shapes import ceil_div

Implementation = Literal["cudnn", "xla"]  # of prompts

HEAD_DIMS = (64, 96, 128, 192, 256)
TILE_ROWS = 16  # query rows that one block of threads attends
BLOCK_POSITIONS = 16  # positions a warp takes at a time; a page holds a whole number of them
BLOCKS_WANTED = 2 * 132  # of threads: two for each of an H100's multiprocessors
MAX_SPLITS = 64


class PagedCudaBackend(XlaBackend):
    """Reads as ``xla`` does, by the snapshot at the head of the program; its kernel walks the private block table.

    Cost follows the real context lengths, so one program per batch size serves every length. bfloat16 only.

    Attributes:
        target: the kernel's FFI target.
        prefill: ``cudnn`` or ``xla``, what computes prompts; None: cuDNN where it is installed.
    """

    name = "paged-cuda"
    width_buckets = False
    target: ClassVar[str] = "jaxserve_paged_attention_bf16"

    def __init__(self, prefill: Implementation | None = None):
        self.prefill: Implementation = prefill or ("cudnn" if has_cudnn() else "xla")

    def attend(
        self, step: AttentionStep, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None
    ) -> jax.Array:
        if step.shape.mode is not ForwardMode.EXTEND:
            return self._paged(step, layer, q, k, v, sinks)
        if self.prefill == "xla" or sinks is not None or step.tree is not None or q.shape[-1] % 8:
            return super().attend(step, layer, q, k, v, sinks)
        return prompt_attention(step, layer, q, k, v, implementation=self.prefill)

    def _paged(
        self, step: AttentionStep, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None
    ) -> jax.Array:
        metadata, window = step.metadata, step.windows[layer] or 0
        batch, queries, heads, dim = q.shape
        page_size = step.pool.page_size
        if reason := why_not(jnp.dtype(q.dtype).name, page_size, dim):
            raise ConfigError(f"the paged-cuda backend cannot serve this model: {reason}; choose xla")
        splits = num_splits(batch, k.shape[2], queries * heads // k.shape[2], step.shape.table_width * page_size)
        rows = batch * queries * heads if splits > 1 else 1
        results = (
            jax.ShapeDtypeStruct(q.shape, jnp.bfloat16),
            jax.ShapeDtypeStruct((rows, splits, dim + 2), jnp.float32),
        )
        kernel = jax.ffi.ffi_call(self.target, results)
        out, _ = kernel(
            q, k, v, step.pool.data, metadata.block_tables, metadata.lengths, *tree_operands(step, window),
            jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32),
            layer=np.int64(layer), scale=np.float32(dim**-0.5), window=np.int64(window),
        )  # fmt: skip
        return out


def num_splits(batch: int, kv_heads: int, rows: int, max_length: int) -> int:
    """Into how many shares each sequence is cut, so that every multiprocessor has work.

    Args:
        rows: query rows of one KV head (tokens x heads of its group).
        max_length: tokens a block table has room for. Shares follow the real length, which only the device knows.
    """
    without = batch * kv_heads * ceil_div(rows, TILE_ROWS)
    useful = ceil_div(max_length, 4 * BLOCK_POSITIONS)  # a share of fewer blocks leaves warps idle
    return max(1, min(ceil_div(BLOCKS_WANTED, without), useful, MAX_SPLITS))


def prompt_attention(
    step: AttentionStep, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, implementation: Implementation
) -> jax.Array:
    """Attention of a prompt chunk over its context and itself by ``jax.nn.dot_product_attention``.

    Args:
        q: [B, Q, H, D]; k, v: [B, Q, KV, D].
        implementation: ``cudnn`` or ``xla``.

    Returns:
        [B, Q, H, D].
    """
    queries, window = q.shape[1], step.windows[layer]
    lengths = step.metadata.lengths
    keys, values = (x.swapaxes(0, 1).swapaxes(1, 2) for x in step.pool.gather(layer, step.metadata.block_tables))
    num_context = keys.shape[1]
    context = jnp.arange(num_context)
    written = context[None] < lengths[:, None]  # [B, S]
    # A weight of zero does not silence what is not a number, and recycled pages may hold such.
    keys, values = (jnp.where(written[:, :, None, None], x, 0) for x in (keys, values))
    own = jnp.arange(queries)
    seen_new = own[:, None] >= own[None]
    seen_context = jnp.broadcast_to(written[:, None], (q.shape[0], queries, num_context))
    if window is not None:
        seen_new &= own[:, None] - own[None] < window
        seen_context &= context > (lengths[:, None] + own)[:, :, None] - window
    seen = jnp.concatenate([seen_context, jnp.broadcast_to(seen_new, (q.shape[0], queries, queries))], -1)
    return jax.nn.dot_product_attention(
        q, jnp.concatenate([keys, k], 1), jnp.concatenate([values, v], 1), mask=seen[:, None],
        scale=q.shape[-1] ** -0.5, implementation=implementation,
    )  # fmt: skip


@functools.cache
def has_cudnn() -> bool:
    """Whether this process can load cuDNN, which ``jax[cuda13]`` brings along."""
    try:
        if importlib.util.find_spec("nvidia.cudnn") is not None:
            return True
    except ModuleNotFoundError:
        pass
    try:
        ctypes.CDLL("libcudnn.so.9")
    except OSError:
        return False
    return True


def why_not(dtype: str, page_size: int, head_dim: int | None = None) -> str | None:
    """Why the kernel cannot serve a model, as far as its sizes are known; None if it can."""
    if dtype != "bfloat16":
        return f"it computes in bfloat16, not {dtype}"
    if page_size % BLOCK_POSITIONS:
        return f"it wants a page size that is a multiple of {BLOCK_POSITIONS}, not {page_size}"
    if head_dim is not None and head_dim not in HEAD_DIMS:
        return f"it has head dimensions {', '.join(map(str, HEAD_DIMS))}, not {head_dim}"
    return None

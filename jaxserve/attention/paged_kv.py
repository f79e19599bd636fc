"""The paged KV pool as programs see it: reading pages, writing new tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class KVLayout:
    """Sizes of the KV pool."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_pages: int  # the null page included
    page_size: int
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """[layers, 2, KV heads, pages, page_size, D]."""
        return (self.num_layers, 2, self.num_kv_heads, self.num_pages, self.page_size, self.head_dim)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers."""
        elements = self.num_layers * 2 * self.num_kv_heads * self.page_size * self.head_dim
        return elements * jnp.dtype(self.dtype).itemsize


class PagedKV(NamedTuple):
    """KV of all layers in pages.

    Attributes:
        data: [layers, 2 (key, value), KV heads, pages, page_size, D]. Page 0 is the null page: padding tokens write to
            it and nobody reads it. Heads lie outside pages so that one head's page is contiguous: positions innermost
            but one is what both matrix products and the kernels read fastest.
    """

    data: jax.Array

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.data.shape[4]

    def gather(self, layer: int, block_tables: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values [KV, B, W * page_size, D] of the pages in ``block_tables`` int32[B, W]."""
        kv_heads, _, page_size, dim = self.data.shape[2:]
        batch, width = block_tables.shape
        shape = (kv_heads, batch, width * page_size, dim)
        keys = self.data[layer, 0][:, block_tables].reshape(shape)
        values = self.data[layer, 1][:, block_tables].reshape(shape)
        return keys, values

    def write(self, keys: list[jax.Array], values: list[jax.Array], pages: jax.Array, offsets: jax.Array,
              after: jax.Array) -> PagedKV:  # fmt: skip
        """Writes every layer's new tokens at once.

        Args:
            keys, values: per layer [B, Q, KV, D].
            pages, offsets: int32[B, Q].
            after: int32[] >= 0, computed from every read of the pool. The indices are made to depend on it, which is
                how XLA learns that all reads precede the write: without that it copies the whole pool, twice, each
                step (``optimization_barrier`` does not help: it is gone before buffers are assigned).
        """
        layers = len(keys)
        tokens = pages.size
        kv_heads, dim = self.data.shape[2], self.data.shape[5]
        new = jnp.stack([jnp.stack(keys), jnp.stack(values)], axis=1)  # [L, 2, B, Q, KV, D]
        new = new.reshape(layers, 2, tokens, kv_heads, dim).transpose(0, 1, 3, 2, 4).astype(self.data.dtype)
        page_ids = pages.reshape(tokens) + jnp.minimum(after, 0)
        return PagedKV(self.data.at[:, :, :, page_ids, offsets.reshape(tokens)].set(new))

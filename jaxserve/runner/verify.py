"""Verification of drafted tokens, inside the program: tree geometry, acceptance, and the accepted path.

Draft nodes of a row are numbered 0 .. Q - 1. Node 0 is the root, the sequence's newest token; node j > 0 is entry j - 1
of the row's drafts, and its parent has a smaller number. A parent of -1 marks an entry that is not used.

Every node gets the token the target model would put behind it: by argmax, or by the draw that plain decoding makes at
that position (random numbers come from seed and position alone). A draft is accepted when it is that token of its
parent. So greedy output is that of plain decoding token for token, and so is sampled output under the same seed; a
drafted token x is accepted with the target's probability p(x), which for drafts proposed without randomness is the most
any lossless rule can reach (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023:
min(1, p/q) with q a point mass).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class TreeGeometry(NamedTuple):
    """Where draft nodes stand.

    Attributes:
        depths: int32[B, Q], tokens between the root and the node: position is context length + depth.
        seen: bool[B, Q, Q], whether node i (first) sees node j: its ancestors and itself.
    """

    depths: jax.Array
    seen: jax.Array


class Accepted(NamedTuple):
    """What verification accepts.

    Attributes:
        path: int32[B, Q], node numbers of the accepted path from the root on; 0 behind its end.
        counts: int32[B], nodes on the path, the root included: also the number of tokens the row emits.
    """

    path: jax.Array
    counts: jax.Array


def chain_parents(batch: int, num_drafts: int) -> jax.Array:
    """Parents int32[B, D] of a chain: each draft follows the one before it."""
    return jnp.broadcast_to(jnp.arange(num_drafts, dtype=jnp.int32), (batch, num_drafts))


def tree_geometry(parents: jax.Array) -> TreeGeometry:
    """Depths and ancestors from parents int32[B, Q - 1]. An unused entry sees itself alone."""
    batch, num_drafts = parents.shape
    rows = jnp.arange(batch)
    nodes = jnp.arange(num_drafts + 1, dtype=jnp.int32)
    depths = jnp.zeros((batch, num_drafts + 1), jnp.int32)
    seen = jnp.broadcast_to(nodes[:, None] == nodes[None, :], (batch, num_drafts + 1, num_drafts + 1))
    for node in range(1, num_drafts + 1):  # parents come first, so one pass settles all
        parent = jnp.clip(parents[:, node - 1], 0, node - 1)
        used = parents[:, node - 1] >= 0
        depths = depths.at[:, node].set(jnp.where(used, depths[rows, parent] + 1, 0))
        seen = seen.at[:, node].set(seen[:, node] | (seen[rows, parent] & used[:, None]))
    return TreeGeometry(depths, seen)


def accept(tokens: jax.Array, parents: jax.Array, target: jax.Array) -> Accepted:
    """The longest path from the root whose drafts the target model chose itself.

    Args:
        tokens: int32[B, Q], token of every node; node 0's is not looked at.
        parents: int32[B, Q - 1].
        target: int32[B, Q], the token that belongs behind each node.

    Of siblings with the same token the first one counts.
    """
    batch, num_nodes = tokens.shape
    rows = jnp.arange(batch)
    on_path = jnp.zeros((batch, num_nodes), bool).at[:, 0].set(True)
    has_child = jnp.zeros((batch, num_nodes), bool)
    for node in range(1, num_nodes):
        parent = jnp.clip(parents[:, node - 1], 0, node - 1)
        taken = (parents[:, node - 1] >= 0) & on_path[rows, parent] & ~has_child[rows, parent]
        taken &= tokens[:, node] == target[rows, parent]
        on_path = on_path.at[:, node].set(taken)
        has_child = has_child.at[rows, parent].set(has_child[rows, parent] | taken)
    counts = on_path.sum(1, dtype=jnp.int32)
    step = jnp.cumsum(on_path, 1, dtype=jnp.int32) - 1  # place of a node on the path
    nodes = jnp.arange(num_nodes, dtype=jnp.int32)
    is_at = on_path[:, None, :] & (step[:, None, :] == nodes[None, :, None])  # [B, place, node]
    return Accepted(jnp.sum(jnp.where(is_at, nodes, 0), 2, dtype=jnp.int32), counts)


def along_path(values: jax.Array, path: jax.Array) -> jax.Array:
    """``values[b, path[b, i]]`` of [B, Q, ...]."""
    return values[jnp.arange(path.shape[0])[:, None], path]

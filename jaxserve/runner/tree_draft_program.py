"""The draft program that drafts trees: the likeliest paths of a draft model, as far as they fit into a verify step.

The tree grows depth by depth: of the nodes found at one depth, the ``topk`` with the likeliest paths are expanded, each
by its ``topk`` likeliest tokens. Of all nodes found, those with the likeliest paths are verified (Li et al., "EAGLE-2:
Faster Inference of Language Models with Dynamic Draft Trees", 2024). A path is never likelier than the one it
continues, and ties go to the node found first, so no node is chosen without its parent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.attention.base import StepRows, Tree
from jaxserve.attention.paged_kv import PagedKV
from jaxserve.runner.draft_program import (
    DraftPass,
    DraftTask,
    draft_noise,
    ids_of,
)
from jaxserve.runner.either import either
from jaxserve.runner.sampler import perturbed_logits
from jaxserve.runner.sampling_rows import TEMPERATURE


class Found(NamedTuple):
    """Nodes found so far, C of them, depth after depth; node numbers count from 0, the root is -1.

    Attributes:
        tokens: int32[B, C], in the target's ids.
        scores: float32[B, C], log-likelihoods of their paths.
        parents: int32[B, C], node numbers.
    """

    tokens: jax.Array
    scores: jax.Array
    parents: jax.Array


def likeliest(
    logits: jax.Array, rows: StepRows, positions: jax.Array, task: DraftTask, target_ids: jax.Array | None,
    is_greedy: bool,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The ``topk`` best continuations of N nodes of each row: tokens int32[B, N, k], log-likelihoods float32[B, N, k].

    Rows that sample rank tokens by their perturbed logits: what the target model draws with the same noise.

    Args:
        logits: float32[B, N, draft vocabulary].
        positions: int32[B], where the tokens will stand.
        is_greedy: no row samples, and the host knows it.
    """
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32) if target_ids is None else target_ids
    logits = jnp.where(ids < task.num_ids, logits, -jnp.inf)
    is_random = rows.sampling_floats[:, TEMPERATURE] > 0

    def perturbed(logits: jax.Array) -> jax.Array:
        of_nodes = [
            jnp.repeat(of_rows, logits.shape[1], axis=0)
            for of_rows in (rows.sampling_floats, rows.sampling_ints, draft_noise(rows, positions, task, ids))
        ]
        found = perturbed_logits(logits.reshape(-1, logits.shape[-1]), *of_nodes).reshape(logits.shape)
        return jnp.where(is_random[:, None, None], found, logits)

    ranked = logits if is_greedy else either(jnp.any(is_random), perturbed, lambda logits: logits, logits)
    scores, places = jax.lax.top_k(jax.nn.log_softmax(ranked, -1), task.topk)
    return ids[places], scores


def chosen_tree(found: Found, count: int) -> tuple[jax.Array, jax.Array]:
    """The ``count`` likeliest nodes as drafts: tokens and parents int32[B, count], see ``runner.verify``."""
    _, best = jax.lax.top_k(found.scores, count)
    nodes = jnp.sort(best, -1)  # found depth after depth, so parents stay ahead of their children
    parents = jnp.take_along_axis(found.parents, nodes, 1)
    # Place of a parent among the chosen, 1 for the first; the root is 0.
    places = jnp.argmax(nodes[:, None, :] == parents[:, :, None], -1).astype(jnp.int32) + 1
    return jnp.take_along_axis(found.tokens, nodes, 1), jnp.where(parents < 0, 0, places)


def grown(
    forward: DraftPass, model: Any, pool: PagedKV, rows: StepRows, state: jax.Array, lengths: jax.Array,
    position: jax.Array, task: DraftTask,
) -> Found:  # fmt: skip
    """Every node found.

    Args:
        state: [B, H], the draft model's state at the newest token.
        lengths: int32[B], entries of the draft model before the first draft.
        position: int32[B], where the first drafts will stand.
    """
    batch, k = state.shape[0], task.topk
    greedy = forward.key.is_greedy
    tokens, scores = likeliest(model.logits(state)[:, None], rows, position, task, ids_of(model), greedy)
    found = Found(tokens[:, 0], scores[:, 0], jnp.full((batch, k), -1, jnp.int32))
    # Nodes that go through the model, k of each depth: what they are, the features they build on, whom they see.
    beam = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (batch, k))  # node numbers
    tokens, features = found.tokens, jnp.broadcast_to(state[:, None], (batch, k, state.shape[-1]))
    seen = jnp.broadcast_to(jnp.eye(k, dtype=bool), (batch, k, k))
    for depth in range(1, task.num_steps):
        depths = jnp.broadcast_to(jnp.repeat(jnp.arange(depth, dtype=jnp.int32), k), (batch, depth * k))
        own = features if task.uses_features else None
        hidden, _, _ = forward(pool, lengths, tokens, own, Tree(seen, depths))
        states = hidden[:, -k:]
        logits = model.logits(states.reshape(batch * k, -1)).reshape(batch, k, -1)
        children, likelihoods = likeliest(logits, rows, position + depth, task, ids_of(model), greedy)
        paths = jnp.take_along_axis(found.scores, beam, 1)[:, :, None] + likelihoods  # [B, k, k]
        first = found.tokens.shape[1]
        found = Found(
            jnp.concatenate([found.tokens, children.reshape(batch, k * k)], 1),
            jnp.concatenate([found.scores, paths.reshape(batch, k * k)], 1),
            jnp.concatenate([found.parents, jnp.repeat(beam, k, axis=1)], 1),
        )
        if depth + 1 == task.num_steps:
            break
        _, best = jax.lax.top_k(paths.reshape(batch, k * k), k)
        beam, above = first + best.astype(jnp.int32), best // k  # place of the parent in the last k rows
        tokens = jnp.concatenate([tokens, jnp.take_along_axis(found.tokens, beam, 1)], 1)
        features = jnp.concatenate([features, jnp.take_along_axis(states, above[:, :, None], 1)], 1)
        inherited = jnp.take_along_axis(seen[:, -k:], above[:, :, None], 1)  # [B, k, depth * k]
        fresh = jnp.concatenate([inherited, jnp.broadcast_to(jnp.eye(k, dtype=bool), (batch, k, k))], 2)
        seen = jnp.concatenate([jnp.pad(seen, ((0, 0), (0, 0), (0, k))), fresh], 1)
    return found


def tree_from(
    forward: DraftPass, model: Any, pool: PagedKV, rows: StepRows, state: jax.Array, lengths: jax.Array,
    position: jax.Array, task: DraftTask,
) -> jax.Array:  # fmt: skip
    """As ``chain_from``: int32[B, 2 D], D drafts and then their parents. A tree is drafted whole, or not at all."""
    if not task.depth(forward.key.shape):
        return jnp.full((state.shape[0], 2 * task.num_drafts), -1, jnp.int32)
    found = grown(forward, model, pool, rows, state, lengths, position, task)
    return jnp.concatenate(chosen_tree(found, task.num_drafts), 1)

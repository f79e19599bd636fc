"""The draft program of DFLASH: what the target model computed becomes KV of the draft model; one pass drafts a block.

It reads no shared row. The target's program hands over its private copy of the rows, so the target's launch stays the
last one of a step that reads what the scheduler writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.attention.base import AttentionBackend, StepMetadata, Tree
from jaxserve.attention.paged_kv import PagedKV
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.runner.draft_program import (
    DraftOutputs,
    DraftPass,
    DraftTask,
    choose,
    end_of,
    ids_of,
    padded,
    planned,
    read_sign,
)
from jaxserve.runner.handover import Handover
from jaxserve.runner.step_program import HostInputs, ProgramKey


def make_block_draft_program(
    key: ProgramKey,
    backend: AttentionBackend,
    bind: Callable[[list[jax.Array]], Any],
    windows: tuple[int | None, ...],
    task: DraftTask,
) -> Callable:
    """As ``make_draft_program``; rows come with the handover, and nothing in ``tables`` is read.

    The block is the newest token and a mask token for each draft. Row j predicts the token at its own position.
    """
    batch, depth = key.shape.batch, task.depth(key.shape)

    def draft(leaves, pool: PagedKV, drafted: jax.Array, ticket, tables: list[jax.Array], inputs: HostInputs,
              private: None, handover: Handover) -> DraftOutputs:  # fmt: skip
        assert handover.rows is not None and handover.features is not None
        rows, metadata = planned(key, backend, handover.rows, handover, task)
        model = bind(leaves)
        pool = _with_context(model, pool, handover, metadata)

        size = task.num_drafts + 1
        newest = jnp.take_along_axis(handover.tokens, handover.counts[:, None] - 1, 1)  # [B, 1]
        block = jnp.concatenate([newest, jnp.full((batch, size - 1), model.mask_token_id, jnp.int32)], 1)
        lengths = handover.lengths + handover.counts
        depths = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (batch, size))
        tree = Tree(jnp.ones((batch, size, size), bool), depths)
        # Private rows by slot, for backends that read what they take for live ones.
        by_slot = jnp.zeros((tables[1].shape[0], rows.block_tables.shape[1]), jnp.int32)
        by_slot = by_slot.at[rows.slots].set(rows.block_tables)
        forward = DraftPass(key, backend, model, windows, rows, metadata, by_slot, None)
        hidden, _, _ = forward(pool, lengths, block, tree=tree)
        drafts = [
            choose(model.logits(hidden[:, row]), rows, lengths + row, task, ids_of(model), key.is_greedy)
            for row in range(1, depth + 1)
        ]  # the pass is the whole block's: a shorter one is not what the head was trained on
        chosen = padded(drafts, task.num_drafts, batch)
        slots = inputs.relay_slots if key.shape.mode is ForwardMode.EXTEND else rows.slots
        drafted = drafted.at[slots].set(chosen)
        end = end_of(key, ticket, rows, tables, [pool.data, drafted, chosen], None)
        return DraftOutputs(pool, drafted, chosen, end)

    return draft


def _with_context(model: Any, pool: PagedKV, handover: Handover, metadata: StepMetadata) -> PagedKV:
    """The pool with KV of every position the target has just computed, made of its hidden states."""
    assert handover.features is not None
    batch, entries, width = handover.features.shape
    positions = handover.lengths[:, None] + jnp.arange(entries, dtype=jnp.int32)
    pairs = model.context(handover.features.reshape(batch * entries, width), positions.reshape(-1))
    keys, values = [[x.reshape(batch, entries, *x.shape[1:]) for x in fresh] for fresh in zip(*pairs, strict=True)]
    after = read_sign(keys[0])
    return pool.write(keys, values, metadata.write_pages, metadata.write_offsets, after=after)

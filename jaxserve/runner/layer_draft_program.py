"""The draft program of one layer of a multi-layer draft model (MTP): one pass, one draft.

Layer n drafts the token n + 2 places behind a position: its entry for position i takes the target's features at i and
token i + 1 + n. Let a launch of the target model compute positions L .. N - 1, so that token N is the newest known one.
Then the layers run one after the other, layer n over the entries L - n .. N - 1:

entries     L - n ..  N - n - 1   N - n .. N - 1
tokens      L + 1 ..  N           the drafts of layers 0 .. n - 1, which stand for tokens N + 1 .. N + n
features    of positions before L: kept from the launches before; from L on: handed over

The last entry predicts token N + 1 + n, the draft of this layer. The KV of entries N - n .. N - 1 was computed with
drafts, and is not to stay: they are the entries that the next launch, whose L is this N, computes again, with the real
tokens, and writes over. So before a launch's entries its pool holds KV of real tokens alone, whatever became of the
drafts, and no pass reads the old KV of an entry it computes. The tokens of those entries are in what is handed over; of
the features the relay keeps the last n of each slot, its tail. That a sequence has fewer than n positions is known from
L: at its first launch, L = 0, nothing of the tail counts. Chunks of a prompt are launches like others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.attention.base import AttentionBackend, StepMetadata, StepRows
from jaxserve.attention.paged_kv import PagedKV
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.runner.draft_program import (
    DraftOutputs,
    DraftPass,
    DraftTask,
    choose,
    end_of,
    entries_of,
    given_rows,
    ids_of,
)
from jaxserve.runner.handover import Handover
from jaxserve.runner.step_program import HostInputs, ProgramKey


class LayerRelay(NamedTuple):
    """What a launch of layer n leaves by slot.

    Attributes:
        drafts: int32[slots + 1, n + 1], of this layer and those before it; -1 where there is none.
        tail: [slots + 1, n, F], features of the last n positions; fewer, and those last, while a sequence has not as
            many. None in layer 0.
    """

    drafts: jax.Array
    tail: jax.Array | None


def put_behind(values: jax.Array, counts: jax.Array, more: jax.Array) -> jax.Array:
    """[B, E + n]: the first ``counts`` int32[B] of ``values`` [B, E], and behind them ``more`` [B, n]."""
    extra = more.shape[1]
    values = jnp.pad(values, ((0, 0), (0, extra)))
    places = jnp.arange(values.shape[1], dtype=jnp.int32)
    for number in range(extra):
        values = jnp.where(places == (counts + number)[:, None], more[:, number, None], values)
    return values


def whole_entries(task: DraftTask, handover: Handover, tail: jax.Array) -> tuple[Handover, jax.Array]:
    """What is handed over, with the entries before it and the drafts behind it, and the tail behind the launch.

    Args:
        tail: [B, n, F], of the rows.
    """
    assert handover.features is not None and handover.drafts is not None
    known = jnp.concatenate([tail, handover.features], 1)  # of positions L - n and up
    # Where nothing was drafted any token will do: what is computed from it is computed again by the next launch.
    tokens = put_behind(handover.tokens, handover.counts, jnp.maximum(handover.drafts, 0))
    last = handover.counts[:, None] + jnp.arange(task.layer, dtype=jnp.int32)  # N - n .. N - 1
    next_tail = jnp.take_along_axis(known, last[:, :, None], 1)
    # Entries before the sequence come first; the others move there.
    start, _ = task.span(handover)
    places = jnp.arange(known.shape[1], dtype=jnp.int32) + (start - handover.lengths + task.layer)[:, None]
    places = jnp.minimum(places, known.shape[1] - 1)
    tokens = jnp.take_along_axis(tokens, places, 1)
    return handover._replace(tokens=tokens, features=jnp.take_along_axis(known, places[:, :, None], 1)), next_tail


def make_layer_draft_program(
    key: ProgramKey,
    backend: AttentionBackend,
    bind: Callable[[list[jax.Array]], Any],
    windows: tuple[int | None, ...],
    task: DraftTask,
) -> Callable:
    """As ``make_draft_program``; in place of the drafts its relay is a ``LayerRelay``."""

    def draft(leaves, pool: PagedKV, relay: LayerRelay, ticket, tables: list[jax.Array], inputs: HostInputs,
              private: tuple[StepRows, StepMetadata] | None, handover: Handover) -> DraftOutputs:  # fmt: skip
        rows, metadata = given_rows(key, backend, ticket, tables, inputs, private, handover, task)
        used: set[tuple[int, str]] | None = set() if key.noted else None
        model = bind(leaves)

        whole, tail = handover, relay.tail
        if tail is not None:
            whole, next_tail = whole_entries(task, handover, tail[rows.slots])
            tail = tail.at[rows.slots].set(next_tail)
        tokens, features = entries_of(task, model, whole)
        start, counts = task.span(handover)
        forward = DraftPass(key, backend, model, windows, rows, metadata, tables[1], used)
        state, pool = forward.extend(pool, start, counts, tokens, features)

        position = handover.lengths + handover.counts + 1 + task.layer
        if task.layer < task.depth(key.shape):
            drafts = choose(model.logits(state), rows, position, task, ids_of(model), key.is_greedy)[:, None]
        else:
            drafts = jnp.full((state.shape[0], 1), -1, jnp.int32)
        if handover.drafts is not None:
            drafts = jnp.concatenate([handover.drafts, drafts], 1)
        slots = inputs.relay_slots if key.shape.mode is ForwardMode.EXTEND else rows.slots
        relay = LayerRelay(relay.drafts.at[slots].set(drafts), tail)
        end = end_of(key, ticket, rows, tables, jax.tree.leaves((pool, relay, drafts)), used)
        return DraftOutputs(pool, relay, drafts, end)

    return draft

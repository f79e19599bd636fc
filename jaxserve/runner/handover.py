"""What launches leave for each other on the device: to the next step by slot, to a draft model row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.attention.base import StepRows, StepShape
from jaxserve.models.draft import FINAL
from jaxserve.runner.logit_controls import counted


class Relay(NamedTuple):
    """What a launch leaves for the next one, by slot; the row of the null slot means nothing.

    Attributes:
        tokens: int32[slots + 1], the newest token, which has no KV yet.
        token_counts: int32[slots + 1, V], which tokens a sequence holds, see ``runner.logit_controls``.
        lengths: int32[slots + 1], tokens with KV; None where the host knows lengths ahead.
    """

    tokens: jax.Array
    token_counts: jax.Array
    lengths: jax.Array | None = None


class Handover(NamedTuple):
    """What a draft model goes on from: E entries per row, one for each token whose KV the target model computed.

    Attributes:
        first: int32[B], the token of entry 0.
        tokens: int32[B, E], the token behind each entry: of entry i the token of entry i + 1, of the last the newest.
        counts: int32[B], entries that count, at least 1.
        lengths: int32[B], position of entry 0.
        features: [B, E, F], what was observed of the target model, point after point; None if nothing was asked for.
        rows: the private rows of the target's program, for a draft model that reads no shared ones; else None.
        drafts: int32[B, n], for layer n > 0 of a multi-layer draft model: what the layers before it drafted; else None.
    """

    first: jax.Array
    tokens: jax.Array
    counts: jax.Array
    lengths: jax.Array
    features: jax.Array | None
    rows: StepRows | None = None
    drafts: jax.Array | None = None


def bounded_lengths(shape: StepShape, lengths: jax.Array) -> jax.Array:
    """Lengths int32[slots + 1] of the relay, made safe for rows whose results nobody wants.

    Padding has none. A sequence that has reached its limit, which the host does not know yet, may have more tokens than
    its block table names; what it emits is dropped.
    """
    slots = jnp.arange(lengths.shape[0])
    return jnp.where(slots == lengths.shape[0] - 1, 0, jnp.minimum(lengths, shape.table_width * shape.page_size))


def tokens_behind(chunk: jax.Array, count: jax.Array, following: jax.Array, sampled: jax.Array) -> jax.Array:
    """The token behind each of prompt chunks.

    Args:
        chunk: int32[B, Q], of which ``count`` int32[B] are tokens.
        following: int32[B], the token behind the chunk, or -1: then that is ``sampled`` int32[B].
    """
    last = jnp.where(following >= 0, following, sampled)
    places = jnp.arange(chunk.shape[1], dtype=jnp.int32)
    return jnp.where(places == count[:, None] - 1, last[:, None], jnp.roll(chunk, -1, axis=1))


def relay_after(
    relay: Relay, slots: jax.Array, newest: jax.Array, emitted: jax.Array, is_emitted: jax.Array | None,
    handover: Handover | None,
) -> Relay:  # fmt: skip
    """The relay with the newest token int32[B] of ``slots`` int32[B], all they emit (see ``counted``), and their
    lengths, where it keeps them."""
    lengths = relay.lengths
    if lengths is not None:
        assert handover is not None
        lengths = lengths.at[slots].set(handover.lengths + handover.counts)
    return Relay(relay.tokens.at[slots].set(newest), counted(relay.token_counts, slots, emitted, is_emitted), lengths)


def observed_call(
    model: Any, token_ids: jax.Array, positions: jax.Array, attend: Callable, points: tuple[int, ...]
) -> tuple[jax.Array, jax.Array | None]:
    """Hidden states [T, hidden] of a model, and what it computes at ``points``, side by side [T, points * hidden].

    Points are those of ``models.draft``. None if there are none.
    """
    if not any(point != FINAL for point in points):
        hidden = model(token_ids, positions, attend)
        return hidden, jnp.concatenate([hidden] * len(points), -1) if points else None
    seen: dict[int, jax.Array] = {}

    def observe(index: int, x: jax.Array) -> None:
        if index in points:
            seen[index] = x

    hidden = model(token_ids, positions, attend, observe=observe)
    seen[FINAL] = hidden
    return hidden, jnp.concatenate([seen[point] for point in points], -1)

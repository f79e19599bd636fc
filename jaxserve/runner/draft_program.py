"""The draft program: what a draft model computes behind each of the target model's launches.

rows       snapshot of the shared rows (this launch's own marker), or private rows a prep program made
extend     the tokens whose KV the target model has just computed go through the draft model, into its own pool
draft      from the newest token on, one draft after the other; their KV stays in the program
end        the end record: the full-execution fence

Drafts of earlier depths are computed again with each further one, as new tokens of one forward pass: no KV of a draft
that may not hold is ever written, and the pool is written once.

A row that samples drafts by sampling: with its temperature and filters, and with the random numbers the target model
will use for the token at that position. Draws from two distributions at total variation distance d that share their
Gumbel noise agree with probability at least (1 - d) / (1 + d) (Daliri, Musco, Suresh, "Coupling without Communication
and Drafter-Invariant Speculative Decoding", 2024), and the output stays the one plain decoding gives under the same
seed. Rejection sampling reaches 1 - d, but gives up the second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.attention.base import (
    AttentionBackend,
    AttentionStep,
    LiveRows,
    StepMetadata,
    StepRows,
    StepShape,
    Tree,
    attend_layer,
)
from jaxserve.attention.paged_kv import PagedKV
from jaxserve.barrier import ops
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.runner.either import either
from jaxserve.runner.handover import Handover
from jaxserve.runner.sampler import best_tokens, gumbel_noise, perturbed_logits
from jaxserve.runner.sampling_rows import SEED_HIGH, SEED_LOW, TEMPERATURE
from jaxserve.runner.step_program import HostInputs, ProgramKey, read_rows

_HERE = "runner/draft_program.py"


@dataclass(frozen=True)
class DraftTask:
    """What draft programs are compiled for.

    Attributes:
        num_drafts: drafts per row, at most: behind a prompt. See ``depth``.
        uses_features: whether the draft model builds on what the target model computed; else it is a model of its own.
        vocab_size: of the target model.
        num_ids: ids below it may be drafted.
        topk: continuations of a node; 1 drafts chains.
        num_steps: depth of a tree; of a chain, its length.
        layer: number of this layer of a multi-layer draft model, see ``layer_draft_program``; else 0.
    """

    num_drafts: int
    uses_features: bool
    vocab_size: int
    num_ids: int
    topk: int = 1
    num_steps: int = 0
    layer: int = 0

    @property
    def relay_width(self) -> int:
        """Columns of the relay: drafts, and in a tree the parents of each."""
        return self.num_drafts * (1 if self.topk == 1 else 2)

    def depth(self, shape: StepShape) -> int:
        """Drafts in a row that a program of this shape makes: as many as the step before it verified, for as many will
        most likely be verified next. None behind a step without drafts, where only KV is computed."""
        most = self.num_drafts if self.topk == 1 else self.num_steps
        if shape.mode is ForwardMode.EXTEND:
            return most
        return min(most, shape.queries - 1)

    @property
    def extra_entries(self) -> int:
        """Entries beyond those handed over.

        A model of its own needs the first token too, which stands before them. Layer n computes the n entries before
        them again.
        """
        return self.layer if self.uses_features else 1

    def span(self, handover: Handover) -> tuple[jax.Array, jax.Array]:
        """Position of the first entry, and how many entries count: int32[B] each."""
        if not self.uses_features:
            return handover.lengths, handover.counts + 1
        again = jnp.minimum(self.layer, handover.lengths)  # a sequence begins with entries that nobody has computed
        return handover.lengths - again, handover.counts + again


class DraftOutputs(NamedTuple):
    """Results of a draft launch.

    Attributes:
        pool: the draft model's.
        relay: its relay: int32[slots + 1, D], drafts behind the newest token of every slot, -1 where there is none; or
            what holds them.
        drafts: int32[B, D], this launch's.
    """

    pool: PagedKV
    relay: Any
    drafts: jax.Array
    end: jax.Array


def entries_of(task: DraftTask, model: Any, handover: Handover) -> tuple[jax.Array, jax.Array | None]:
    """What goes through the draft model: tokens int32[B, E], and features [B, E, H] or None.

    With features entry i is what the target computed at a position, and the token behind it. Without, the tokens
    themselves: the first one again, and those behind the entries.
    """
    if not task.uses_features:
        return jnp.concatenate([handover.first[:, None], handover.tokens], 1), None
    assert handover.features is not None
    batch, entries, width = handover.features.shape
    features = model.features(handover.features.reshape(batch * entries, width))
    return handover.tokens, features.reshape(batch, entries, -1)


def choose(
    logits: jax.Array, rows: StepRows, positions: jax.Array, task: DraftTask, target_ids: jax.Array | None,
    is_greedy: bool,
) -> jax.Array:  # fmt: skip
    """One drafted token int32[B], in the target's ids, per row of float32[B, draft vocabulary].

    Args:
        positions: int32[B], where the tokens will stand.
        target_ids: int32[draft vocabulary], or None where the vocabularies are the same.
        is_greedy: no row samples, and the host knows it.
    """
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32) if target_ids is None else target_ids
    logits = jnp.where(ids < task.num_ids, logits, -jnp.inf)
    best, _ = best_tokens(logits)
    if is_greedy:
        return ids[best]
    is_random = rows.sampling_floats[:, TEMPERATURE] > 0

    def drawn(logits: jax.Array) -> jax.Array:
        noise = draft_noise(rows, positions, task, ids)
        perturbed = perturbed_logits(logits, rows.sampling_floats, rows.sampling_ints, noise)
        return jnp.where(is_random, best_tokens(perturbed)[0], best)

    return ids[either(jnp.any(is_random), drawn, lambda _: best, logits)]


def draft_noise(rows: StepRows, positions: jax.Array, task: DraftTask, ids: jax.Array) -> jax.Array:
    """float32[B, draft vocabulary]: what the target model adds to the logits of ``ids`` at ``positions`` int32[B]."""
    seeds = rows.sampling_ints[:, SEED_LOW], rows.sampling_ints[:, SEED_HIGH]
    return gumbel_noise(*seeds, positions, task.vocab_size)[:, ids]


def make_draft_prep_program(key: ProgramKey, backend: AttentionBackend, task: DraftTask) -> Callable:
    """``prep(ticket, tables, inputs, handover) -> (StepRows, StepMetadata)``.

    It takes the target's results, so it cannot run, nor record that reads ended, before the target's launch has ended.
    """

    def prep(ticket, tables: list[jax.Array], inputs: HostInputs, handover: Handover):
        rows = read_rows(key, ticket, tables, inputs.row_ids)
        return planned(key, backend, rows, handover, task)

    return prep


def planned(
    key: ProgramKey, backend: AttentionBackend, rows: StepRows, handover: Handover, task: DraftTask
) -> tuple[StepRows, StepMetadata]:
    """Rows and metadata of the extend pass: lengths say where it begins; entries that do not count write nowhere."""
    shape = replace(key.shape, queries=key.shape.queries + task.extra_entries)
    lengths, counts = task.span(handover)
    rows = rows._replace(lengths=lengths)
    metadata = backend.prep(rows, shape, None)
    counts_as = jnp.arange(shape.queries, dtype=jnp.int32) < counts[:, None]
    return rows, metadata._replace(write_pages=jnp.where(counts_as, metadata.write_pages, 0))


def given_rows(
    key: ProgramKey, backend: AttentionBackend, ticket: jax.Array, tables: list[jax.Array], inputs: HostInputs,
    private: tuple[StepRows, StepMetadata] | None, handover: Handover, task: DraftTask,
) -> tuple[StepRows, StepMetadata]:  # fmt: skip
    """As ``planned``, from shared rows that are read here, or from those a prep program read."""
    if private is None:
        return planned(key, backend, read_rows(key, ticket, tables, inputs.row_ids), handover, task)
    rows, metadata = private
    if key.noted:
        rows = rows._replace(slots=rows.slots + ops.note(ticket, "begin", _HERE))
    return rows, metadata


class DraftPass:
    """Forward passes of a draft model inside one program.

    Args:
        used: see ``LiveRows``; None outside the race check.
        block_tables: int32[slots + 1, W_max] that backends reading live rows are given.
    """

    def __init__(self, key: ProgramKey, backend: AttentionBackend, model: Any, windows: tuple[int | None, ...],
                 rows: StepRows, metadata: StepMetadata, block_tables: jax.Array,
                 used: set[tuple[int, str]] | None):  # fmt: skip
        self.key, self._backend, self._model, self._windows = key, backend, model, windows
        self._rows, self._metadata, self._block_tables, self._used = rows, metadata, block_tables, used

    def __call__(self, pool: PagedKV, lengths: jax.Array, tokens: jax.Array, features: jax.Array | None = None,
                 tree: Tree | None = None) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:  # fmt: skip
        """Hidden states [B, Q, H] of Q new tokens behind ``lengths`` int32[B], and their keys and values."""
        batch, queries = tokens.shape
        key = self.key
        shape = StepShape(key.shape.mode, batch, queries, key.shape.table_width, key.shape.page_size)
        by_slot = jnp.zeros((self._block_tables.shape[0], 1), jnp.int32).at[self._rows.slots].set(lengths[:, None])
        live = LiveRows(self._rows.slots, self._block_tables, by_slot, ffi=key.end_record, used=self._used)
        metadata = self._metadata._replace(lengths=lengths)
        context = AttentionStep(shape, metadata, pool, live, self._windows, None, tree)
        keys: list[jax.Array] = []
        values: list[jax.Array] = []

        def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
            q, k, v = [x.reshape(batch, queries, *x.shape[1:]) for x in (q, k, v)]
            keys.append(k)
            values.append(v)
            return attend_layer(self._backend, context, layer, q, k, v, sinks).reshape(-1, *q.shape[2:])

        depths = jnp.arange(queries, dtype=jnp.int32) if tree is None else tree.depths
        positions = lengths[:, None] + depths
        own = [] if features is None else [features.reshape(batch * queries, -1)]
        hidden = self._model(tokens.reshape(-1), positions.reshape(-1), *own, attend)
        return hidden.reshape(batch, queries, -1), keys, values

    def extend(self, pool: PagedKV, lengths: jax.Array, counts: jax.Array, tokens: jax.Array,
               features: jax.Array | None) -> tuple[jax.Array, PagedKV]:  # fmt: skip
        """The state [B, H] at the last of the first ``counts`` int32[B] tokens, and the pool with the KV of those."""
        hidden, keys, values = self(pool, lengths, tokens, features)
        state = jnp.take_along_axis(hidden, counts[:, None, None] - 1, 1)[:, 0]
        pages, offsets = self._metadata.write_pages, self._metadata.write_offsets
        return state, pool.write(keys, values, pages, offsets, after=read_sign(state))


def ids_of(model: Any) -> jax.Array | None:
    """The target's id of each draft id, int32[draft vocabulary]; None where they are the same."""
    found = getattr(model, "target_ids", None)
    return None if found is None else found[...]


def read_sign(values: jax.Array) -> jax.Array:
    """int32[] >= 0 computed from ``values``, for ``PagedKV.write``."""
    first = jax.lax.bitcast_convert_type(values.reshape(-1)[0].astype(jnp.float32), jnp.int32)
    return jnp.bitwise_and(first, 0x7FFFFFFF)


def end_of(key: ProgramKey, ticket: jax.Array, rows: StepRows, tables: list[jax.Array], results: list[jax.Array],
           used: set[tuple[int, str]] | None) -> jax.Array:  # fmt: skip
    """The end record, behind everything."""
    for index, source in sorted(used or ()):
        if index == 1:  # lengths are no shared rows here
            width = [key.shape.table_width]
            results = [*results, ops.note_reads(ticket, rows.slots, [tables[1]], width, source, *results)]
    if key.end_record:
        return ops.record_end(ticket, *results)
    if key.noted:
        return ops.note(ticket, "end", _HERE, *results).astype(jnp.uint32)
    return jnp.zeros(1, jnp.uint32)


def chain_from(
    forward: DraftPass, model: Any, pool: PagedKV, rows: StepRows, state: jax.Array, lengths: jax.Array,
    position: jax.Array, task: DraftTask,
) -> jax.Array:  # fmt: skip
    """Drafts one after the other, int32[B, D], -1 behind the last.

    Args:
        state: [B, H], the draft model's state at the newest token.
        lengths: int32[B], entries of the draft model before the first draft.
        position: int32[B], where the first draft will stand.
    """
    depth = task.depth(forward.key.shape)
    drafts: list[jax.Array] = []
    states: list[jax.Array] = []
    for place in range(depth):
        drafts.append(choose(model.logits(state), rows, position + place, task, ids_of(model), forward.key.is_greedy))
        if place + 1 == depth:
            break
        states.append(state)
        features = jnp.stack(states, 1) if task.uses_features else None
        hidden, _, _ = forward(pool, lengths, jnp.stack(drafts, 1), features)
        state = hidden[:, -1]
    return padded(drafts, task.num_drafts, state.shape[0])


def padded(drafts: list[jax.Array], width: int, batch: int) -> jax.Array:
    """Drafts int32[B] each, side by side, -1 behind them: int32[B, width]."""
    missing = jnp.full((batch, width - len(drafts)), -1, jnp.int32)
    return jnp.concatenate([*(draft[:, None] for draft in drafts), missing], 1)


def make_draft_program(
    key: ProgramKey,
    backend: AttentionBackend,
    bind: Callable[[list[jax.Array]], Any],
    windows: tuple[int | None, ...],
    task: DraftTask,
    drafts_from: Callable[..., jax.Array] = chain_from,
) -> Callable:
    """The draft program.

    ``draft(leaves, pool, drafted, ticket, tables, inputs, private, handover) -> DraftOutputs``, with pool and drafted
    donated. Its shape is that of the target's program; mode EXTEND behind a prompt chunk, else DRAFT_EXTEND.

    Args:
        drafts_from: what is drafted, see ``chain_from``: a row of the relay for each row of the batch.
    """

    def draft(leaves, pool: PagedKV, drafted: jax.Array, ticket, tables: list[jax.Array], inputs: HostInputs,
              private: tuple[StepRows, StepMetadata] | None, handover: Handover) -> DraftOutputs:  # fmt: skip
        rows, metadata = given_rows(key, backend, ticket, tables, inputs, private, handover, task)
        used: set[tuple[int, str]] | None = set() if key.noted else None
        model = bind(leaves)
        forward = DraftPass(key, backend, model, windows, rows, metadata, tables[1], used)

        tokens, features = entries_of(task, model, handover)
        lengths, counts = task.span(handover)
        state, pool = forward.extend(pool, lengths, counts, tokens, features)
        position = handover.lengths + handover.counts + 1  # of the first draft: behind the newest token
        chosen = drafts_from(forward, model, pool, rows, state, lengths + counts, position, task)
        slots = inputs.relay_slots if key.shape.mode is ForwardMode.EXTEND else rows.slots
        drafted = drafted.at[slots].set(chosen)
        end = end_of(key, ticket, rows, tables, [pool.data, drafted, chosen], used)
        return DraftOutputs(pool, drafted, chosen, end)

    return draft

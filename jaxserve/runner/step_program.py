"""The step program: what one launch computes, from shared rows to sampled tokens.

rows       snapshot of the shared rows (the read-done marker), or private rows a prep program made
tokens     from the relay (decode), or from the host (prefill chunk, drafted tokens)
layers     the model's own code; its attention calls come back to the backend
sampled    logits, sampler, tokens into the relay
KV write   every layer's new keys and values, after the last read of the pool
end        the end record: the full-execution fence
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.attention.base import AttentionBackend, AttentionStep, LiveRows, StepMetadata, StepRows, StepShape
from jaxserve.attention.paged_kv import PagedKV
from jaxserve.barrier import ops
from jaxserve.barrier.shared_rows import NUM_SAMPLING_FLOATS, NUM_SAMPLING_INTS
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.runner.sampler import Sampled, sample

_HERE = "runner/step_program.py"  # where reads of rows by plain XLA operations are written


class RowSource(Enum):
    """Where a step program gets its rows.

    SNAPSHOT: the snapshot op at its head, which waits for the writes and records the end of the reads.
    COPY: plain XLA reads of the shared buffers, with no marker; the host has waited for the writes.
    PRIVATE: rows and metadata are operands, made by a prep program launched before.
    """

    SNAPSHOT = auto()
    COPY = auto()
    PRIVATE = auto()


@dataclass(frozen=True)
class ProgramKey:
    """What distinguishes the compiled programs of one runner."""

    shape: StepShape
    source: RowSource
    end_record: bool  # whether the program may hold the barrier's FFI operations; without them it records nothing
    hold_points: bool = False
    noted: bool = False  # whether the program tells the race check of reads that no handler of ours sees

    @property
    def label(self) -> str:
        """Short name for messages: ``decode[batch=8,width=16]``."""
        shape = self.shape
        sizes = f"batch={shape.batch},tokens={shape.queries},width={shape.table_width}"
        return f"{shape.mode.name.lower()}[{sizes}]"


class HostInputs(NamedTuple):
    """What the host sends with a launch, besides the shared rows. All private to the launch.

    Attributes:
        row_ids: int32[B], slots; unused in DECODE, where the shared ``batch_slots`` says it.
        tokens: int32[B, Q]; unused in DECODE, where tokens come from the relay.
        num_tokens: int32[], valid tokens of an EXTEND chunk.
        relay_slots: int32[B], where the sampled tokens go in the relay: the null slot when nobody needs them.
    """

    row_ids: jax.Array
    tokens: jax.Array
    num_tokens: jax.Array
    relay_slots: jax.Array


class StepOutputs(NamedTuple):
    """Results of a launch: the new pool and relay, and what the host collects."""

    pool: PagedKV
    relay: jax.Array
    sampled: Sampled
    end: jax.Array


def read_rows(key: ProgramKey, ticket: jax.Array, tables: list[jax.Array], row_ids: jax.Array) -> StepRows:
    """The step's private rows, read by the snapshot op or by plain XLA reads.

    Args:
        tables: the shared buffers in ``RowLayout.shapes`` order.
        row_ids: int32[>= B].
    """
    shape = key.shape
    from_shared = row_ids is tables[0]
    columns = tables[1:]
    widths = [shape.table_width, 1, NUM_SAMPLING_FLOATS, NUM_SAMPLING_INTS]
    if key.source is RowSource.SNAPSHOT:
        slots, copies = ops.snapshot(ticket, row_ids, columns, num_rows=shape.batch, widths=widths)
    else:
        slots = row_ids.reshape(-1)[: shape.batch]
        if key.noted:
            slots = slots + ops.note(ticket, "begin", _HERE)
        if key.hold_points:
            slots = slots + ops.hold("copy.before_reads", ticket)
        copies = [table[slots, :width] for table, width in zip(columns, widths, strict=True)]
        if key.noted:
            noted = ops.note_reads(ticket, slots, columns, widths, _HERE, *copies)
            if from_shared:
                noted += ops.note_reads(ticket, jnp.zeros(1, jnp.int32), tables[:1], [shape.batch], _HERE, slots)
            slots, copies = slots + noted, [copy + noted.astype(copy.dtype) for copy in copies]
    block_tables, lengths, floats, ints = copies
    return StepRows(slots, block_tables, lengths[:, 0], floats, ints)


def make_prep_program(key: ProgramKey, backend: AttentionBackend) -> Callable:
    """``prep(ticket, tables, inputs) -> (StepRows, StepMetadata)``: reads and planning as a program of its own."""

    def prep(ticket, tables: list[jax.Array], inputs: HostInputs):
        row_ids = tables[0] if key.shape.mode is ForwardMode.DECODE else inputs.row_ids
        num_tokens = inputs.num_tokens if key.shape.mode is ForwardMode.EXTEND else None
        rows = read_rows(key, ticket, tables, row_ids)
        return rows, backend.prep(rows, key.shape, num_tokens)

    return prep


def make_step_program(
    key: ProgramKey,
    backend: AttentionBackend,
    bind: Callable[[list[jax.Array]], Any],
    windows: tuple[int | None, ...],
    num_ids: int | None = None,
) -> Callable:
    """The step program.

    ``step(leaves, pool, relay, ticket, tables, inputs, private) -> StepOutputs``, with pool and relay donated.

    Args:
        bind: weights list -> model, called while tracing.
        windows: sliding window per layer, or None.
        num_ids: token ids that may be sampled: those below it; None for all.
    """
    shape = key.shape
    mode = shape.mode

    def step(leaves, pool: PagedKV, relay, ticket, tables: list[jax.Array], inputs: HostInputs,
             private: tuple[StepRows, StepMetadata] | None) -> StepOutputs:  # fmt: skip
        num_tokens = inputs.num_tokens if mode is ForwardMode.EXTEND else None
        if private is None:
            row_ids = tables[0] if mode is ForwardMode.DECODE else inputs.row_ids
            rows = read_rows(key, ticket, tables, row_ids)
            metadata = backend.prep(rows, shape, num_tokens)
        else:
            rows, metadata = private
            if key.noted:
                rows = rows._replace(slots=rows.slots + ops.note(ticket, "begin", _HERE))
        live = LiveRows(rows.slots, tables[1], tables[2], ffi=key.end_record, used=set() if key.noted else None)
        context = AttentionStep(shape, metadata, pool, live, windows, num_tokens)

        tokens = relay[rows.slots][:, None] if mode is ForwardMode.DECODE else inputs.tokens  # [B, Q]
        positions = metadata.lengths[:, None] + jnp.arange(shape.queries, dtype=jnp.int32)
        keys: list[jax.Array] = []
        values: list[jax.Array] = []

        def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            by_row = [x.reshape(shape.batch, shape.queries, *x.shape[1:]) for x in (q, k, v)]
            keys.append(by_row[1])
            values.append(by_row[2])
            return backend.attend(context, layer, *by_row).reshape(q.shape)

        model = bind(leaves)
        hidden = model(tokens.reshape(-1), positions.reshape(-1), attend)
        if mode is ForwardMode.EXTEND:  # only the chunk's last token can be followed by a new one
            hidden = jax.lax.dynamic_slice_in_dim(hidden, inputs.num_tokens - 1, 1)
            sampled_positions = metadata.lengths + inputs.num_tokens
            floats, ints = rows.sampling_floats, rows.sampling_ints
        else:
            sampled_positions = (positions + 1).reshape(-1)
            floats = jnp.repeat(rows.sampling_floats, shape.queries, axis=0)
            ints = jnp.repeat(rows.sampling_ints, shape.queries, axis=0)
        sampled = sample(model.logits(hidden), floats, ints, sampled_positions, num_ids)

        if mode is not ForwardMode.TARGET_VERIFY:  # which verified token is the last one is for acceptance to say
            relay_slots = rows.slots if mode is ForwardMode.DECODE else inputs.relay_slots
            relay = relay.at[relay_slots].set(sampled.tokens)
        pool = pool.write(keys, values, metadata.write_pages, metadata.write_offsets, after=sampled.tokens[0])
        results = [pool.data, relay, *sampled]
        end = jnp.zeros(1, jnp.uint32)
        if key.noted:  # a backend that was given live rows may read them as late as XLA likes
            for index, source in sorted(live.used or ()):
                widths = [shape.table_width if index == 1 else 1]
                results.append(ops.note_reads(ticket, rows.slots, [tables[index]], widths, source, *results))
        if key.end_record:
            end = ops.record_end(ticket, *results)
        elif key.noted:
            end = ops.note(ticket, "end", _HERE, *results).astype(jnp.uint32)
        return StepOutputs(pool, relay, sampled, end)

    return step

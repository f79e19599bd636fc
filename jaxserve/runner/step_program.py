"""The step program: what one launch computes, from shared rows to sampled tokens.

rows       snapshot of the shared rows (the read-done marker), or private rows a prep program made
tokens     from the relay (decode), from the host (prefill chunk), or from the relay and the drafts (verify)
layers     the model's own code, whose attention calls come back to the backend; or a captured step
sampled    logits, what requests do to them, sampler; in verify, acceptance; what is emitted into the relay
KV write   every layer's new keys and values, after the last read of the pool; in verify, those of accepted tokens only
end        the end record: the full-execution fence
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
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
)
from jaxserve.attention.paged_kv import PagedKV
from jaxserve.barrier import ops
from jaxserve.barrier.shared_rows import NUM_SAMPLING_FLOATS, NUM_SAMPLING_INTS
from jaxserve.barrier.tickets import TICKET_WORDS
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.core.sampling_params import MAX_HELD_STOP_IDS, MAX_LOGIT_BIAS
from jaxserve.runner.captured_steps import CapturedSteps
from jaxserve.runner.forward import captured_forward, forward
from jaxserve.runner.handover import (
    Handover,
    Relay,
    bounded_lengths,
    relay_after,
    tokens_behind,
)
from jaxserve.runner.logit_controls import Controls, TokenMasks
from jaxserve.runner.sampler import Sampled, sample
from jaxserve.runner.verify import accept, along_path, chain_parents, tree_geometry

_HERE = "runner/step_program.py"  # where reads of rows by plain XLA operations are written


class RowSource(Enum):
    """Where a step program gets its rows.

    SNAPSHOT: the snapshot op at its head, which waits for the writes and records the end of the reads.
    COPY: plain XLA reads of the shared buffers, with no marker; the host has waited for the writes.
    PRIVATE: rows and metadata are operands, made by a prep program launched before.
    HANDED: rows are an operand, handed over by the target model's program.
    """

    SNAPSHOT = auto()
    COPY = auto()
    PRIVATE = auto()
    HANDED = auto()


class DraftRows(Enum):
    """Where a verify program gets its drafts.

    SNAPSHOT: from shared rows the scheduler wrote, read with the other rows, ahead of the marker. LIVE: from the same,
    where they are used, the acceptance at the end included; the marker does not end these reads, so such a launch needs
    the full-execution fence. RELAYED: from a draft model's launch, as an operand; context lengths then come from the
    relay too, because a step can be planned before it is known how many drafts of the last one held.
    """

    SNAPSHOT = auto()
    LIVE = auto()
    RELAYED = auto()


@dataclass(frozen=True)
class DraftForm:
    """What verify programs are compiled for: how drafts are read, and whether they may be trees or are chains."""

    rows: DraftRows = DraftRows.SNAPSHOT
    is_tree: bool = False
    hands_rows: bool = False  # RELAYED: whether the draft model is handed the rows instead of reading them

    @property
    def is_relayed(self) -> bool:
        """Whether drafts never pass the host."""
        return self.rows is DraftRows.RELAYED


CHAIN = DraftForm()


@dataclass(frozen=True)
class ProgramKey:
    """What distinguishes the compiled programs of one runner."""

    shape: StepShape
    source: RowSource
    end_record: bool  # whether the program may hold the barrier's FFI operations; without them it records nothing
    hold_points: bool = False
    noted: bool = False  # whether the program tells the race check of reads that no handler of ours sees
    drafts: DraftForm | None = None  # of TARGET_VERIFY
    takes_masks: bool = False  # whether launches bring token masks
    hands_over: bool = False  # whether a draft model goes on from what the program computed
    hands_rows: bool = False  # whether it is handed the private rows, too
    feature_points: tuple[int, ...] = ()  # where it observes the model, see ``models.draft``
    is_greedy: bool = False  # whether every row takes its likeliest token and nobody asks for more, see ``sampler``

    @property
    def early_drafts(self) -> int:
        """Drafts per row that are read with the other rows."""
        early = self.drafts is not None and self.drafts.rows is DraftRows.SNAPSHOT
        return self.shape.queries - 1 if early else 0

    @property
    def label(self) -> str:
        """Short name for messages: ``decode[batch=8,width=16]``."""
        shape = self.shape
        sizes = f"batch={shape.batch},tokens={shape.queries},width={shape.table_width}"
        return f"{shape.mode.name.lower()}{' greedy' if self.is_greedy else ''}[{sizes}]"


class HostInputs(NamedTuple):
    """What the host sends with a launch, besides the shared rows. All private to the launch.

    Attributes:
        row_ids: int32[B], slots; unused in DECODE, where the shared ``batch_slots`` says it.
        tokens: int32[B, Q] of EXTEND; int32[B, 1], unused, elsewhere: tokens come from relay and draft rows.
        num_tokens: int32[B], valid tokens of EXTEND rows, at least 1.
        relay_slots: int32[B], where the sampled tokens go in the relay: the null slot when nobody needs them.
        next_token: int32[B], of an EXTEND chunk that is not a prompt's last: the token behind it; else -1.
        masks: ids that may be chosen behind each of the B * Q tokens (EXTEND: behind its last); None in programs that
            take none.
    """

    row_ids: jax.Array
    tokens: jax.Array
    num_tokens: jax.Array
    relay_slots: jax.Array
    next_token: jax.Array
    masks: TokenMasks | None = None


class StepOutputs(NamedTuple):
    """Results of a launch: the new pool and relay, and what the host collects.

    Attributes:
        sampled: one row per batch row; in TARGET_VERIFY Q rows for each, those of the accepted path first.
        counts: int32[B], how many of a row's results count; None outside TARGET_VERIFY: one.
        hidden: [Q, hidden], final hidden states of a single EXTEND chunk, see ``runner.prompt_reader``; else None.
    """

    pool: PagedKV
    relay: Relay
    sampled: Sampled
    end: jax.Array
    counts: jax.Array | None = None
    handover: Handover | None = None
    hidden: jax.Array | None = None


def read_rows(key: ProgramKey, ticket: jax.Array, tables: list[jax.Array], row_ids: jax.Array) -> StepRows:
    """The step's private rows, read by the snapshot op or by plain XLA reads.

    Args:
        tables: the shared buffers in ``RowLayout.shapes`` order.
        row_ids: int32[>= B].
    """
    shape = key.shape
    from_shared = row_ids is tables[0]
    widths = [shape.table_width, 1, NUM_SAMPLING_FLOATS, NUM_SAMPLING_INTS]
    widths += [MAX_LOGIT_BIAS + MAX_HELD_STOP_IDS, MAX_LOGIT_BIAS]
    widths += [key.early_drafts] * 2 if key.early_drafts else []
    columns = tables[1 : 1 + len(widths)]
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
    block_tables, lengths, *others = copies
    return StepRows(slots, block_tables, lengths[:, 0], *others)


def read_drafts(
    key: ProgramKey, ticket: jax.Array, rows: StepRows, tables: list[jax.Array], after: jax.Array, point: str
) -> tuple[jax.Array, jax.Array]:
    """Draft tokens and parents int32[B, Q - 1]: the step's own, or those in the shared rows once ``after`` is computed.

    In a chain the parents only say which entries are used.

    Args:
        point: hold point ahead of live reads.
    """
    assert key.drafts is not None and not key.drafts.is_relayed
    widths = [key.shape.queries - 1] * 2
    if key.drafts.rows is DraftRows.SNAPSHOT:
        tokens, parents = rows.draft_tokens, rows.draft_parents
        assert tokens is not None and parents is not None
    else:
        if key.end_record:
            # Tied to what comes before, or XLA would read everything at the start of the program.
            slots = rows.slots + ops.hold(point, after)
            no_ticket = jnp.zeros(TICKET_WORDS, jnp.uint32)
            _, (tokens, parents) = ops.snapshot(no_ticket, slots, tables[-2:], num_rows=slots.shape[0], widths=widths)
        else:
            tokens, parents = [table[rows.slots, : widths[0]] for table in tables[-2:]]
        if key.noted:
            noted = ops.note_reads(ticket, rows.slots, tables[-2:], widths, _HERE, tokens, parents, after)
            tokens, parents = tokens + noted, parents + noted
    if not key.drafts.is_tree:
        parents = jnp.where(parents >= 0, chain_parents(*parents.shape), -1)
    return tokens, parents


def relayed_drafts(key: ProgramKey, drafted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draft tokens and parents int32[B, Q - 1] from a draft model's relay: the first of its D columns, which in a tree
    are followed by as many with parents. A token of -1 there is none."""
    assert key.drafts is not None
    used = key.shape.queries - 1
    if key.drafts.is_tree:
        tokens, parents = [half[:, :used] for half in jnp.split(drafted, 2, axis=1)]
    else:
        tokens = drafted[:, :used]
        parents = chain_parents(*tokens.shape)
    return jnp.maximum(tokens, 0), jnp.where(tokens < 0, -1, parents)


def emitted(sampled: Sampled, path: jax.Array, counts: jax.Array) -> tuple[Sampled, jax.Array]:
    """Results along the accepted paths int32[B, Q], and the newest token int32[B] of each row."""
    batch, queries = path.shape
    flat = (jnp.arange(batch)[:, None] * queries + path).reshape(-1)
    along = Sampled(*(values[flat] for values in sampled))
    return along, jnp.take_along_axis(along.tokens.reshape(batch, queries), counts[:, None] - 1, 1)[:, 0]


def make_prep_program(key: ProgramKey, backend: AttentionBackend) -> Callable:
    """``prep(ticket, tables, inputs, lengths) -> (StepRows, StepMetadata)``: the reads, as a program of its own.

    ``lengths``: int32[slots + 1] of the relay, where they come from there; else None.
    """

    def prep(ticket, tables: list[jax.Array], inputs: HostInputs, lengths: jax.Array | None):
        row_ids = tables[0] if key.shape.mode is ForwardMode.DECODE else inputs.row_ids
        num_tokens = inputs.num_tokens[:, None] if key.shape.mode is ForwardMode.EXTEND else None
        rows = read_rows(key, ticket, tables, row_ids)
        if lengths is not None:
            rows = rows._replace(lengths=bounded_lengths(key.shape, lengths)[rows.slots])
        return rows, backend.prep(rows, key.shape, num_tokens)

    return prep


def make_step_program(
    key: ProgramKey,
    backend: AttentionBackend,
    bind: Callable[[list[jax.Array]], Any],
    windows: tuple[int | None, ...],
    num_ids: int | None = None,
    captured: CapturedSteps | None = None,
) -> Callable:
    """The step program.

    ``step(leaves, pool, relay, ticket, tables, inputs, private, drafted) -> StepOutputs``, with pool and relay donated.
    ``drafted``: int32[slots + 1, D or twice that], D >= Q - 1, see ``relayed_drafts``; None unless drafts are RELAYED.

    Args:
        bind: weights list -> model, called while tracing.
        windows: sliding window per layer, or None.
        num_ids: token ids that may be sampled: those below it; None for all.
        captured: who computes the model in decode and verify programs; None: XLA.
    """
    shape = key.shape
    mode = shape.mode
    is_relayed = key.drafts is not None and key.drafts.is_relayed

    def step(leaves, pool: PagedKV, relay: Relay, ticket, tables: list[jax.Array], inputs: HostInputs,
             private: tuple[StepRows, StepMetadata] | None, drafted: jax.Array | None) -> StepOutputs:  # fmt: skip
        num_tokens = inputs.num_tokens[:, None] if mode is ForwardMode.EXTEND else None
        lengths = bounded_lengths(shape, relay.lengths) if is_relayed and relay.lengths is not None else None
        if private is None:
            row_ids = tables[0] if mode is ForwardMode.DECODE else inputs.row_ids
            rows = read_rows(key, ticket, tables, row_ids)
            if is_relayed:
                assert lengths is not None
                rows = rows._replace(lengths=lengths[rows.slots])
            metadata = backend.prep(rows, shape, num_tokens)
        else:
            rows, metadata = private
            if key.noted:
                rows = rows._replace(slots=rows.slots + ops.note(ticket, "begin", _HERE))
        live_lengths = tables[2] if lengths is None else lengths[:, None]
        live = LiveRows(rows.slots, tables[1], live_lengths, ffi=key.end_record, used=set() if key.noted else None)
        tree = None
        seen = jnp.broadcast_to(jnp.tri(shape.queries, dtype=bool), (shape.batch, shape.queries, shape.queries))
        positions = metadata.lengths[:, None] + jnp.arange(shape.queries, dtype=jnp.int32)
        if mode is ForwardMode.EXTEND:
            tokens = inputs.tokens
        else:
            tokens = relay.tokens[rows.slots][:, None]  # [B, Q]
        if is_relayed:
            assert drafted is not None
            draft_tokens, parents = relayed_drafts(key, drafted[rows.slots])
            if inputs.masks is not None:
                parents = jnp.where(inputs.masks.undrafted[:, None], -1, parents)
        elif key.drafts is not None:
            draft_tokens, parents = read_drafts(key, ticket, rows, tables, metadata.lengths, "drafts.before_reads")
        if key.drafts is not None:
            tokens = jnp.concatenate([tokens, draft_tokens], 1)
            if key.drafts.is_tree:
                depths, seen = tree_geometry(parents)
                tree = Tree(seen, depths)
                positions = metadata.lengths[:, None] + depths
        context = AttentionStep(shape, metadata, pool, live, windows, num_tokens, tree)
        model = bind(leaves)
        if captured is None or mode is ForwardMode.EXTEND:
            computed = forward(model, backend, context, tokens, positions, key.feature_points)
        else:
            computed = captured_forward(captured, model, context, tokens, positions, key.feature_points)
        keys, values, features = computed.keys, computed.values, computed.features
        if features is not None:
            features = features.reshape(shape.batch, shape.queries, -1)
        states = computed.hidden if mode is ForwardMode.EXTEND and shape.batch == 1 else None
        if mode is ForwardMode.EXTEND:  # only a chunk's last token can be followed by a new one
            last_tokens = jnp.arange(shape.batch) * shape.queries + inputs.num_tokens - 1
            logits = computed.scores(model, last_tokens)
            sampled_positions = metadata.lengths + inputs.num_tokens
            floats, ints = rows.sampling_floats, rows.sampling_ints
        else:
            logits = computed.scores(model)
            sampled_positions = (positions + 1).reshape(-1)
            floats = jnp.repeat(rows.sampling_floats, shape.queries, axis=0)
            ints = jnp.repeat(rows.sampling_ints, shape.queries, axis=0)
        controls = Controls(
            rows.sampling_floats, rows.sampling_ints, rows.bias_ids, rows.bias_values, sampled_positions,
            relay.token_counts, rows.slots, (tokens, seen) if key.drafts is not None else None, inputs.masks,
        )  # fmt: skip
        sampled = sample(logits, floats, ints, sampled_positions, num_ids, controls, key.is_greedy)
        last_read = sampled.tokens[0]

        newest, write_pages, counts, is_accepted = sampled.tokens, metadata.write_pages, None, None
        if key.drafts is not None:
            target = sampled.tokens.reshape(shape.batch, shape.queries)
            if not is_relayed:
                draft_tokens, parents = read_drafts(key, ticket, rows, tables, target, "drafts.before_acceptance")
            path, counts = accept(jnp.concatenate([tokens[:, :1], draft_tokens], 1), parents, target)
            sampled, newest = emitted(sampled, path, counts)
            # Accepted tokens are packed on their way to the pool, so nothing has to be moved there.
            keys, values = [[along_path(x, path) for x in fresh] for fresh in (keys, values)]
            is_accepted = jnp.arange(shape.queries, dtype=jnp.int32) < counts[:, None]
            write_pages = jnp.where(is_accepted, write_pages, 0)
            features = None if features is None else along_path(features, path)
        relay_slots = inputs.relay_slots if mode is ForwardMode.EXTEND else rows.slots
        every_token = sampled.tokens.reshape(shape.batch, -1)
        handover = None
        if key.hands_over:
            if counts is None:
                behind = tokens_behind(inputs.tokens, inputs.num_tokens, inputs.next_token, newest)
                handover = Handover(tokens[:, 0], behind, inputs.num_tokens, metadata.lengths, features)
            else:
                handover = Handover(tokens[:, 0], every_token, counts, metadata.lengths, features)
            if key.hands_rows:
                handover = handover._replace(rows=rows._replace(draft_tokens=None, draft_parents=None))
        relay = relay_after(relay, relay_slots, newest, every_token, is_accepted, handover)
        pool = pool.write(keys, values, write_pages, metadata.write_offsets, after=last_read)
        results = jax.tree.leaves((pool, relay, sampled, counts, handover))
        end = jnp.zeros(1, jnp.uint32)
        if key.noted:  # a backend that was given live rows may read them as late as XLA likes
            for index, source in sorted(live.used or ()):
                if index == 2 and is_relayed:
                    continue  # not a shared row
                widths = [shape.table_width if index == 1 else 1]
                results.append(ops.note_reads(ticket, rows.slots, [tables[index]], widths, source, *results))
        if key.end_record:
            end = ops.record_end(ticket, *results)
        elif key.noted:
            end = ops.note(ticket, "end", _HERE, *results).astype(jnp.uint32)
        return StepOutputs(pool, relay, sampled, end, counts, handover, states)

    return step

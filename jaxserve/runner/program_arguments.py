"""The abstract arguments programs are compiled for. No array is made: sizes are enough."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.attention.base import StepMetadata, StepRows
from jaxserve.attention.paged_kv import KVLayout, PagedKV
from jaxserve.barrier.shared_rows import NUM_SAMPLING_FLOATS, NUM_SAMPLING_INTS, RowLayout
from jaxserve.barrier.tickets import TICKET_WORDS
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.core.sampling_params import MAX_HELD_STOP_IDS, MAX_LOGIT_BIAS
from jaxserve.core.shapes import ceil_div
from jaxserve.runner.handover import Handover, Relay
from jaxserve.runner.logit_controls import MASK_BITS, TokenMasks
from jaxserve.runner.step_program import HostInputs, ProgramKey, RowSource

STEP_DONATES = (1, 2)  # pool and relay
STEP_ARGUMENTS = ("leaves", "pool", "relay", "ticket", "tables", "inputs", "private", "drafted")
PREP_ARGUMENTS = ("ticket", "tables", "inputs", "lengths")
DRAFT_ARGUMENTS = ("leaves", "pool", "drafted", "ticket", "tables", "inputs", "private", "handover")
DRAFT_PREP_ARGUMENTS = ("ticket", "tables", "inputs", "handover")


def _ints(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def prep_arguments(key: ProgramKey, layout: RowLayout) -> tuple:
    """(ticket, tables, inputs, lengths) of a prep program; see ``make_prep_program``."""
    is_relayed = key.drafts is not None and key.drafts.is_relayed
    return *_common_arguments(key, layout), _ints(layout.num_slots + 1) if is_relayed else None


def _common_arguments(key: ProgramKey, layout: RowLayout) -> tuple:
    shape = key.shape
    queries = shape.queries if shape.mode is ForwardMode.EXTEND else 1
    ticket = jax.ShapeDtypeStruct((TICKET_WORDS,), jnp.uint32)
    tables = [jax.ShapeDtypeStruct((rows, columns), dtype) for rows, columns, dtype in layout.shapes().values()]
    row = _ints(shape.batch)
    inputs = HostInputs(row, _ints(shape.batch, queries), row, row, row)
    return ticket, tables, inputs


def _private_arguments(key: ProgramKey) -> tuple | None:
    if key.source is not RowSource.PRIVATE:
        return None
    b, q, w = key.shape.batch, key.shape.queries, key.shape.table_width
    return _rows(b, w, key.early_drafts), StepMetadata(_ints(b, w), _ints(b), _ints(b, q), _ints(b, q))


def _rows(batch: int, width: int, num_drafts: int) -> StepRows:
    drafts = [_ints(batch, num_drafts)] * 2 if num_drafts else []
    floats: Any = jax.ShapeDtypeStruct((batch, NUM_SAMPLING_FLOATS), jnp.float32)
    values: Any = jax.ShapeDtypeStruct((batch, MAX_LOGIT_BIAS), jnp.float32)
    bias = _ints(batch, MAX_LOGIT_BIAS + MAX_HELD_STOP_IDS), values
    ints = _ints(batch, NUM_SAMPLING_INTS)
    return StepRows(_ints(batch), _ints(batch, width), _ints(batch), floats, ints, *bias, *drafts)


def step_arguments(
    key: ProgramKey, layout: RowLayout, leaves: Sequence[Any], kv: KVLayout, vocab_size: int, num_drafts: int = 0
) -> tuple:
    """(leaves, pool, relay, ticket, tables, inputs, private, drafted) of a step program; see ``make_step_program``.

    Args:
        leaves: weights, or anything with their shapes and dtypes.
        num_drafts: drafts a row of a draft model's relay holds; parents beside them are not counted.
    """
    rows = layout.num_slots + 1
    ticket, tables, inputs = _common_arguments(key, layout)
    if key.takes_masks:
        inputs = inputs._replace(masks=_mask_arguments(key, vocab_size))
    relay = Relay(_ints(rows), _ints(rows, vocab_size), _ints(rows) if key.hands_over else None)
    is_relayed = key.drafts is not None and key.drafts.is_relayed
    width = num_drafts * (2 if key.drafts is not None and key.drafts.is_tree else 1)
    drafted = _ints(rows, width) if is_relayed else None
    return _abstract(leaves), _pool(kv), relay, ticket, tables, inputs, _private_arguments(key), drafted


def _mask_arguments(key: ProgramKey, vocab_size: int) -> TokenMasks:
    batch, queries = key.shape.batch, 1 if key.shape.mode is ForwardMode.EXTEND else key.shape.queries
    words: Any = jax.ShapeDtypeStruct((batch * queries, ceil_div(vocab_size, MASK_BITS)), jnp.uint32)
    undrafted: Any = jax.ShapeDtypeStruct((batch,), jnp.bool_)
    return TokenMasks(words, _ints(), undrafted)


def handover_arguments(key: ProgramKey, features: int, dtype: Any, hands_rows: bool) -> Handover:
    """What a draft program of this key is handed, with ``features`` numbers per entry (0: none)."""
    b, q = key.shape.batch, key.shape.queries
    observed: Any = jax.ShapeDtypeStruct((b, q, features), dtype) if features else None
    rows = _rows(b, key.shape.table_width, 0) if hands_rows else None
    return Handover(_ints(b), _ints(b, q), _ints(b), _ints(b), observed, rows)


def draft_prep_arguments(key: ProgramKey, layout: RowLayout, handover: Handover) -> tuple:
    """(ticket, tables, inputs, handover) of a draft model's prep program; see ``make_draft_prep_program``."""
    return *_common_arguments(key, layout), handover


def draft_arguments(
    key: ProgramKey,
    layout: RowLayout,
    leaves: Sequence[Any],
    kv: KVLayout,
    handover: Handover,
    relay: Any,
    extra_entries: int,
) -> tuple:
    """(leaves, pool, drafted, ticket, tables, inputs, private, handover) of a draft program; see
    ``make_draft_program``.

    Args:
        relay: the draft model's, as shapes and dtypes.
    """
    ticket, tables, inputs = _common_arguments(key, layout)
    wider = dataclasses.replace(key, shape=dataclasses.replace(key.shape, queries=key.shape.queries + extra_entries))
    return _abstract(leaves), _pool(kv), relay, ticket, tables, inputs, _private_arguments(wider), handover


def _abstract(leaves: Sequence[Any]) -> list[Any]:
    return [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]


def _pool(kv: KVLayout) -> PagedKV:
    return PagedKV(jax.ShapeDtypeStruct(kv.shape, kv.dtype))  # type: ignore[arg-type]

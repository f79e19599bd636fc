"""The abstract arguments programs are compiled for. No array is made: sizes are enough."""

from __future__ import annotations

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
from jaxserve.runner.logit_controls import MASK_BITS, TokenMasks
from jaxserve.runner.relay import Relay
from jaxserve.runner.step_program import HostInputs, ProgramKey, RowSource

STEP_DONATES = (1, 2)  # pool and relay
STEP_ARGUMENTS = ("leaves", "pool", "relay", "ticket", "tables", "inputs", "private")
PREP_ARGUMENTS = ("ticket", "tables", "inputs")


def _ints(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def prep_arguments(key: ProgramKey, layout: RowLayout) -> tuple:
    """(ticket, tables, inputs) of a prep program; see ``make_prep_program``."""
    shape = key.shape
    queries = shape.queries if shape.mode is ForwardMode.EXTEND else 1
    ticket = jax.ShapeDtypeStruct((TICKET_WORDS,), jnp.uint32)
    tables = [jax.ShapeDtypeStruct((rows, columns), dtype) for rows, columns, dtype in layout.shapes().values()]
    inputs = HostInputs(_ints(shape.batch), _ints(shape.batch, queries), _ints(), _ints(shape.batch))
    return ticket, tables, inputs


def step_arguments(key: ProgramKey, layout: RowLayout, leaves: Sequence[Any], kv: KVLayout, vocab_size: int) -> tuple:
    """(leaves, pool, relay, ticket, tables, inputs, private) of a step program; see ``make_step_program``.

    Args:
        leaves: weights, or anything with their shapes and dtypes.
    """
    shape = key.shape
    ticket, tables, inputs = prep_arguments(key, layout)
    if key.takes_masks:
        num_rows = shape.batch * (1 if shape.mode is ForwardMode.EXTEND else shape.queries)
        words: Any = jax.ShapeDtypeStruct((num_rows, ceil_div(vocab_size, MASK_BITS)), jnp.uint32)
        inputs = inputs._replace(masks=TokenMasks(words, _ints()))
    weights = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    pool = PagedKV(jax.ShapeDtypeStruct(kv.shape, kv.dtype))  # type: ignore[arg-type]
    private = None
    if key.source is RowSource.PRIVATE:
        b, q, w = shape.batch, shape.queries, shape.table_width
        drafts = [_ints(b, key.early_drafts)] * 2 if key.early_drafts else []
        floats: Any = jax.ShapeDtypeStruct((b, NUM_SAMPLING_FLOATS), jnp.float32)
        bias: Any = _ints(b, MAX_LOGIT_BIAS + MAX_HELD_STOP_IDS), jax.ShapeDtypeStruct((b, MAX_LOGIT_BIAS), jnp.float32)
        private = (
            StepRows(_ints(b), _ints(b, w), _ints(b), floats, _ints(b, NUM_SAMPLING_INTS), *bias, *drafts),
            StepMetadata(_ints(b, w), _ints(b), _ints(b, q), _ints(b, q)),
        )
    num_slots = layout.num_slots + 1
    relay = Relay(_ints(num_slots), _ints(num_slots, vocab_size))
    return weights, pool, relay, ticket, tables, inputs, private

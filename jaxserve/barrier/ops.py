"""The barrier's operations inside programs: snapshot, end record, hold.

XLA schedules by data flow, so each is tied in by operands and results. ``snapshot`` is the read-done marker of an
IN_REPLAY backend: XLA cannot look inside it, so no read of a shared row can move past it.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

# The calls have a side effect for XLA (it must neither merge, drop nor repeat them) but none for JAX: with an effect of
# its own a program loses JAX's fast dispatch path, which costs milliseconds of Python per launch. So this is a
# primitive with its own lowering, and every caller uses the results, which keeps JAX from dropping it.
_call_p = Primitive("jaxserve_barrier_call")
_call_p.multiple_results = True


@_call_p.def_abstract_eval
def _abstract_eval(*operands: Any, target: str, results: tuple, attributes: tuple) -> list:
    return [jax.core.ShapedArray(shape, dtype) for shape, dtype in results]


def _lower(ctx: Any, *operands: Any, target: str, results: tuple, attributes: tuple) -> Any:
    given = {name: np.array(v, np.int64) if isinstance(v, tuple) else v for name, v in attributes}
    return jax.ffi.ffi_lowering(target, has_side_effect=True)(ctx, *operands, **given)


mlir.register_lowering(_call_p, _lower)


def _call(
    target: str, results: Sequence[jax.ShapeDtypeStruct], *operands: jax.Array, **attributes: Any
) -> list[jax.Array]:
    shapes = tuple((tuple(r.shape), jnp.dtype(r.dtype)) for r in results)
    return _call_p.bind(*operands, target=target, results=shapes, attributes=tuple(attributes.items()))


_graph_channel: contextvars.ContextVar[int | None] = contextvars.ContextVar("graph_channel", default=None)


@contextlib.contextmanager
def markers_in_graph(channel: int) -> Iterator[None]:
    """While a program is traced: its snapshot and end record may become part of a CUDA graph.

    They use the fixed events of that channel, which must outlive the program. Its ``write_done`` ring must mirror its
    records, and the host calls ``note_graph_record`` of the others after each launch. Not inside ``cond`` or ``while``.
    """
    token = _graph_channel.set(channel)
    try:
        yield
    finally:
        _graph_channel.reset(token)


def snapshot(
    ticket: jax.Array, row_ids: jax.Array, tables: Sequence[jax.Array], *, num_rows: int, widths: Sequence[int]
) -> tuple[jax.Array, list[jax.Array]]:
    """Waits for the launch's row writes, copies rows of shared tables, records the end of the reads.

    Args:
        ticket: uint32[16], the launch ticket.
        row_ids: int32 with at least ``num_rows`` elements; may be a shared buffer itself.
        tables: shared buffers [slots, columns] of int32 or float32.
        num_rows: rows to copy.
        widths: columns to copy, one per table.

    Returns:
        (row_ids int32[num_rows], [copy [num_rows, width] per table]).
    """
    results = [jax.ShapeDtypeStruct((num_rows,), jnp.int32)]
    results += [jax.ShapeDtypeStruct((num_rows, w), t.dtype) for t, w in zip(tables, widths, strict=True)]
    channel = _graph_channel.get()
    if channel is None:
        copied_ids, *copies = _call("jaxserve_snapshot", results, ticket, row_ids, *tables)
    else:
        copied_ids, *copies = _call(
            "jaxserve_snapshot_graph", results, ticket, row_ids, *tables, channel=np.int64(channel)
        )
    return copied_ids, copies


def record_end(ticket: jax.Array, *values: jax.Array) -> jax.Array:
    """Records the end of the program once ``values`` are computed. Returns uint32[1] zero."""
    result, channel = jax.ShapeDtypeStruct((1,), jnp.uint32), _graph_channel.get()
    if channel is None:
        return _call("jaxserve_record_end", [result], ticket, *values)[0]
    numbered = {"channel": np.int64(channel), "read_done": False}
    return _call("jaxserve_record_end_graph", [result], ticket, *values, **numbered)[0]


def note(ticket: jax.Array, what: str, source: str, *values: jax.Array) -> jax.Array:
    """Journals the ``"begin"`` or the ``"end"`` of an execution once ``values`` are computed.

    For programs built for the race check. Returns int32[1] zero, to be added to what must come later.
    """
    return note_reads(ticket, jnp.zeros(0, jnp.int32), [], [], source, *values, what=what)


def note_reads(
    ticket: jax.Array, row_ids: jax.Array, tables: Sequence[jax.Array], widths: Sequence[int], source: str,
    *values: jax.Array, what: str = "reads",
) -> jax.Array:  # fmt: skip
    """Journals reads of shared rows that XLA code made, and no handler saw. For programs built for the race check.

    Args:
        row_ids: int32[B]; if it is a shared buffer, its own read is journalled too.
        tables: shared buffers; columns [0, width) of each were read at ``row_ids``.
        source: ``file.py:line`` of the read.
        values: what was read, or is computed from it: the note comes after them.
        what: ``"writes"`` for rows that the program changed.

    Returns:
        int32[1] zero, to be added to what must come later.
    """
    results = [jax.ShapeDtypeStruct((1,), jnp.int32)]
    return _call(
        "jaxserve_note", results, ticket, row_ids, *tables, *values,
        what=what, source=source, widths=tuple(int(width) for width in widths),
    )[0]  # fmt: skip


def hold(point: str, *values: jax.Array) -> jax.Array:
    """Passes a hold point once ``values`` are computed. Returns int32[1] zero, to be added to what must come later."""
    return _call("jaxserve_hold", [jax.ShapeDtypeStruct((1,), jnp.int32)], *values, point=point)[0]

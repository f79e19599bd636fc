"""The barrier's operations inside programs: snapshot, end record, hold.

XLA schedules by data flow, so each is tied in by operands and results. ``snapshot`` is the read-done marker of an
IN_REPLAY backend: XLA cannot look inside it, so no read of a shared row can move past it.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def snapshot(ticket: jax.Array, row_ids: jax.Array, tables: Sequence[jax.Array], *, num_rows: int, widths: Sequence[int]):
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
    # Side-effecting, so that it is neither merged with a twin nor dropped.
    copied_ids, *copies = jax.ffi.ffi_call("jaxserve_snapshot", results, has_side_effect=True)(ticket, row_ids, *tables)
    return copied_ids, copies


def record_end(ticket: jax.Array, *values: jax.Array) -> jax.Array:
    """Records the end of the program once ``values`` are computed. Returns uint32[1] zero."""
    result = jax.ShapeDtypeStruct((1,), jnp.uint32)
    return jax.ffi.ffi_call("jaxserve_record_end", result, has_side_effect=True)(ticket, *values)


def hold(point: str, *values: jax.Array) -> jax.Array:
    """Passes a hold point once ``values`` are computed. Returns int32[1] zero, to be added to what must come later."""
    result = jax.ShapeDtypeStruct((1,), jnp.int32)
    return jax.ffi.ffi_call("jaxserve_hold", result, has_side_effect=True)(*values, point=point)

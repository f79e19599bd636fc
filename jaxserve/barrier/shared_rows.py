"""The shared rows: what the scheduler writes in place while programs read.

One row per slot: block table, context length, sampling parameters; and one list of the slots that decode together. The
last slot is the null slot: padding rows point to it, its block table names only the null page.

``shared`` is the engine's way. ``upload`` and ``functional`` do the same with fresh device arrays each step, as an
engine without shared buffers must; they exist to be measured beside it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import numpy as np

from jaxserve.barrier import journal
from jaxserve.barrier.native import native_module
from jaxserve.barrier.tickets import Event, make_ring, reserve
from jaxserve.core.config import SharedUpdates
from jaxserve.core.sampling_params import MAX_HELD_STOP_IDS, MAX_LOGIT_BIAS

NUM_SAMPLING_FLOATS = 8  # temperature, top_p, min_p, frequency, presence and repetition penalty, (free), (free)
NUM_SAMPLING_INTS = 8  # top_k, seed low word, seed high word, flags, length before which no stop id, (free) * 3
MIN_STAGING_BLOCKS = 64
WRITES_PER_SLOT = 14  # row writes two plans can need for each slot: admission, growth, release, and recovery
STAGING_BLOCK_BYTES = 4096


@dataclass(frozen=True)
class RowLayout:
    """Sizes of the shared rows.

    Attributes:
        num_slots: decode slots; the null slot is number ``num_slots``, behind them.
        table_width: block-table columns, pages of the longest sequence.
        num_drafts: most drafted tokens of a row; 0 without speculation, and then there are no draft tables.
    """

    num_slots: int
    table_width: int
    num_drafts: int = 0

    @property
    def null_slot(self) -> int:
        """The slot of padding rows."""
        return self.num_slots

    def shapes(self) -> dict[str, tuple[int, int, type]]:
        """Buffer name -> (rows, columns, dtype), in the order programs take them."""
        rows = self.num_slots + 1
        return {
            "batch_slots": (1, self.num_slots, np.int32),  # slot of each batch row
            "block_tables": (rows, self.table_width, np.int32),  # page ids, 0 = null page
            "lengths": (rows, 1, np.int32),  # tokens with KV before this step
            "sampling_floats": (rows, NUM_SAMPLING_FLOATS, np.float32),
            "sampling_ints": (rows, NUM_SAMPLING_INTS, np.int32),
            # Of the tokens whose logits a request changes, and behind them the stop ids that min_tokens holds back.
            "bias_ids": (rows, MAX_LOGIT_BIAS + MAX_HELD_STOP_IDS, np.int32),
            "bias_values": (rows, MAX_LOGIT_BIAS, np.float32),
            **self._draft_shapes(rows),
        }

    def _draft_shapes(self, rows: int) -> dict[str, tuple[int, int, type]]:
        if not self.num_drafts:
            return {}
        return {
            "draft_tokens": (rows, self.num_drafts, np.int32),
            "draft_parents": (rows, self.num_drafts, np.int32),  # node number of the parent, 0 = root, -1 = not used
        }


class SharedRows:
    """The shared buffers, the schedule stream that writes them, and the write-done ring.

    Every write goes through the schedule stream, behind whatever fence the barrier put there; the host never touches
    the buffers and never blocks, except for a free staging block.
    """

    def __init__(self, layout: RowLayout, platform: str, timeout_s: float, updates: SharedUpdates = "shared"):
        native = native_module(platform)
        self.timeout_s = timeout_s
        self._bytes_uploaded = 0  # in the comparison modes; the stream counts its own
        self.layout = layout
        self.updates = updates
        # Enough that planning never waits for a block: the wait behind a launch that failed ends only when the host,
        # which is planning, collects it.
        num_blocks = max(MIN_STAGING_BLOCKS, WRITES_PER_SLOT * layout.num_slots)
        self.stream = native.Stream(num_blocks, STAGING_BLOCK_BYTES, timeout_s, name="schedule stream")
        self.write_done = make_ring(native, "write_done")
        shapes = layout.shapes()
        self._names = list(shapes)
        self._buffers = {
            name: native.SharedBuffer(rows, columns, dtype is np.float32, name)
            for name, (rows, columns, dtype) in shapes.items()
        }
        # Imported once: the arrays alias the buffers for good, so a program's argument never changes address.
        self._arrays = {name: jax.dlpack.from_dlpack(buffer, copy=False) for name, buffer in self._buffers.items()}
        self._mirror: dict[str, np.ndarray] = {
            name: np.zeros((rows, columns), dtype) for name, (rows, columns, dtype) in shapes.items()
        }
        if updates != "shared":
            self._arrays = jax.device_put({name: mirror.copy() for name, mirror in self._mirror.items()})
        self._write("batch_slots", np.array([0], np.int32), np.full((1, layout.num_slots), layout.null_slot, np.int32))

    def _write(self, name: str, rows: np.ndarray, values: np.ndarray, first_column: int = 0) -> None:
        self._mirror[name][rows, first_column : first_column + values.shape[1]] = values
        if self.updates == "shared":
            self._name_origin()
            self.stream.write_rows(self._buffers[name], rows, values, first_column)
        elif self.updates == "functional":
            self._bytes_uploaded += rows.nbytes + values.nbytes
            self._arrays[name] = _update(self._arrays[name], rows, values, first_column)

    @staticmethod
    def _name_origin() -> None:
        if journal.is_on():
            journal.set_origin_here(__file__)

    def set_batch(self, slots: np.ndarray) -> None:
        """Slots int32[B] of the batch rows; rows behind them become padding. Writes nothing if nothing changed."""
        row = np.full((1, self.layout.num_slots), self.layout.null_slot, np.int32)
        row[0, : len(slots)] = slots
        if not np.array_equal(row, self._mirror["batch_slots"]):
            self._write("batch_slots", np.array([0], np.int32), row)

    def set_lengths(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        """Context lengths int32[B] of slots int32[B]."""
        self._write("lengths", slots, lengths[:, None])

    def set_pages(self, slot: int, first: int, page_ids: list[int]) -> None:
        """Block-table entries ``first`` .. of a slot."""
        if page_ids:
            self._write("block_tables", np.array([slot], np.int32), np.array([page_ids], np.int32), first)

    def set_sampling(self, slot: int, floats: np.ndarray, ints: np.ndarray) -> None:
        """Sampling rows float32[8] and int32[8] of a slot; see ``runner.sampling_rows``."""
        row = np.array([slot], np.int32)
        self._write("sampling_floats", row, floats[None, :].astype(np.float32))
        self._write("sampling_ints", row, ints[None, :].astype(np.int32))

    def set_bias(self, slot: int, ids: np.ndarray, values: np.ndarray) -> None:
        """Bias rows int32[364] and float32[300] of a slot; see ``runner.sampling_rows``."""
        row = np.array([slot], np.int32)
        self._write("bias_ids", row, ids[None, :])
        self._write("bias_values", row, values[None, :])

    def set_drafts(self, slots: np.ndarray, tokens: np.ndarray, parents: np.ndarray) -> None:
        """Drafts int32[B, D] of slots int32[B]: tokens, and node numbers of their parents (see ``runner.verify``)."""
        self._write("draft_tokens", slots, tokens)
        self._write("draft_parents", slots, parents)

    def clear_slot(self, slot: int, num_pages: int) -> None:
        """Points a released slot's first ``num_pages`` entries at the null page, so that no stale row names a page."""
        self.set_pages(slot, 0, [0] * num_pages)

    def write_table(self, name: str, values: np.ndarray) -> None:
        """Writes every row of a buffer (``RowLayout.shapes`` names it); tests also poison buffers with it."""
        self._write(name, np.arange(values.shape[0], dtype=np.int32), values)

    def publish(self) -> int:
        """Records the writes so far; returns the generation the next launch must wait for (0: nothing to wait for)."""
        if self.updates == "upload":
            self._arrays = jax.device_put({name: mirror.copy() for name, mirror in self._mirror.items()})
            self._bytes_uploaded += sum(mirror.nbytes for mirror in self._mirror.values())
        if self.updates != "shared":
            return 0
        self._name_origin()
        event = reserve(self.write_done, self.timeout_s)
        try:
            self.stream.record(event.ring, event.generation)
        except BaseException:
            event.abandon()  # its slot would owe the record for ever, and the ring would be stuck when it comes round
            raise
        return event.generation

    def wait(self, event: Event, kind: str = "other") -> None:
        """Makes every later write wait for a record; ``kind`` names the fence in the stream's statistics.

        The comparison modes write nothing in place and do not wait.
        """
        if self.updates == "shared":
            self._name_origin()
            self.stream.wait(event.ring, event.generation, kind)

    @property
    def bytes_to_device(self) -> int:
        """Bytes of rows handed to the device so far: values, and in the comparison mode ``functional`` row numbers."""
        return self.stream.stats()["bytes_copied"] + self._bytes_uploaded

    def recover(self) -> str | None:
        """After a failed step: drains the stream, clears its error, and writes every row anew. Returns that error."""
        failure = None
        try:
            self.stream.sync()
        except RuntimeError as error:
            failure = str(error)
        self.stream.reset()
        for name, mirror in self._mirror.items():
            self.write_table(name, mirror.copy())
        return failure

    def arrays(self) -> list[jax.Array]:
        """The buffers as program arguments, in ``RowLayout.shapes`` order."""
        return [self._arrays[name] for name in self._names]

    def mirror(self, name: str) -> np.ndarray:
        """What the scheduler last asked for (the buffer may lag behind). A copy."""
        return self._mirror[name].copy()


@functools.partial(jax.jit, static_argnums=3)
def _update(table: jax.Array, rows: jax.Array, values: jax.Array, first_column: int) -> jax.Array:
    return table.at[rows, first_column : first_column + values.shape[1]].set(values)

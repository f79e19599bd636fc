"""A runner's rings, joined under the number its launch tickets carry."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxserve.barrier import journal
from jaxserve.barrier.native import ffi_platform, native_module
from jaxserve.barrier.tickets import RING_SLOTS, Event, launch_of, launch_ticket, make_ring, reserve

_STEP_NUMBER = 5  # of the ticket's uint64 words


class FenceChannel:
    """Read-done and step-done rings of one runner, beside the schedule stream's write-done ring.

    Attributes:
        read_done: ring recorded where a launch's reads of shared rows end.
        step_done: ring recorded when a launch's program ends: the full-execution fence.
    """

    def __init__(self, platform: str, write_done, timeout_s: float, name: str = "target"):
        native = native_module(platform)
        self._native = native
        self._timeout_s = timeout_s
        self.read_done = make_ring(native, f"{name}.read_done")
        self.step_done = make_ring(native, f"{name}.step_done")
        # On a GPU the operand lies where handlers cannot read it, so one that never changes is enough.
        self._device_ticket = None if ffi_platform(platform) == "cpu" else jax.device_put(launch_ticket())
        # Last: a channel stays open until it is closed, whatever becomes of this object.
        self.number = native.open_channel(write_done, self.read_done, self.step_done, timeout_s)

    def reserve_read_done(self) -> Event:
        """The record of the next launch's read end."""
        return reserve(self.read_done, self._timeout_s)

    def reserve_step_done(self) -> Event:
        """The record of the next launch's end."""
        return reserve(self.step_done, self._timeout_s)

    def ticket(self, *, write_done: int, marker: Event | None, end: Event | None, step_done: Event | None,
               step_number: int) -> np.ndarray:  # fmt: skip
        """The ticket of one launch, with a launch id of its own: wait for ``write_done``, record ``marker`` where reads
        end, the other two at the end."""
        return launch_ticket(
            self.number,
            write_done=write_done,
            read_done_marker=marker.generation if marker else 0,
            read_done_end=end.generation if end else 0,
            step_done=step_done.generation if step_done else 0,
            step_number=step_number,
            launch=self._native.journal.next_id(),
        )

    @contextlib.contextmanager
    def dispatching(self, ticket: np.ndarray, label: str = "", after: Sequence[int] = ()) -> Iterator[Any]:
        """Yields the ticket operand for the program dispatched inside; tells handlers on a GPU which launch that is.

        Args:
            ticket: what ``ticket`` made; for one launch only.
            label: names the program in the journal.
            after: launch ids of the programs whose outputs it takes as operands; 0 is none. First the one that hands
                over the pool.
        """
        if journal.is_on():
            journal.dispatch(launch_of(ticket), int(ticket.view(np.uint64)[_STEP_NUMBER]), label, after)
        if self._device_ticket is None:
            yield ticket
            return
        self._native.set_current_launch(ticket)
        try:
            yield self._device_ticket
        finally:
            self._native.set_current_launch(launch_ticket())

    def abandon_all(self) -> None:
        """Gives up every record still owed, after a failed execution: nobody may wait for it any more."""
        for ring in (self.read_done, self.step_done):
            newest = ring.newest_reserved
            for generation in range(max(1, newest - RING_SLOTS + 1), newest + 1):
                ring.abandon(generation)

    def close(self) -> None:
        """Launches still running neither wait nor record from now on."""
        self._native.close_channel(self.number)

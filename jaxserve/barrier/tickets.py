"""Tickets: which record a wait is for."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

RING_SLOTS = 8  # twice the launches that can be in flight, so that a slot is free well before it is needed again
TICKET_WORDS = 16  # uint32 words of a launch ticket; the layout is csrc/common/launch_ticket.h
LAUNCH_WORD = 12  # the first of two uint32 words that hold the launch id


class Event(NamedTuple):
    """One record of a ring: the generation a wait names.

    Attributes:
        ring: a native ``EventRing``.
        generation: the record's number, 1, 2, ...
    """

    ring: Any
    generation: int

    def is_done(self) -> bool:
        """Polls: recorded or given up."""
        return self.ring.is_done(self.generation)

    def sync(self, timeout_s: float) -> bool:
        """Blocks the host until the record; False if the launch that owed it was given up."""
        return self.ring.sync(self.generation, timeout_s)

    def record(self) -> None:
        """Records from the host."""
        self.ring.record(self.generation)

    def abandon(self) -> None:
        """Gives the record up, because the launch that owed it failed. No-op once recorded."""
        self.ring.abandon(self.generation)


def make_ring(native: Any, name: str) -> Any:
    """An event ring of the size ``reserve`` counts on."""
    return native.EventRing(name, RING_SLOTS)


def reserve(ring: Any, timeout_s: float) -> Event:
    """The next generation of a ring, reserved by the host before the launch that will record it.

    Blocks while the slot it will use still owes the record of ``RING_SLOTS`` launches ago. Collecting results keeps
    launches far closer together than that, but a record made by a thread of its own may lag behind.

    Raises:
        RuntimeError: that record did not come in time (native ``WaitTimeout``), or the slot is still awaited.
    """
    previous = ring.newest_reserved + 1 - RING_SLOTS
    if previous >= 1 and not ring.is_done(previous):
        ring.sync(previous, timeout_s)
    return Event(ring, ring.reserve())


def launch_of(ticket: np.ndarray) -> int:
    """The launch id of a ticket."""
    return int(ticket.view(np.uint64)[LAUNCH_WORD // 2])


def launch_ticket(
    channel: int = 0,
    *,
    write_done: int = 0,
    read_done_marker: int = 0,
    read_done_end: int = 0,
    step_done: int = 0,
    step_number: int = 0,
    launch: int = 0,
) -> np.ndarray:
    """The operand uint32[16] that tells the handlers of one launch what to wait for and what to record; 0 is nothing.

    The array is fresh: JAX may alias NumPy operands on the CPU, so it must never be written again.
    """
    words = np.array(
        [channel, write_done, read_done_marker, read_done_end, step_done, step_number, launch, 0], dtype=np.uint64
    )
    return words.view(np.uint32)


def ticket_facts(ticket: np.ndarray) -> dict[str, int]:
    """What a launch ticket says, by name of the word, as far as it is not zero; to be shown to people."""
    names = ("channel", "write_done", "read_done_marker", "read_done_end", "step_done", "step_number", "launch")
    words = ticket.view(np.uint64).tolist()
    return {name: word for name, word in zip(names, words, strict=False) if word and name != "step_number"}

"""The bookkeeping of generations (csrc/common/generations.h), seen through the CPU twin's ring; both twins share it."""

from __future__ import annotations

import re
import threading
import time

import pytest

from jaxserve.barrier.native import native_module

native = native_module("cpu")

LONG_S = 20.0  # far more than any of this takes
SHORT_S = 0.05


class Waiter:
    """A thread in ``ring.sync(generation)``; ``outcome()`` joins it and returns what sync returned or raised."""

    def __init__(self, ring, generation: int, timeout_s: float = LONG_S):
        self._outcome = None
        self._thread = threading.Thread(target=self._run, args=(ring, generation, timeout_s))
        self._thread.start()

    def _run(self, ring, generation: int, timeout_s: float) -> None:
        try:
            self._outcome = ring.sync(generation, timeout_s)
        except native.NativeError as error:
            self._outcome = error

    def is_waiting(self) -> bool:
        self._thread.join(SHORT_S)
        return self._thread.is_alive()

    def outcome(self):
        self._thread.join(LONG_S)
        return self._outcome


def test_generations_count_from_one():
    ring = native.EventRing("ring", 2)
    assert ring.newest_reserved == 0
    assert ring.reserve() == 1
    assert ring.reserve() == 2
    assert ring.newest_reserved == 2
    assert ring.newest_recorded == 0


def test_a_ring_of_one_slot_is_refused():
    with pytest.raises(native.NativeError, match="at least 2 slots, got 1"):
        native.EventRing("ring", 1)


def test_an_unrecorded_slot_is_not_reserved_again():
    ring = native.EventRing("read_done", 2)
    ring.reserve()
    ring.reserve()
    with pytest.raises(native.NativeError, match=r"read_done\.reserve failed: .*owes the record of generation 1"):
        ring.reserve()
    ring.record(1)
    assert ring.reserve() == 3


def test_an_awaited_slot_is_not_reserved_again():
    ring = native.EventRing("read_done", 2)
    late = native.EventRing("late", 2)
    stream = native.Stream(2, 64, LONG_S)
    stream.wait(late, late.reserve())  # keeps the stream from getting to the wait below
    first = ring.reserve()
    stream.wait(ring, first)
    ring.record(first)
    ring.record(ring.reserve())
    with pytest.raises(native.NativeError, match="generation 1 is still awaited"):
        ring.reserve()
    late.record(1)
    stream.sync()
    assert ring.reserve() == 3


def test_a_wait_for_an_unrecorded_generation_names_wanted_and_found():
    ring = native.EventRing("read_done", 4)
    ring.record(ring.reserve())
    ring.reserve()
    third = ring.reserve()
    with pytest.raises(native.WaitTimeout) as raised:
        ring.sync(third, SHORT_S)
    assert re.search(
        r"^\w+\.cc:\d+: read_done\.wait failed: generation 3 was not recorded .*newest recorded is 1, "
        r"newest reserved is 3$",
        str(raised.value),
    )


def test_a_timed_out_wait_releases_its_slot():
    ring = native.EventRing("ring", 2)
    first = ring.reserve()
    with pytest.raises(native.WaitTimeout):
        ring.sync(first, SHORT_S)
    ring.record(first)
    ring.record(ring.reserve())
    assert ring.reserve() == 3


def test_a_wait_never_binds_to_an_older_generation():
    ring = native.EventRing("ring", 2)
    ring.record(ring.reserve())
    ring.record(ring.reserve())
    third = ring.reserve()  # in the slot of generation 1, which has been recorded
    waiter = Waiter(ring, third)
    assert waiter.is_waiting()
    assert not ring.is_done(third)
    ring.record(third)
    assert waiter.outcome() is True


def test_a_newer_record_does_not_satisfy_an_older_wait():
    ring = native.EventRing("ring", 4)
    first, second = ring.reserve(), ring.reserve()
    waiter = Waiter(ring, first)
    ring.record(second)
    assert waiter.is_waiting()
    assert not ring.is_done(first)
    ring.record(first)
    assert waiter.outcome() is True
    assert ring.newest_recorded == second


def test_a_generation_whose_slot_was_reused_is_done():
    ring = native.EventRing("ring", 2)
    for _ in range(4):
        ring.record(ring.reserve())
    assert ring.is_done(1)
    assert ring.sync(1, 0.0) is True


def test_abandon_wakes_every_waiter():
    ring = native.EventRing("ring", 2)
    generation = ring.reserve()
    waiters = [Waiter(ring, generation) for _ in range(3)]
    assert all(waiter.is_waiting() for waiter in waiters)
    started = time.monotonic()
    ring.abandon(generation)
    assert [waiter.outcome() for waiter in waiters] == [False, False, False]
    assert time.monotonic() - started < LONG_S / 2


def test_abandon_frees_the_slot_and_is_idempotent():
    ring = native.EventRing("ring", 2)
    first = ring.reserve()
    ring.abandon(first)
    ring.abandon(first)
    assert ring.is_done(first)
    ring.record(ring.reserve())
    assert ring.reserve() == 3


def test_abandon_after_the_record_changes_nothing():
    ring = native.EventRing("ring", 2)
    first = ring.reserve()
    ring.record(first)
    ring.abandon(first)
    assert ring.sync(first, 0.0) is True


def test_a_late_record_of_an_abandoned_generation_leaves_the_reused_slot_alone():
    ring = native.EventRing("ring", 2)
    first = ring.reserve()
    ring.abandon(first)
    ring.record(ring.reserve())
    third = ring.reserve()
    ring.record(first)
    assert not ring.is_done(third)


@pytest.mark.parametrize("operation", ["record", "abandon", "is_done"])
@pytest.mark.parametrize("generation", [0, 1])
def test_generations_never_reserved_are_refused(operation: str, generation: int):
    ring = native.EventRing("ring", 2)
    with pytest.raises(native.NativeError, match=f"generation {generation} was never reserved, newest is 0"):
        getattr(ring, operation)(generation)

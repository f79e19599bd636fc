"""The host side of the CUDA twin, run for real on a fake CUDA runtime (fake/runtime.h): fences, staging, failures."""

from __future__ import annotations

import time

import numpy as np
import pytest
from fake_device import LONG_S, SHORT_S, Thread, device_rows, rows, values

STALL_US = 150_000
STALL_S = STALL_US / 1e6


def recorded(fake, ring, *, stream=None) -> int:
    """A generation whose record has been issued to a stream and reached."""
    stream = stream or fake.Stream(1, 64, LONG_S)
    generation = ring.reserve()
    stream.record(ring, generation)
    stream.sync()
    return generation


def stalled_record(fake, ring, stream) -> int:
    """A generation whose record has been issued behind a stall of the stream."""
    generation = ring.reserve()
    fake.hold_points.delay("stream.before_record", STALL_US)
    stream.record(ring, generation)
    fake.hold_points.clear()
    return generation


# --- row writes and staging


def test_buffers_start_zeroed_and_aligned(fake):
    buffer = fake.SharedBuffer(3, 5, False)
    assert not device_rows(buffer).any()
    assert buffer.address % 256 == 0
    assert buffer.__dlpack_device__() == (2, 0)


def test_rows_land_where_they_belong(fake):
    buffer, stream = fake.SharedBuffer(4, 3, False), fake.Stream(2, 64, LONG_S)
    stream.write_rows(buffer, rows(3, 1), values([1, 2], [3, 4]), 1)
    stream.sync()
    assert device_rows(buffer).tolist() == [[0, 0, 0], [0, 3, 4], [0, 0, 0], [0, 1, 2]]
    assert stream.stats()["num_copies"] == 1
    assert stream.stats()["bytes_copied"] == 16


def test_of_a_repeated_row_the_last_values_count(fake):
    buffer, stream = fake.SharedBuffer(3, 1, False), fake.Stream(2, 64, LONG_S)
    stream.write_rows(buffer, rows(2, 0, 2), values([1], [2], [3]))
    stream.sync()
    assert device_rows(buffer).tolist() == [[2], [0], [3]]
    assert stream.stats()["bytes_copied"] == 8  # on the device two writes of one row would race


@pytest.mark.parametrize("row", [-1, 4])
def test_rows_outside_are_refused_before_anything_is_written(fake, row: int):
    buffer, stream = fake.SharedBuffer(4, 1, False), fake.Stream(2, 64, LONG_S)
    with pytest.raises(fake.NativeError, match=f"row {row} is outside a buffer of 4 rows"):
        stream.write_rows(buffer, rows(0, row), values([1], [2]))
    stream.sync()
    assert not device_rows(buffer).any()


def test_a_write_owns_its_values(fake):
    buffer, stream = fake.SharedBuffer(2, 2, False), fake.Stream(2, 64, LONG_S)
    source = values([5, 6])
    fake.hold_points.delay("stream.before_copy", STALL_US)
    stream.write_rows(buffer, rows(1), source)
    source[:] = 0
    assert not stream.is_done()
    stream.sync()
    assert device_rows(buffer)[1].tolist() == [5, 6]


def write_twice_behind_a_stall(fake, *, staging_guarded: bool) -> tuple[list, float]:
    buffer = fake.SharedBuffer(2, 1, False)
    stream = fake.Stream(1, 64, LONG_S, staging_guarded=staging_guarded)
    fake.hold_points.delay("stream.before_copy", STALL_US)
    stream.write_rows(buffer, rows(0), values([7]))
    fake.hold_points.clear()
    started = time.monotonic()
    stream.write_rows(buffer, rows(1), values([8]))
    blocked_s = time.monotonic() - started
    stream.sync()
    return device_rows(buffer).ravel().tolist(), blocked_s


def test_a_staging_block_is_reused_only_after_the_device_has_read_it(fake):
    written, blocked_s = write_twice_behind_a_stall(fake, staging_guarded=True)
    assert written == [7, 8]
    assert blocked_s > STALL_S / 2


def test_without_the_guard_staging_is_overwritten_too_early(fake):
    """The mutant: the stalled copy finds the second write in its block."""
    written, _ = write_twice_behind_a_stall(fake, staging_guarded=False)
    assert written == [0, 8]


def test_a_staging_block_grows(fake):
    buffer, stream = fake.SharedBuffer(8, 16, False), fake.Stream(2, 4, LONG_S)
    wanted = np.arange(128, dtype=np.int32).reshape(8, 16)
    for _ in range(3):
        stream.write_rows(buffer, np.arange(8, dtype=np.int32), wanted)
    stream.sync()
    assert np.array_equal(device_rows(buffer), wanted)


def test_a_stuck_stream_times_out_for_staging(fake):
    buffer, stream = fake.SharedBuffer(2, 1, False), fake.Stream(1, 64, SHORT_S)
    fake.hold_points.delay("stream.before_copy", STALL_US)
    stream.write_rows(buffer, rows(0), values([7]))
    with pytest.raises(fake.NativeError, match="no staging block became free"):
        stream.write_rows(buffer, rows(1), values([8]))


# --- generations on a device


def test_a_recorded_generation_is_done_only_when_the_device_gets_there(fake):
    ring, stream = fake.EventRing("ring", 2), fake.Stream(1, 64, LONG_S)
    generation = stalled_record(fake, ring, stream)
    assert ring.newest_recorded == generation
    assert not ring.is_done(generation)
    assert ring.sync(generation, LONG_S) is True
    assert ring.is_done(generation)


def test_an_older_generation_of_a_reused_slot_is_not_taken_for_done(fake):
    ring, stream = fake.EventRing("ring", 2), fake.Stream(1, 64, LONG_S)
    first = stalled_record(fake, ring, stream)
    recorded_now = ring.reserve()
    stream.record(ring, recorded_now)
    third = ring.reserve()  # in the slot of the first, whose record is still on its way
    assert not ring.is_done(first)
    ring.abandon(third)
    assert ring.sync(first, LONG_S) is True
    assert ring.is_done(first)


def test_a_sync_that_the_device_keeps_waiting_names_the_generation(fake):
    ring, stream = fake.EventRing("read_done", 2), fake.Stream(1, 64, LONG_S)
    generation = stalled_record(fake, ring, stream)
    with pytest.raises(fake.WaitTimeout, match="generation 1 was issued, but the device did not reach it within"):
        ring.sync(generation, SHORT_S)
    stream.sync()


def test_a_slot_is_not_reserved_while_the_host_waits_for_the_device(fake):
    ring, stream = fake.EventRing("ring", 2), fake.Stream(1, 64, LONG_S)
    first = stalled_record(fake, ring, stream)
    waiter = Thread(lambda: ring.sync(first, LONG_S))
    assert waiter.is_blocked()
    stream.record(ring, ring.reserve())
    with pytest.raises(fake.NativeError, match="generation 1 is still awaited"):
        ring.reserve()
    assert waiter.outcome() is True
    assert ring.reserve() == 3


def test_a_stream_waits_for_another_streams_record(fake):
    ring, buffer = fake.EventRing("read_done", 2), fake.SharedBuffer(1, 1, False)
    reader, writer = fake.Stream(1, 64, LONG_S), fake.Stream(1, 64, LONG_S)
    generation = stalled_record(fake, ring, reader)
    writer.wait(ring, generation)
    writer.write_rows(buffer, rows(0), values([9]))
    assert not writer.is_done()
    assert device_rows(buffer)[0, 0] == 0
    writer.sync()
    assert ring.is_done(generation)
    assert device_rows(buffer)[0, 0] == 9
    assert writer.stats()["num_waits"] == 1


def test_a_wait_issued_before_its_record_never_binds_to_an_older_one(fake):
    ring, buffer = fake.EventRing("read_done", 2), fake.SharedBuffer(1, 1, False)
    reader, writer = fake.Stream(1, 64, LONG_S), fake.Stream(1, 64, LONG_S)
    recorded(fake, ring, stream=reader)
    recorded(fake, ring, stream=reader)
    third = ring.reserve()  # its slot's event holds the record of generation 1, long done

    def wait_and_write():
        writer.wait(ring, third)
        writer.write_rows(buffer, rows(0), values([9]))

    waiting = Thread(wait_and_write)
    assert waiting.is_blocked()
    fake.hold_points.delay("stream.before_record", STALL_US)
    reader.record(ring, third)
    fake.hold_points.clear()
    waiting.outcome()
    assert not writer.is_done()
    assert device_rows(buffer)[0, 0] == 0
    writer.sync()
    assert ring.is_done(third)
    assert device_rows(buffer)[0, 0] == 9


def test_abandon_releases_a_waiting_stream(fake):
    ring, stream = fake.EventRing("ring", 2), fake.Stream(1, 64, LONG_S)
    generation = ring.reserve()
    waiting = Thread(lambda: stream.wait(ring, generation))
    assert waiting.is_blocked()
    ring.abandon(generation)
    waiting.outcome()
    stream.sync()


def test_a_wait_that_times_out_poisons_the_stream(fake):
    ring, done, buffer = fake.EventRing("read_done", 2), fake.EventRing("write_done", 2), fake.SharedBuffer(1, 1, False)
    stream = fake.Stream(1, 64, SHORT_S)
    stream.wait(ring, ring.reserve())
    assert "read_done.wait failed: generation 1 was not recorded within" in stream.error
    stream.write_rows(buffer, rows(0), values([9]))
    owed = done.reserve()
    stream.record(done, owed)
    assert done.sync(owed, LONG_S) is False  # abandoned: a program that waits for it fails
    with pytest.raises(fake.NativeError, match="newest recorded is 0, newest reserved is 1"):
        stream.sync()
    assert device_rows(buffer)[0, 0] == 0
    stream.reset()
    stream.write_rows(buffer, rows(0), values([9]))
    stream.sync()
    assert device_rows(buffer)[0, 0] == 9


def test_a_record_from_the_host_is_done_at_once(fake):
    ring, stream = fake.EventRing("ring", 2), fake.Stream(1, 64, LONG_S)
    first = stalled_record(fake, ring, stream)
    ring.record(ring.reserve())
    third = ring.reserve()  # in the slot of the first, whose event the device hasn't reached
    ring.record(third)
    assert ring.is_done(third)
    assert not ring.is_done(first)
    stream.sync()


# --- failures of CUDA


@pytest.mark.parametrize(
    ("function", "place", "make"),
    [
        ("cudaStreamCreateWithFlags", "stream.cc", lambda fake: fake.Stream(2, 64, 1.0)),
        ("cudaHostAlloc", "stream.cc", lambda fake: fake.Stream(2, 64, 1.0)),
        ("cudaHostGetDevicePointer", "stream.cc", lambda fake: fake.Stream(2, 64, 1.0)),
        ("cudaEventCreateWithFlags", "stream.cc", lambda fake: fake.Stream(2, 64, 1.0)),
        ("cudaEventCreateWithFlags", "event_ring.cc", lambda fake: fake.EventRing("ring", 2)),
        ("cudaMalloc", "shared_buffer.cc", lambda fake: fake.SharedBuffer(1, 1, True)),
        ("cudaMemset", "shared_buffer.cc", lambda fake: fake.SharedBuffer(1, 1, True)),
        ("cudaStreamSynchronize", "shared_buffer.cc", lambda fake: fake.SharedBuffer(1, 1, True)),
    ],
)
def test_a_constructor_that_fails_midway_says_where(fake, switches, function: str, place: str, make):
    switches.fake_fail_next(function.encode())
    with pytest.raises(fake.NativeError, match=rf"^{place}:\d+: {function} failed: cudaErrorUnknown: the fake runtime"):
        make(fake)
    make(fake)


def test_a_record_that_fails_leaves_its_generation_unissued(fake, switches):
    ring, stream = fake.EventRing("ring", 2), fake.Stream(1, 64, LONG_S)
    generation = ring.reserve()
    switches.fake_fail_next(b"cudaEventRecord")
    with pytest.raises(fake.NativeError, match=r"^event_ring\.cc:\d+: cudaEventRecord failed"):
        stream.record(ring, generation)
    assert not ring.is_done(generation)
    stream.record(ring, generation)
    assert ring.sync(generation, LONG_S) is True


def test_a_wait_that_cuda_refuses_poisons_the_stream(fake, switches):
    ring, stream = fake.EventRing("ring", 2), fake.Stream(1, 64, LONG_S)
    generation = recorded(fake, ring)
    switches.fake_fail_next(b"cudaStreamWaitEvent")
    stream.wait(ring, generation)
    assert "cudaStreamWaitEvent failed" in stream.error

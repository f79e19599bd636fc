"""The CUDA twin's handlers, called by real programs on the CPU with a fake stream in XLA's place."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_device import LONG_S, SHORT_S, Thread, device_rows, rows, values

from jaxserve.barrier.tickets import launch_ticket

SLOTS, COLUMNS, WIDTH = 4, 6, 3
STALL_US = 150_000

KEPT: list = []  # operands and results that a fake stream may still use when their program is over


class Engine(NamedTuple):
    """A channel with its rings, the schedule stream and one shared table."""

    stream: object
    buffer: object
    table: jax.Array  # aliases the buffer
    write_done: object
    read_done: object
    step_done: object
    channel: int

    def write(self, fake, row: int, row_values, *, stalled: bool = False) -> int:
        """Writes a row on the schedule stream and records; returns the generation of write_done."""
        if stalled:
            fake.hold_points.delay("stream.before_copy", STALL_US)
        self.stream.write_rows(self.buffer, rows(row), values(row_values))
        generation = self.write_done.reserve()
        self.stream.record(self.write_done, generation)
        fake.hold_points.clear()
        return generation


@pytest.fixture
def engine(fake, switches):
    rings = [fake.EventRing(name, 4) for name in ("write_done", "read_done", "step_done")]
    buffer = fake.SharedBuffer(SLOTS, COLUMNS, False)
    table = jax.dlpack.from_dlpack(device_rows(buffer), copy=False)
    assert table.unsafe_buffer_pointer() == buffer.address
    channel = fake.open_channel(*rings, SHORT_S * 4)
    engine = Engine(fake.Stream(4, 256, LONG_S), buffer, table, *rings, channel)
    yield engine
    switches.fake_end_capture()
    fake.close_channel(channel)
    engine.stream.sync()


def snapshot(engine: Engine, row_ids, target: str = "fake_snapshot", **attributes):
    """Runs a program that is the snapshot alone; returns (row ids, copied rows)."""
    results = [jax.ShapeDtypeStruct((len(row_ids),), jnp.int32), jax.ShapeDtypeStruct((len(row_ids), WIDTH), jnp.int32)]
    call = jax.ffi.ffi_call(target, results, has_side_effect=True)
    program = jax.jit(lambda ticket, ids, table: call(ticket, ids, table, **attributes))
    # The ticket operand is garbage: on a GPU the handler can't read it.
    garbage, ids = jnp.full((16,), 0xFFFFFFFF, jnp.uint32), jnp.array(row_ids, jnp.int32)
    outputs = jax.block_until_ready(program(garbage, ids, engine.table))
    KEPT.append((ids, outputs))
    return outputs


def test_a_snapshot_copies_the_rows_and_records_the_marker(fake, engine):
    written = engine.write(fake, 2, [1, 2, 3, 4, 5, 6])
    marker = engine.read_done.reserve()
    fake.set_current_launch(launch_ticket(engine.channel, write_done=written, read_done_marker=marker))
    ids, copied = snapshot(engine, [2, 0])
    assert ids.tolist() == [2, 0]
    assert copied.tolist() == [[1, 2, 3], [0, 0, 0]]
    assert engine.read_done.is_done(marker)
    assert fake.take_row_error(engine.channel) is None


def test_a_snapshot_waits_for_the_writes_of_its_launch(fake, engine):
    written = engine.write(fake, 1, [7] * COLUMNS, stalled=True)
    assert not engine.write_done.is_done(written)
    fake.set_current_launch(launch_ticket(engine.channel, write_done=written))
    _, copied = snapshot(engine, [1])
    assert copied.tolist() == [[7, 7, 7]]


def test_without_a_launch_a_snapshot_neither_waits_nor_records(fake, engine):
    engine.write(fake, 1, [7] * COLUMNS, stalled=True)
    marker = engine.read_done.reserve()
    fake.set_current_launch(bytes(64))
    _, copied = snapshot(engine, [1])
    assert copied.tolist() == [[0, 0, 0]]
    assert engine.read_done.newest_recorded == marker - 1
    engine.stream.sync()


def test_the_current_launch_is_the_threads_own(fake, engine):
    marker = engine.read_done.reserve()
    fake.set_current_launch(launch_ticket(engine.channel, read_done_marker=marker))
    Thread(lambda: snapshot(engine, [0])).outcome()
    assert engine.read_done.newest_recorded == 0
    snapshot(engine, [0])
    assert engine.read_done.newest_recorded == marker


def test_the_schedule_stream_is_held_until_the_marker(fake, engine, switches):
    """The WAR fence: a write behind the wait lands only when the stalled snapshot has read."""
    switches.fake_sync_after_handlers(0)
    marker = engine.read_done.reserve()
    fake.set_current_launch(launch_ticket(engine.channel, read_done_marker=marker))
    fake.hold_points.delay("snapshot.before_record", STALL_US)
    snapshot(engine, [1])
    fake.hold_points.clear()
    engine.stream.wait(engine.read_done, marker)
    engine.write(fake, 1, [7] * COLUMNS)
    assert not switches.fake_compute_is_done()
    assert not device_rows(engine.buffer).any()
    engine.stream.sync()
    assert device_rows(engine.buffer)[1].tolist() == [7] * COLUMNS


@pytest.mark.parametrize(("row", "clamped"), [(-1, 0), (SLOTS, SLOTS - 1), (2**31 - 1, SLOTS - 1)])
def test_row_ids_outside_are_clamped_and_reported(fake, engine, row: int, clamped: int):
    for slot in range(SLOTS):
        engine.write(fake, slot, [slot + 1] * COLUMNS)
    engine.stream.sync()
    fake.set_current_launch(launch_ticket(engine.channel))
    ids, copied = snapshot(engine, [1, row])
    assert ids.tolist() == [1, row]
    assert copied.tolist() == [[2] * WIDTH, [clamped + 1] * WIDTH]
    assert fake.take_row_error(engine.channel) == (1, row)
    assert fake.take_row_error(engine.channel) is None


def test_given_up_writes_fail_the_program(fake, engine):
    written = engine.write_done.reserve()
    engine.write_done.abandon(written)
    fake.set_current_launch(launch_ticket(engine.channel, write_done=written, step_number=12))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"handlers\.cc:\d+: .*writes of step 12 were given up"):
        snapshot(engine, [0])


def test_writes_never_recorded_time_out_with_their_generation(fake, engine):
    written = engine.write_done.reserve()
    fake.set_current_launch(launch_ticket(engine.channel, write_done=written))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"write_done\.wait failed: generation 1 was not recorded"):
        snapshot(engine, [0])


def test_a_cuda_failure_in_a_handler_fails_the_program(fake, engine, switches):
    marker = engine.read_done.reserve()
    fake.set_current_launch(launch_ticket(engine.channel, read_done_marker=marker))
    switches.fake_fail_next(b"cudaEventRecord")
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"event_ring\.cc:\d+: cudaEventRecord failed: cudaErrorUnknown"
    ):
        snapshot(engine, [0])


def test_handlers_of_a_closed_channel_neither_wait_nor_record(fake, engine):
    marker = engine.read_done.reserve()
    fake.set_current_launch(launch_ticket(engine.channel, read_done_marker=marker))
    fake.close_channel(engine.channel)
    snapshot(engine, [0])
    assert engine.read_done.newest_recorded == 0
    assert fake.take_row_error(engine.channel) is None


def run(target: str, shape, dtype, *operands, **attributes) -> np.ndarray:
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(shape, dtype), has_side_effect=True)
    output = jax.jit(lambda *values: call(*values, **attributes))(*operands)
    KEPT.append(output)
    return np.asarray(output)


def test_the_end_record_records_reads_and_step(fake, engine):
    end, step = engine.read_done.reserve(), engine.step_done.reserve()
    fake.set_current_launch(launch_ticket(engine.channel, read_done_end=end, step_done=step))
    assert run("fake_record_end", (1,), jnp.uint32, jnp.zeros((16,), jnp.uint32)).tolist() == [0]
    assert engine.read_done.is_done(end)
    assert engine.step_done.is_done(step)


def test_a_hold_stalls_the_stream_and_not_the_host(fake, switches):
    switches.fake_sync_after_handlers(0)
    fake.hold_points.delay("here", STALL_US)
    run("fake_hold", (1,), jnp.int32, jnp.zeros((1,)), point="here")
    assert not switches.fake_compute_is_done()
    assert fake.hold_points.hits("here") == 1


def test_the_host_records_and_waits_on_the_compute_stream(fake, engine, switches):
    run("fake_compute_stream", (1,), jnp.uint32, jnp.zeros((1,)))
    assert fake.compute_stream() != 0
    switches.fake_sync_after_handlers(0)
    fake.hold_points.delay("here", STALL_US)
    run("fake_hold", (1,), jnp.int32, jnp.zeros((1,)), point="here")
    step = engine.step_done.reserve()
    fake.record_on_compute_stream(engine.step_done, step)
    assert not engine.step_done.is_done(step)
    assert engine.step_done.sync(step, LONG_S) is True
    written = engine.write(fake, 0, [1] * COLUMNS, stalled=True)
    assert fake.wait_on_compute_stream(engine.write_done, written, LONG_S) is True
    assert not switches.fake_compute_is_done()
    switches.fake_compute_sync()
    assert engine.write_done.is_done(written)
    with pytest.raises(fake.WaitTimeout, match="generation 2 was not recorded"):
        fake.wait_on_compute_stream(engine.write_done, engine.write_done.reserve(), SHORT_S)


# --- inside graphs


def test_the_plain_variant_refuses_to_be_captured(fake, engine, switches):
    marker = engine.read_done.reserve()
    fake.set_current_launch(launch_ticket(engine.channel, read_done_marker=marker))
    switches.fake_begin_capture()
    with pytest.raises(jax.errors.JaxRuntimeError, match="use the graph variant of the handler"):
        snapshot(engine, [0])


def test_the_graph_variant_needs_an_open_channel(fake, engine):
    with pytest.raises(jax.errors.JaxRuntimeError, match="channel 99 is not open"):
        snapshot(engine, [0], "fake_snapshot_graph", channel=np.int64(99))


def test_the_graph_variant_needs_mirrored_writes(fake, engine):
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"call mirror_for_graphs\(\) before the first launch"):
        snapshot(engine, [0], "fake_snapshot_graph", channel=np.int64(engine.channel))


def test_a_replayed_snapshot_fences_each_of_its_launches(fake, engine, switches):
    """Captured once, called never again: waits and records bind anew at every replay."""
    engine.write_done.mirror_for_graphs()
    attributes = {"channel": np.int64(engine.channel)}
    written = engine.write(fake, 1, [1] * COLUMNS)
    _, copied = snapshot(engine, [1], "fake_snapshot_graph", **attributes)  # eagerly, as XLA does first
    assert copied.tolist() == [[1] * WIDTH]
    assert engine.write_done.is_done(written)

    switches.fake_begin_capture()
    outputs = snapshot(engine, [1], "fake_snapshot_graph", **attributes)  # kept: replays write into them
    switches.fake_end_capture()
    for step in range(2, 6):
        written = engine.write(fake, 1, [step] * COLUMNS, stalled=True)
        assert not engine.write_done.is_done(written)
        marker = engine.read_done.reserve()
        switches.fake_replay()
        engine.read_done.note_graph_record(marker)
        engine.stream.wait(engine.read_done, marker)
        engine.write(fake, 1, [-1] * COLUMNS)  # too early, it would be what the replay reads
        assert not engine.read_done.is_done(marker)
        engine.stream.sync()
        switches.fake_compute_sync()
        assert engine.read_done.is_done(marker)
        assert np.array(outputs[1]).tolist() == [[step] * WIDTH]


def test_the_graphed_end_record_records_reads_only_where_they_end(fake, engine, switches):
    operand = jnp.zeros((16,), jnp.uint32)
    attributes = {"channel": np.int64(engine.channel), "read_done": True}
    switches.fake_begin_capture()
    output = run("fake_record_end_graph", (1,), jnp.uint32, operand, **attributes)
    switches.fake_end_capture()
    end, step = engine.read_done.reserve(), engine.step_done.reserve()
    switches.fake_replay()
    engine.read_done.note_graph_record(end)
    engine.step_done.note_graph_record(step)
    assert engine.read_done.sync(end, LONG_S) is True
    assert engine.step_done.sync(step, LONG_S) is True
    assert output.tolist() == [0]

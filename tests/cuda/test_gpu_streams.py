"""The stream facts the fences stand on, on a GPU: which record a wait binds to, with and without graphs.

What does not need graphs also runs on the CPU twin, which shows that the tests can tell right from wrong.
"""

from __future__ import annotations

import contextlib
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.barrier import ops
from jaxserve.barrier.channel import FenceChannel
from jaxserve.barrier.cuda_settings import check_cuda_settings
from jaxserve.barrier.native import native_module
from jaxserve.barrier.shared_rows import RowLayout, SharedRows

gpu = pytest.mark.gpu
ROUNDS = 20
STALL_US = 3000
WIDTH, SLOTS = 8, 4
TIMEOUT_S = 20.0


class Rig:
    """A program that stalls, reads one shared row, marks the end of its reads, and works on."""

    def __init__(self, inside: bool):
        platform = jax.default_backend()
        self.native = native_module(platform)
        self.rows = SharedRows(RowLayout(SLOTS, WIDTH), platform, TIMEOUT_S)
        self.channel = FenceChannel(platform, self.rows.write_done, TIMEOUT_S, "streams")
        self.inside = inside
        if inside:
            self.rows.write_done.mirror_for_graphs()
        self.table = next(
            array for array in self.rows.arrays() if array.shape == (SLOTS + 1, WIDTH) and array.dtype == jnp.int32
        )
        self.weights = jnp.eye(512)

        def program(ticket, table, weights):
            ids = jnp.arange(SLOTS, dtype=jnp.int32)
            ids, (rows,) = ops.snapshot(ticket, ids, [table], num_rows=SLOTS, widths=[WIDTH])
            x = weights + rows.sum()  # so that the marker is in the middle, and a graph is worth it
            for _ in range(40):
                x = jnp.tanh(x @ weights)
            return rows, x, ops.record_end(ticket, rows, x)

        mode = ops.markers_in_graph(self.channel.number) if inside else contextlib.nullcontext()
        with mode:
            lowered = jax.jit(program).lower(jax.ShapeDtypeStruct((16,), jnp.uint32), self.table, self.weights)
        self.program = lowered.compile()

    def launch(self, write_done: int, step: int):
        """(rows it read, the read-done event)."""
        read_done, step_done = self.channel.reserve_read_done(), self.channel.reserve_step_done()
        ticket = self.channel.ticket(
            write_done=write_done, marker=read_done, end=None, step_done=step_done, step_number=step
        )
        with self.channel.dispatching(ticket) as operand:
            rows, x, _ = self.program(operand, self.table, self.weights)
        if self.inside:
            for event in (read_done, step_done):
                event.ring.note_graph_record(event.generation)
        return rows, x, read_done

    def close(self) -> None:
        self.native.hold_points.clear()
        self.rows.stream.sync()
        self.channel.close()


@pytest.fixture(params=[False, pytest.param(True, marks=gpu)], ids=["outside", "inside"])
def rig(request):
    check_cuda_settings(os.environ)
    made = Rig(request.param)
    # Before the first launch: what a graph captures, a stall included, it keeps.
    made.native.hold_points.delay("snapshot.before_reads", STALL_US)
    yield made
    made.close()


def write(rig: Rig, value: int) -> int:
    rig.rows.write_table("block_tables", np.full((SLOTS + 1, WIDTH), value, np.int32))
    return rig.rows.publish()


def test_a_wait_behind_the_launch_binds_to_that_launch(rig):
    """Rows are overwritten as soon as the event allows; a wait bound to the record before would let that happen
    while the program is still stalled in front of its reads."""
    for number in range(ROUNDS):
        write_done = write(rig, number)
        found, _, read_done = rig.launch(write_done, number)
        rig.rows.wait(read_done)
        write(rig, -1)
        np.testing.assert_array_equal(np.asarray(found), number, err_msg=f"round {number}")


@gpu  # the CPU twin binds to generations, not to records
def test_without_the_wait_rows_are_torn(rig):
    """The test above can fail: this is what it looks like."""
    wrong = 0
    for number in range(ROUNDS):
        found, _, _ = rig.launch(write(rig, number), number)
        write(rig, -1)
        wrong += bool((np.asarray(found) != number).any())
    assert wrong > 0


def test_the_writer_is_let_go_before_the_program_ends(rig):
    """What the marker is for: its event fires while the program works on."""
    early = 0
    for number in range(ROUNDS):
        rig.native.hold_points.delay("end.before_record", 5 * STALL_US)
        found, x, read_done = rig.launch(write(rig, number), number)
        deadline = time.monotonic() + TIMEOUT_S
        while not read_done.is_done() and time.monotonic() < deadline:
            time.sleep(0.0002)
        early += not x.is_ready()
        np.testing.assert_array_equal(np.asarray(found), number)
    assert early > 0


@gpu
def test_a_graph_is_replayed_and_not_called_anew():
    rig = Rig(inside=True)
    try:
        hits = rig.native.hold_points.hits
        for number in range(ROUNDS):
            rig.launch(write(rig, number), number)[0].block_until_ready()
        # Once eagerly, and once for each set of addresses; never on replay.
        assert hits("snapshot.before_record") < ROUNDS
    finally:
        rig.close()

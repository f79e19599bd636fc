"""The journal records what really happens, in an order that respects synchronisation, and nothing while it is off."""

from __future__ import annotations

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.barrier import journal, ops
from jaxserve.barrier.channel import FenceChannel
from jaxserve.barrier.journal import ActorType, Kind, OperationType, Outcome, StageStep
from jaxserve.barrier.native import native_module
from jaxserve.barrier.shared_rows import RowLayout, SharedRows

native = native_module("cpu")
LONG_S = 20.0


@pytest.fixture
def recorded():
    """Turns the journal on; ``recorded()`` is what came since the last call, as dicts with names for numbers."""
    seen: list[dict] = []

    def take(entries: np.ndarray, num_dropped: int) -> None:
        assert num_dropped == 0
        names = entries.dtype.names
        seen.extend({**dict(zip(names, entry, strict=True)), "kind": Kind(entry[1])} for entry in entries.tolist())

    subscription = journal.subscribe(take)

    def since() -> list[dict]:
        journal.pump()
        found, seen[:] = list(seen), []
        return found

    yield since
    subscription.close()


def actor_type(entry: dict) -> ActorType:
    return ActorType(entry["actor"] >> 56)


def of_kind(entries: list[dict], *kinds: Kind) -> list[dict]:
    return [entry for entry in entries if entry["kind"] in kinds]


def test_nothing_is_recorded_while_it_is_off():
    journal.drain()
    assert not journal.is_on()
    ring = native.EventRing("ring", 2)
    ring.record(ring.reserve())
    entries, num_dropped = journal.drain()
    assert len(entries) == 0 and num_dropped == 0


def test_a_ring_journals_reserve_release_and_every_kind_of_acquire(recorded):
    ring = native.EventRing("a ring", 2)
    first, second = ring.reserve(), ring.reserve()
    assert not ring.is_done(first)
    ring.record(first)
    assert ring.is_done(first)
    ring.abandon(second)
    assert not ring.sync(second, LONG_S)
    ring.reserve()  # 3, in the slot of 1
    assert ring.sync(first, LONG_S)
    entries = recorded()
    assert all(entry["subject"] == ring.id and actor_type(entry) is ActorType.HOST for entry in entries)
    assert journal.names()[ring.id] == "a ring"
    assert [(entry["kind"], entry["a"], entry["b"]) for entry in entries] == [
        (Kind.RESERVE, 1, 0),
        (Kind.RESERVE, 2, 0),
        (Kind.RELEASE, 1, 0),
        (Kind.ACQUIRE, 1, Outcome.RECORDED),
        (Kind.ABANDON, 2, 0),
        (Kind.ACQUIRE, 2, Outcome.ABANDONED),
        (Kind.RESERVE, 3, 0),
        (Kind.ACQUIRE, 1, Outcome.SUPERSEDED),
    ]


def test_a_release_stands_before_the_acquire_it_lets_through(recorded):
    ring = native.EventRing("ring", 2)
    for _ in range(200):
        generation = ring.reserve()
        waiter = threading.Thread(target=ring.sync, args=(generation, LONG_S))
        waiter.start()
        ring.record(generation)
        waiter.join()
    pairs = [(e["kind"], e["a"]) for e in of_kind(recorded(), Kind.RELEASE, Kind.ACQUIRE)]
    assert pairs == [(kind, g) for g in range(1, 201) for kind in (Kind.RELEASE, Kind.ACQUIRE)]


def test_threads_of_the_host_are_told_apart(recorded):
    ring = native.EventRing("ring", 4)
    generation = ring.reserve()
    other = threading.Thread(target=ring.record, args=(generation,))
    other.start()
    other.join()
    mine, theirs = recorded()
    assert actor_type(mine) is actor_type(theirs) is ActorType.HOST
    assert mine["actor"] != theirs["actor"]


def test_time_is_the_clock_of_perf_counter_and_never_goes_back(recorded):
    ring = native.EventRing("ring", 2)
    before = time.perf_counter_ns()
    for _ in range(50):
        ring.record(ring.reserve())
    after = time.perf_counter_ns()
    times = [entry["time_ns"] for entry in recorded()]
    assert times == sorted(times)
    assert before <= times[0] and times[-1] <= after


def test_a_stream_journals_operations_writes_and_staging(recorded):
    stream = native.Stream(1, 64, LONG_S, name="s")
    buffer = native.SharedBuffer(4, 8, False, "rows")
    ring = native.EventRing("ring", 2)
    stream.write_rows(buffer, np.array([2, 0], np.int32), np.ones((2, 3), np.int32), 5)
    stream.record(ring, ring.reserve())
    stream.wait(ring, 1)
    stream.write_rows(buffer, np.array([1], np.int32), np.ones((1, 8), np.int32))
    stream.sync()
    entries = recorded()
    operations = of_kind(entries, Kind.ENQUEUE)
    assert [(e["subject"], e["a"], e["b"]) for e in operations] == [
        (stream.id, number, kind)
        for number, kind in enumerate(
            (OperationType.COPY, OperationType.RECORD, OperationType.WAIT, OperationType.COPY), 1
        )
    ]
    assert all(actor_type(e) is ActorType.HOST for e in operations)
    on_stream = [e for e in entries if e["actor"] == (ActorType.STREAM << 56 | stream.id)]
    steps = [(e["kind"], e["a"]) for e in on_stream if e["kind"] is not Kind.STAGE]
    begin, end = Kind.BEGIN_OPERATION, Kind.END_OPERATION
    assert steps == [
        (begin, 1), (Kind.WRITE, 2), (Kind.WRITE, 0), (end, 1),
        (begin, 2), (Kind.RELEASE, 1), (end, 2),
        (begin, 3), (Kind.ACQUIRE, 1), (end, 3),
        (begin, 4), (Kind.WRITE, 1), (end, 4),
    ]  # fmt: skip
    writes = of_kind(entries, Kind.WRITE)
    assert all(e["subject"] == buffer.id for e in writes)
    assert [(e["b"] >> 32, e["b"] & 0xFFFFFFFF) for e in writes] == [(5, 3), (5, 3), (0, 8)]
    stages = of_kind(entries, Kind.STAGE)
    assert [StageStep(e["b"]) for e in stages] == 2 * [
        StageStep.ACQUIRE, StageStep.FILL, StageStep.READ, StageStep.RELEASE
    ]  # fmt: skip
    assert {(e["subject"], e["a"]) for e in stages} == {(stream.staging_id, 0)}
    assert journal.names()[stream.id] == "s" and journal.names()[buffer.id] == "rows"
    assert (entries[-1]["kind"], entries[-1]["subject"], entries[-1]["a"]) == (Kind.SYNC_STREAM, stream.id, 4)


def test_a_stream_without_its_guard_journals_no_acquire_of_a_block(recorded):
    stream = native.Stream(1, 64, LONG_S, staging_guarded=False)
    buffer = native.SharedBuffer(4, 8, False)
    stream.write_rows(buffer, np.array([2], np.int32), np.ones((1, 3), np.int32))
    stream.sync()
    stages = [StageStep(e["b"]) for e in of_kind(recorded(), Kind.STAGE)]
    assert stages == [StageStep.FILL, StageStep.READ, StageStep.RELEASE]


def test_a_launch_is_journalled_from_dispatch_to_collection(recorded):
    """One program with a snapshot and an end record, over real shared rows."""
    layout = RowLayout(num_slots=3, table_width=4)
    rows = SharedRows(layout, "cpu", LONG_S)
    channel = FenceChannel("cpu", rows.write_done, LONG_S, "test")

    @jax.jit
    def program(ticket, tables):
        slots, (copied, lengths) = ops.snapshot(ticket, tables[0], [tables[1], tables[2]], num_rows=2, widths=[3, 1])
        return copied + lengths, ops.record_end(ticket, copied, slots)

    rows.set_batch(np.array([1, 0], np.int32))
    marker, step_done = channel.reserve_read_done(), channel.reserve_step_done()
    ticket = channel.ticket(write_done=rows.publish(), marker=marker, end=None, step_done=step_done, step_number=7)
    with channel.dispatching(ticket, "the program", after=(5, 6)) as operand:
        out, _ = program(operand, rows.arrays())
    jax.block_until_ready(out)
    launch = int(ticket.view(np.uint64)[6])
    journal.collected(launch)
    entries = recorded()
    channel.close()
    names, strings = journal.names(), journal.strings()
    (dispatch,) = of_kind(entries, Kind.DISPATCH)
    assert launch > 0 and (dispatch["subject"], dispatch["a"], dispatch["b"]) == (launch, 7, 5)
    assert strings[dispatch["origin"]] == "the program"
    (operand_entry,) = of_kind(entries, Kind.OPERAND)
    assert (operand_entry["subject"], operand_entry["a"]) == (launch, 6)
    mine = [e for e in entries if e["actor"] == (ActorType.EXECUTION << 56 | launch)]
    shown = [(e["kind"].name, names.get(e["subject"], "launch"), e["a"], e["b"]) for e in mine]
    assert shown == [
        ("BEGIN_EXECUTION", "launch", 0, 0),
        ("ACQUIRE", "write_done", 1, Outcome.RECORDED),
        ("READ", "batch_slots", 0, 2),
        ("READ", "block_tables", 1, 3),
        ("READ", "block_tables", 0, 3),
        ("READ", "lengths", 1, 1),
        ("READ", "lengths", 0, 1),
        ("RELEASE", "test.read_done", 1, 0),
        ("END_EXECUTION", "launch", 0, 0),
        ("RELEASE", "test.step_done", 1, 0),
    ]
    assert all(strings[e["origin"]].startswith("csrc/cpu/handlers.cc:") for e in of_kind(mine, Kind.READ))
    order = [e["kind"] for e in entries]
    assert order.index(Kind.DISPATCH) < order.index(Kind.BEGIN_EXECUTION) < order.index(Kind.END_EXECUTION)
    assert order[-1] is Kind.COLLECT and entries[-1]["subject"] == launch


def test_a_program_can_note_reads_that_no_handler_saw(recorded):
    rows = SharedRows(RowLayout(num_slots=3, table_width=4), "cpu", LONG_S)
    channel = FenceChannel("cpu", rows.write_done, LONG_S)

    @jax.jit
    def program(ticket, tables):
        begun = ops.note(ticket, "begin", "test.py:1")
        slots = tables[0].reshape(-1)[:2] + begun
        copied = tables[1][slots, :3]
        noted = ops.note_reads(ticket, slots, [tables[1]], [3], "test.py:2", copied)
        written = ops.note_reads(ticket, slots[:1] + noted, [tables[2]], [1], "test.py:3", what="writes")
        return copied + noted + written

    ticket = channel.ticket(write_done=0, marker=None, end=None, step_done=None, step_number=1)
    rows.set_batch(np.array([2, 0], np.int32))
    rows.stream.sync()
    recorded()
    jax.block_until_ready(program(ticket, rows.arrays()))
    entries = recorded()
    channel.close()
    shown = [(e["kind"], e["a"], e["b"], journal.strings()[e["origin"]]) for e in entries]
    assert shown == [
        (Kind.BEGIN_EXECUTION, 0, 0, "test.py:1"),
        (Kind.READ, 2, 3, "test.py:2"),
        (Kind.READ, 0, 3, "test.py:2"),
        (Kind.WRITE, 2, 1, "test.py:3"),
    ]


def test_a_row_write_carries_the_line_that_asked_for_it(recorded):
    rows = SharedRows(RowLayout(num_slots=2, table_width=4), "cpu", LONG_S)
    rows.stream.sync()
    recorded()
    rows.set_lengths(np.array([1], np.int32), np.array([5], np.int32))
    rows.stream.sync()
    (write,) = of_kind(recorded(), Kind.WRITE)
    origin = journal.strings()[write["origin"]]
    assert origin.startswith("barrier/test_journal.py:") and origin.endswith(
        " test_a_row_write_carries_the_line_that_asked_for_it"
    )


def test_the_host_can_note_what_it_reads_itself(recorded):
    buffer = native.SharedBuffer(2, 3, False)
    journal.host_access(Kind.READ, buffer.id, 1, 3)
    (entry,) = recorded()
    assert (entry["kind"], entry["subject"], entry["a"], entry["b"]) == (Kind.READ, buffer.id, 1, 3)
    assert journal.strings()[entry["origin"]].endswith(" test_the_host_can_note_what_it_reads_itself")


def test_every_subscriber_is_handed_what_came_since_it_subscribed():
    first: list[int] = []
    second: list[int] = []
    ring = native.EventRing("ring", 4)

    def generations(into: list[int]):
        return lambda entries, num_dropped: into.extend(int(a) for a in entries["a"])

    one = journal.subscribe(generations(first))
    ring.reserve()
    two = journal.subscribe(generations(second))
    ring.reserve()
    journal.pump()
    one.close()
    one.close()
    assert journal.is_on()
    ring.reserve()
    journal.pump()
    two.close()
    assert not journal.is_on()
    assert (first, second) == ([1, 2], [2, 3])


def test_a_full_journal_says_how_much_it_dropped():
    seen: list[tuple[int, int]] = []
    subscription = journal.subscribe(lambda entries, num_dropped: seen.append((len(entries), num_dropped)), capacity=3)
    try:
        ring = native.EventRing("ring", 8)
        for _ in range(5):
            ring.reserve()
        journal.pump()
        ring.reserve()
        journal.pump()
    finally:
        subscription.close()
    assert seen == [(3, 2), (1, 0)]


def test_threads_append_whole_entries(recorded):
    rings = [native.EventRing(f"ring {i}", 4) for i in range(4)]

    def spin(ring) -> None:
        for _ in range(500):
            ring.record(ring.reserve())

    threads = [threading.Thread(target=spin, args=(ring,)) for ring in rings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entries = recorded()
    for ring in rings:
        own = [(e["kind"], e["a"]) for e in entries if e["subject"] == ring.id]
        assert own == [(kind, g) for g in range(1, 501) for kind in (Kind.RESERVE, Kind.RELEASE)]


def test_the_launch_of_a_ticket_is_unique_and_zeros_have_none():
    rows = SharedRows(RowLayout(num_slots=2, table_width=4), "cpu", LONG_S)
    channel = FenceChannel("cpu", rows.write_done, LONG_S)
    from jaxserve.barrier.tickets import launch_of, launch_ticket

    tickets = [channel.ticket(write_done=0, marker=None, end=None, step_done=None, step_number=1) for _ in range(3)]
    channel.close()
    assert len({launch_of(ticket) for ticket in tickets}) == 3
    assert launch_of(launch_ticket()) == 0
    assert jnp.asarray(tickets[0]).shape == (16,)

"""Journal entries put together, from lists written by hand."""

from __future__ import annotations

import numpy as np

from jaxserve.barrier.journal import ENTRY, ActorType, Kind, OperationType, Outcome
from jaxserve.timeline.build import build_timeline
from jaxserve.timeline.device_records import DeviceRecords, RowWrite, Ticket, read_journal
from jaxserve.timeline.recorder import HostRecords

HOST, STREAM, STEP = (ActorType.HOST << 56) | 1, (ActorType.STREAM << 56) | 2, (ActorType.EXECUTION << 56) | 70
NAMES = {10: "write_done", 11: "target.read_done", 12: "target.step_done", 20: "lengths"}
ORIGINS = ["", "scheduler/scheduler.py:1 plan", "target, decode[batch=2]"]


def entries(*rows: tuple[int, int, int, int, int, int, int]) -> np.ndarray:
    """(time, kind, origin, actor, subject, a, b) of each."""
    return np.array(list(rows), ENTRY)


ONE_STEP = (
    (100, Kind.ENQUEUE, 1, HOST, 2, 5, OperationType.COPY),
    (110, Kind.BEGIN_OPERATION, 0, STREAM, 2, 5, OperationType.COPY),
    (111, Kind.WRITE, 0, STREAM, 20, 3, (4 << 32) | 2),
    (112, Kind.WRITE, 0, STREAM, 20, 4, (4 << 32) | 2),
    (115, Kind.END_OPERATION, 0, STREAM, 2, 5, OperationType.COPY),
    (116, Kind.BEGIN_OPERATION, 0, STREAM, 2, 6, OperationType.RECORD),
    (117, Kind.RELEASE, 0, STREAM, 10, 9, 0),
    (118, Kind.END_OPERATION, 0, STREAM, 2, 6, OperationType.RECORD),
    (119, Kind.DISPATCH, 2, HOST, 70, 33, 69),
    (120, Kind.BEGIN_EXECUTION, 0, STEP, 70, 0, 0),
    (121, Kind.BEGIN_OPERATION, 0, STREAM, 2, 7, OperationType.WAIT),
    (122, Kind.ACQUIRE, 0, STEP, 10, 9, Outcome.RECORDED),
    (125, Kind.RELEASE, 0, STEP, 11, 8, 0),
    (126, Kind.ACQUIRE, 0, STREAM, 11, 8, Outcome.RECORDED),
    (127, Kind.END_OPERATION, 0, STREAM, 2, 7, OperationType.WAIT),
    (190, Kind.END_EXECUTION, 0, STEP, 70, 0, 0),
    (191, Kind.RELEASE, 0, STEP, 12, 8, 0),
    (200, Kind.COLLECT, 0, HOST, 70, 0, 0),
)


def read(*rows: tuple[int, int, int, int, int, int, int], num_dropped: int = 0) -> DeviceRecords:
    return read_journal(entries(*rows), NAMES, ORIGINS, num_dropped)


def test_operations_know_when_they_were_enqueued_and_what_they_did() -> None:
    copy, record, wait = read(*ONE_STEP).operations
    assert (copy.type, copy.enqueue_ns, copy.begin_ns, copy.end_ns) == ("copy", 100, 110, 115)
    assert copy.writes == [RowWrite("lengths", 3, 4, 2), RowWrite("lengths", 4, 4, 2)]
    assert copy.origin == "scheduler/scheduler.py:1 plan"
    assert record.recorded is not None and record.recorded.ticket == Ticket("write_done", 9)
    assert wait.waited is not None and wait.waited[:2] == (Ticket("target.read_done", 8), 126)
    assert wait.enqueue_ns is None


def test_an_execution_has_its_wait_its_records_and_its_end() -> None:
    execution = read(*ONE_STEP).executions[70]
    assert (execution.step, execution.after, execution.program) == (33, 69, "target, decode[batch=2]")
    assert (execution.dispatch_ns, execution.begin_ns, execution.end_ns) == (119, 120, 191)
    assert execution.waited is not None and execution.waited.ticket == Ticket("write_done", 9)
    marker = execution.record_on("read_done")
    assert marker is not None and marker.time_ns == 125
    assert execution.collected_ns == [200]


def test_the_copy_belongs_to_the_step_that_waits_for_the_record_behind_it() -> None:
    timeline = build_timeline(HostRecords(), read(*ONE_STEP))
    steps = {s.name: s.args.get("step") for s in timeline.slices if s.lane.group == "schedule stream"}
    assert steps == {"write lengths": 33, "record write_done": 33, "wait target.read_done": 33}
    assert {(a.name, a.from_ns, a.to_ns) for a in timeline.arrows} == {
        ("write_done", 117, 122),
        ("read_done", 125, 126),
    }


def test_a_log_that_begins_in_the_middle_is_read_as_far_as_it_goes() -> None:
    records = read(*ONE_STEP[4:], num_dropped=4)
    assert [o.type for o in records.operations] == ["record", "wait"]
    timeline = build_timeline(HostRecords(), records)
    assert timeline.remarks == ["4 journal entries were dropped to bound memory"]


def test_what_has_not_ended_is_drawn_to_the_end_and_says_so() -> None:
    timeline = build_timeline(HostRecords(), read(*ONE_STEP[:11]))
    still_open = {s.name: s.end_ns for s in timeline.slices if s.args.get("still_open")}
    assert still_open == {"wait": 121, "step 33": 121}


def test_an_abandoned_wait_gets_no_arrow() -> None:
    rows = list(ONE_STEP)
    rows[13] = (126, Kind.ACQUIRE, 0, STREAM, 11, 8, Outcome.ABANDONED)
    timeline = build_timeline(HostRecords(), read(*rows))
    assert [a.name for a in timeline.arrows] == ["write_done"]
    assert "abandoned" in {s.args.get("outcome") for s in timeline.slices}

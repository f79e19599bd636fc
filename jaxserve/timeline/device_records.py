"""What the native journal says about the schedule stream and the executions, entry by entry put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jaxserve.barrier.journal import ActorType, Kind, OperationType, Outcome

_ID_MASK = (1 << 56) - 1
_OF_LAUNCHES = (Kind.DISPATCH, Kind.BEGIN_EXECUTION, Kind.END_EXECUTION, Kind.COLLECT)


class Ticket(NamedTuple):
    """One record of an event ring."""

    ring: str
    generation: int


class Moment(NamedTuple):
    """A record or a wait that returned: which, when, and (of waits) how."""

    ticket: Ticket
    time_ns: int
    outcome: str = "recorded"


class RowWrite(NamedTuple):
    """Columns of one row that a copy wrote."""

    buffer: str
    row: int
    first_column: int
    num_columns: int


@dataclass
class StreamOperation:
    """An operation of a stream.

    Attributes:
        type: ``copy``, ``wait`` or ``record``.
        enqueue_ns: when the host put it there; None if that entry is gone.
        begin_ns, end_ns: when the stream ran it; ``end_ns`` is None if it had not ended.
        waited: of a wait, what it waited for.
        recorded: of a record, what it recorded.
        writes: of a copy, the rows it wrote.
        origin: source line the host enqueued it from, or "".
    """

    stream: int
    number: int
    type: str
    begin_ns: int
    enqueue_ns: int | None = None
    end_ns: int | None = None
    waited: Moment | None = None
    recorded: Moment | None = None
    writes: list[RowWrite] = field(default_factory=list)
    origin: str = ""


@dataclass
class Execution:
    """An execution of a program.

    Attributes:
        launch: its launch id; 0 is never used.
        step: step number.
        program: label of its program, or "".
        dispatch_ns: when the host launched it.
        begin_ns: when its first handler ran; None for a program that has none at its head.
        end_ns: when the last thing was seen of it.
        waited: its wait for row writes.
        records: what it recorded, oldest first; with the marker, ``*.read_done`` and ``*.step_done``.
        collected_ns: when host threads saw that it had ended.
        after: launch whose outputs it takes as operands, or 0.
    """

    launch: int
    step: int = 0
    program: str = ""
    dispatch_ns: int | None = None
    begin_ns: int | None = None
    end_ns: int | None = None
    ended: bool = False
    waited: Moment | None = None
    records: list[Moment] = field(default_factory=list)
    collected_ns: list[int] = field(default_factory=list)
    after: int = 0

    def record_on(self, suffix: str) -> Moment | None:
        """Its record on the ring whose name ends so (``read_done``, ``step_done``)."""
        return next((m for m in self.records if m.ticket.ring.endswith(suffix)), None)


@dataclass
class DeviceRecords:
    """The stream operations and executions of a journal.

    Attributes:
        host_records: what host threads recorded, for programs that cannot do it themselves.
        num_dropped: older entries that had to make room.
    """

    operations: list[StreamOperation] = field(default_factory=list)
    executions: dict[int, Execution] = field(default_factory=dict)
    host_records: list[Moment] = field(default_factory=list)
    num_dropped: int = 0

    def followed_by(self, later: DeviceRecords) -> DeviceRecords:
        """Both recordings of one process as one: no launch or record has a number twice."""
        return DeviceRecords(
            self.operations + later.operations, self.executions | later.executions,
            self.host_records + later.host_records, self.num_dropped + later.num_dropped,
        )  # fmt: skip


def read_journal(
    entries: np.ndarray, names: Mapping[int, str], origins: Sequence[str], num_dropped: int = 0
) -> DeviceRecords:
    """Puts journal entries together. An operation or execution that began before the first entry is left out, as
    far as it cannot be told.

    Args:
        entries: of the journal's dtype, in order.
        names: ring and buffer names by id.
        origins: source lines by index.
    """
    reader = _Reader(names, origins)
    for time_ns, kind, origin, actor, subject, a, b in entries.tolist():
        reader.read(time_ns, kind, origin, actor, subject, a, b)
    reader.records.num_dropped = num_dropped
    return reader.records


class _Reader:
    def __init__(self, names: Mapping[int, str], origins: Sequence[str]):
        self.records = DeviceRecords()
        self._names = names
        self._origins = origins
        self._enqueued: dict[tuple[int, int], tuple[int, int]] = {}  # (stream, number) -> (time, origin)
        self._running: dict[int, StreamOperation] = {}  # by stream: operations of a stream run one by one

    def read(self, time_ns: int, kind: int, origin: int, actor: int, subject: int, a: int, b: int) -> None:
        role, who = actor >> 56, actor & _ID_MASK
        records = self.records
        if kind == Kind.ENQUEUE:
            self._enqueued[subject, a] = (time_ns, origin)
        elif kind == Kind.BEGIN_OPERATION:
            enqueue_ns, line = self._enqueued.pop((subject, a), (None, 0))
            operation = StreamOperation(subject, a, OperationType(b).name.lower(), time_ns, enqueue_ns)
            operation.origin = self._text(line)
            self._running[subject] = operation
            records.operations.append(operation)
        elif kind == Kind.END_OPERATION:
            running = self._running.pop(subject, None)
            if running is not None:
                running.end_ns = time_ns
        elif kind in _OF_LAUNCHES and subject == 0:
            pass  # a launch nobody numbered: warm-up
        elif kind == Kind.DISPATCH:
            execution = self._execution(subject)
            execution.dispatch_ns, execution.step, execution.after = time_ns, a, b
            execution.program = self._text(origin)
        elif kind == Kind.BEGIN_EXECUTION:
            self._execution(subject).begin_ns = time_ns
        elif kind == Kind.END_EXECUTION:
            execution = self._execution(subject)
            execution.end_ns, execution.ended = time_ns, True
        elif kind == Kind.COLLECT:
            self._execution(subject).collected_ns.append(time_ns)
        elif kind in (Kind.RELEASE, Kind.ACQUIRE):
            outcome = Outcome(b).name.lower() if kind == Kind.ACQUIRE else "recorded"
            moment = Moment(Ticket(self._names.get(subject, f"ring {subject}"), a), time_ns, outcome)
            self._meet(role, who, moment, kind == Kind.RELEASE)
        elif kind == Kind.WRITE and role == ActorType.STREAM and who in self._running:
            name = self._names.get(subject, f"buffer {subject}")
            self._running[who].writes.append(RowWrite(name, a, b >> 32, b & 0xFFFFFFFF))

    def _text(self, index: int) -> str:
        return self._origins[index] if index < len(self._origins) else ""

    def _execution(self, launch: int) -> Execution:
        return self.records.executions.setdefault(launch, Execution(launch))

    def _meet(self, role: int, who: int, moment: Moment, is_record: bool) -> None:
        if role == ActorType.STREAM and who in self._running:
            if is_record:
                self._running[who].recorded = moment
            else:
                self._running[who].waited = moment
        elif role == ActorType.EXECUTION and who:
            execution = self._execution(who)
            if is_record:
                execution.records.append(moment)
                execution.end_ns = max(execution.end_ns or 0, moment.time_ns)
            else:
                execution.waited = moment
        elif role == ActorType.HOST and is_record:
            self.records.host_records.append(moment)

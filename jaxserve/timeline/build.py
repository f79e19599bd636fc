"""From records to a timeline: which lane, which name, which arrows."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import Any

from jaxserve.timeline.device_records import DeviceRecords, Execution, Moment, StreamOperation, Ticket
from jaxserve.timeline.model import Arrow, Instant, Lane, Slice, Timeline
from jaxserve.timeline.recorder import HostRecords, HostSpan

HOST, HTTP, STREAM, EXECUTIONS = "host", "HTTP", "schedule stream", "executions"
FENCES, COPIES = Lane(STREAM, "fences"), Lane(STREAM, "copies")
ELEMENT_BYTES = 4  # of every shared buffer


def build_timeline(host: HostRecords, device: DeviceRecords) -> Timeline:
    """Puts host spans, HTTP requests and device records on lanes, and draws the arrows between them."""
    return _Builder(host, device).timeline


def fences_by_ticket(spans: Iterable[HostSpan]) -> dict[Ticket, str]:
    """``kind:reason`` of the fence behind each wait of the schedule stream, as the barrier's spans say it."""
    found = {}
    for span in spans:
        if span.name == "barrier" and "generation" in span.args:
            ticket = Ticket(span.args["ring"], span.args["generation"])
            found[ticket] = f"{span.args['kind']}:{span.args['reason']}"
    return found


def steps_of_operations(device: DeviceRecords) -> dict[int, int]:
    """Step each stream operation belongs to, by ``id`` of the operation: a copy, and the record behind it, belong to
    the step that waits for that record; a wait to the step whose reads it waits for."""
    waiting = {e.waited.ticket: e.step for e in device.executions.values() if e.waited is not None}
    reading = {m.ticket: e.step for e in device.executions.values() for m in e.records}
    steps: dict[int, int] = {}
    copies: dict[int, list[StreamOperation]] = {}  # by stream, since its last record
    for operation in device.operations:
        pending = copies.setdefault(operation.stream, [])
        if operation.type == "copy":
            pending.append(operation)
        elif operation.type == "record" and operation.recorded is not None:
            step = waiting.get(operation.recorded.ticket)
            if step is not None:
                steps.update({id(each): step for each in (*pending, operation)})
            pending.clear()
        elif operation.waited is not None and operation.waited.ticket in reading:
            steps[id(operation)] = reading[operation.waited.ticket]
    return steps


def _ms(nanoseconds: int) -> float:
    return round(nanoseconds / 1e6, 4)


class _Builder:
    def __init__(self, host: HostRecords, device: DeviceRecords):
        self.timeline = Timeline()
        self._host, self._device = host, device
        self._dispatches = {s.args["launch"]: s for s in host.spans if s.name == "dispatch" and "launch" in s.args}
        self._collects = sorted((s for s in host.spans if s.name == "collect"), key=lambda span: span.start_ns)
        self._last_ns = max(
            [s.end_ns for s in host.spans]
            + [o.end_ns or o.begin_ns for o in device.operations]
            + [e.end_ns or e.dispatch_ns or 0 for e in device.executions.values()],
            default=0,
        )
        self._sources: dict[Ticket, tuple[Lane, int]] = {}  # who recorded, and when
        self._lanes: dict[Lane, None] = {}
        self._add_host()
        self._add_executions()
        self._add_operations()
        self._add_requests()
        self._add_remarks()
        order = (HTTP, HOST, STREAM, EXECUTIONS)
        self.timeline.lanes = sorted(self._lanes, key=lambda lane: order.index(lane.group))
        self.timeline.slices.sort(key=lambda s: (s.start_ns, -s.end_ns))

    # -- host ------------------------------------------------------------------------------------------------------

    def _slice(self, lane: Lane, name: str, start_ns: int, end_ns: int, args: dict[str, Any]) -> None:
        self._lanes.setdefault(lane)
        known = {key: value for key, value in args.items() if value is not None}
        self.timeline.slices.append(Slice(lane, name, start_ns, end_ns, known))

    def _arrow(self, name: str, source: tuple[Lane, int], target: tuple[Lane, int]) -> None:
        self.timeline.arrows.append(Arrow(name, *source, *target))

    def _add_host(self) -> None:
        for span in self._host.spans:
            self._slice(Lane(HOST, span.thread), _host_name(span), span.start_ns, span.end_ns, span.args)

    def _add_requests(self) -> None:
        free_from: list[int] = []  # by lane: when its last request ended
        for request in sorted(self._host.requests, key=lambda r: r.start_ns):
            end_ns = request.end_ns if request.end_ns is not None else max(self._last_ns, request.start_ns)
            number = next((i for i, free in enumerate(free_from) if free <= request.start_ns), len(free_from))
            free_from[number:] = [end_ns, *free_from[number + 1 :]]
            lane = Lane(HTTP, f"requests {number + 1}")
            args = dict(request.args) | ({"still_open": True} if request.end_ns is None else {})
            if request.first_token_ns is not None:
                args["first_token_ms"] = _ms(request.first_token_ns - request.start_ns)
                self.timeline.instants.append(Instant(lane, "first token", request.first_token_ns))
            self._slice(lane, request.name, request.start_ns, end_ns, args)

    # -- executions ------------------------------------------------------------------------------------------------

    def _add_executions(self) -> None:
        free_from: dict[Lane, int] = {}
        ends = {m.ticket: m.time_ns for m in self._device.host_records}
        for execution in sorted(self._device.executions.values(), key=lambda e: (e.dispatch_ns or 0, e.launch)):
            dispatch = self._dispatches.get(execution.launch)
            facts = dict(dispatch.args) if dispatch is not None else {}
            facts |= {"step": execution.step, "launch": execution.launch}
            facts["program"] = facts.get("program") or execution.program
            lane = Lane(EXECUTIONS, _runner_of(execution))
            start_ns, end_ns = execution.begin_ns, execution.end_ns
            if end_ns is None:  # no handler in the program: host threads see its end, and record for it
                seen = [*execution.collected_ns, ends.get(Ticket(f"{lane.name}.step_done", facts.get("step_done", 0)))]
                end_ns = min((time_ns for time_ns in seen if time_ns is not None), default=None)
            if start_ns is None:  # it may have begun later than it could
                if execution.dispatch_ns is None:
                    continue
                prep = Lane(lane.group, f"{lane.name} prep")
                start_ns = max(execution.dispatch_ns, free_from.get(lane, 0), free_from.get(prep, 0))
                start_ns = min(start_ns, end_ns) if end_ns is not None else start_ns
                facts["begin"] = "earliest possible: the program has no handler at its head"
            if end_ns is None:
                end_ns, facts["still_open"] = max(self._last_ns, start_ns), True
            lane = self._free_lane(lane, start_ns, end_ns, free_from)
            self._add_execution(execution, lane, start_ns, end_ns, facts)
            if dispatch is not None and execution.dispatch_ns is not None:
                self._arrow("launch", (Lane(HOST, dispatch.thread), execution.dispatch_ns), (lane, start_ns))
            for time_ns in execution.collected_ns:
                collect = self._collect_at(time_ns)
                if collect is not None and time_ns >= end_ns:
                    self._arrow("results", (lane, _inside(end_ns)), (Lane(HOST, collect.thread), time_ns))
                    break

    @staticmethod
    def _free_lane(lane: Lane, start_ns: int, end_ns: int, free_from: dict[Lane, int]) -> Lane:
        """A lane on which nothing overlaps: executions of a runner may, after a failure."""
        number, chosen = 1, lane
        while free_from.get(chosen, 0) > start_ns:
            number += 1
            chosen = Lane(lane.group, f"{lane.name} ({number})")
        free_from[chosen] = end_ns
        return chosen

    def _add_execution(self, execution: Execution, lane: Lane, start_ns: int, end_ns: int, facts: dict) -> None:
        read_done = execution.record_on("read_done")
        for moment in execution.records:
            self._sources[moment.ticket] = (lane, min(moment.time_ns, _inside(end_ns)))
            self.timeline.instants.append(
                Instant(lane, _last(moment), moment.time_ns, {"generation": moment.ticket.generation})
            )
        facts["read_done_ms"] = _ms(read_done.time_ns - start_ns) if read_done else None
        mode = str(facts.get("mode") or "").lower()
        name = f"{'prep of ' if ' prep' in lane.name else ''}{mode or 'step'} {execution.step}"
        self._slice(lane, name, start_ns, end_ns, facts)
        reads_from = start_ns
        if execution.waited is not None:
            reads_from = execution.waited.time_ns
            args = {"generation": execution.waited.ticket.generation, "outcome": execution.waited.outcome}
            self._slice(lane, f"wait {execution.waited.ticket.ring}", start_ns, reads_from, args)
        if read_done is not None and read_done.time_ns < end_ns:
            self._slice(lane, "read shared rows", reads_from, read_done.time_ns, {})
            self._slice(lane, "compute", read_done.time_ns, end_ns, {})

    def _collect_at(self, time_ns: int) -> HostSpan | None:
        index = bisect.bisect_right(self._collects, time_ns, key=lambda span: span.start_ns) - 1
        found = self._collects[index] if index >= 0 else None
        return found if found is not None and found.end_ns >= time_ns else None

    # -- the schedule stream ---------------------------------------------------------------------------------------

    def _add_operations(self) -> None:
        kinds, steps = fences_by_ticket(self._host.spans), steps_of_operations(self._device)
        for operation in self._device.operations:
            end_ns = operation.end_ns if operation.end_ns is not None else max(self._last_ns, operation.begin_ns)
            args: dict[str, Any] = {"step": steps.get(id(operation)), "enqueued_at": operation.origin or None}
            if operation.end_ns is None:
                args["still_open"] = True
            if operation.enqueue_ns is not None:
                args["queued_ms"] = _ms(operation.begin_ns - operation.enqueue_ns)
            name, more = _describe(operation, kinds)
            lane = COPIES if operation.type == "copy" else FENCES
            self._slice(lane, name, operation.begin_ns, end_ns, args | more)
            if operation.recorded is not None:
                self._sources[operation.recorded.ticket] = (lane, operation.recorded.time_ns)
                self.timeline.instants.append(Instant(lane, _last(operation.recorded), operation.recorded.time_ns))
        for operation in self._device.operations:
            self._arrow_to(operation.waited, FENCES)
        for lane_slice in [s for s in self.timeline.slices if s.lane.group == EXECUTIONS and "launch" in s.args]:
            self._arrow_to(self._device.executions[lane_slice.args["launch"]].waited, lane_slice.lane)

    def _arrow_to(self, waited: Moment | None, lane: Lane) -> None:
        source = self._sources.get(waited.ticket) if waited is not None else None
        if waited is not None and source is not None and waited.outcome == "recorded":
            self._arrow(_last(waited), source, (lane, waited.time_ns))

    # -- remarks ---------------------------------------------------------------------------------------------------

    def _add_remarks(self) -> None:
        if self._host.num_dropped:
            self.timeline.remarks.append(f"{self._host.num_dropped} older host spans were dropped to bound memory")
        if self._device.num_dropped:
            self.timeline.remarks.append(f"{self._device.num_dropped} journal entries were dropped to bound memory")


def _inside(end_ns: int) -> int:
    """Viewers take a slice to have ended at its last moment, so an arrow leaves just before."""
    return end_ns - 1


def _host_name(span: HostSpan) -> str:
    if span.name == "barrier" and "kind" in span.args:
        return f"barrier {span.args['kind']}:{span.args['reason']}"
    step = span.args.get("step")
    return f"{span.name} {step}" if step is not None else span.name


def _last(moment: Moment) -> str:
    """``read_done`` of ``target.read_done``."""
    return moment.ticket.ring.rpartition(".")[2]


def _runner_of(execution: Execution) -> str:
    """``target`` or ``target prep``: programs are labelled ``target, decode[...]``."""
    if execution.program:
        return execution.program.partition(",")[0]
    rings = [moment.ticket.ring for moment in execution.records]
    return rings[0].rpartition(".")[0] if rings else "unknown runner"


def _describe(operation: StreamOperation, kinds: dict[Ticket, str]) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a stream operation."""
    if operation.type == "copy":
        buffers = ", ".join(dict.fromkeys(write.buffer for write in operation.writes)) or "rows"
        args = {
            "rows": [write.row for write in operation.writes],
            "columns": sorted({f"{w.first_column}..{w.first_column + w.num_columns - 1}" for w in operation.writes}),
            "bytes": bytes_of(operation),
        }
        return f"write {buffers}", args
    moment = operation.waited if operation.type == "wait" else operation.recorded
    if moment is None:
        return operation.type, {}
    args = {"generation": moment.ticket.generation, "outcome": moment.outcome}
    if operation.type == "wait":
        args["fence"] = kinds.get(moment.ticket)
        return f"wait {moment.ticket.ring}" + (f" ({args['fence']})" if args["fence"] else ""), args
    return f"record {moment.ticket.ring}", args


def bytes_of(operation: StreamOperation) -> int:
    """Bytes a copy wrote."""
    return sum(write.num_columns for write in operation.writes) * ELEMENT_BYTES

"""One decode step out of a recording: the median one, with the moments that a fence decides about."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from jaxserve.core.errors import JaxserveError
from jaxserve.timeline.build import fences_by_ticket, steps_of_operations
from jaxserve.timeline.device_records import DeviceRecords, Execution, StreamOperation
from jaxserve.timeline.recorder import HostRecords, HostSpan

SKIPPED_STEPS = 3  # the first decode steps of a run: caches are cold, and the step before them is a prefill


@dataclass(frozen=True)
class StepTimes:
    """Durations around one step N, in ns.

    Attributes:
        period: from where step N computes to where step N + 1 does.
        execution: from the first handler of N to its end record.
        reads: from the first handler of N to the end of its reads.
        held: how long the row writes of N + 1 lay on the schedule stream: first one enqueued to last one done.
        in_place: from the first handler of N until the rows of N + 1 were written; negative if before.
        gap: from the end of N until N + 1 computes.
    """

    period: int
    execution: int
    reads: int
    held: int
    in_place: int
    gap: int


@dataclass
class StepView:
    """Step N, the one after it, and what host and schedule stream did meanwhile.

    Attributes:
        fence: ``kind:reason`` of the fence behind step N.
        before, step, after: executions of steps N - 1, N and N + 1.
        wait: the schedule stream's wait for step N.
        writes: its row writes for step N + 1, and ``published``, the record behind them.
        times: of step N.
        medians: over all the steps compared.
        num_steps: how many these were.
    """

    fence: str
    before: Execution
    step: Execution
    after: Execution
    wait: StreamOperation
    writes: list[StreamOperation]
    published: StreamOperation
    times: StepTimes
    batch: int = 0
    program: str = ""
    spans: list[HostSpan] = field(default_factory=list)
    operations: list[StreamOperation] = field(default_factory=list)
    medians: StepTimes | None = None
    num_steps: int = 0

    @property
    def zero_ns(self) -> int:
        """Where its picture begins to count."""
        assert self.step.begin_ns is not None
        return self.step.begin_ns


def median_step(host: HostRecords, device: DeviceRecords) -> StepView:
    """The decode step nearest to the median one in period, execution, gap and when the rows are in place.

    Raises:
        JaxserveError: the recording holds no decode step with one before and one after it, all seen from begin to end.
    """
    views = complete_steps(host, device)
    largest = max((view.batch for view in views), default=0)
    views = [view for view in views if view.batch == largest]  # sequences come and go at the ends of a run
    if len(views) > 2 * SKIPPED_STEPS:
        views = views[SKIPPED_STEPS:-1]  # the last one may be cut short by what ends behind it
    if not views:
        raise JaxserveError(
            f"no complete decode step was recorded ({len(device.executions)} executions); run more steps, and a "
            "backend whose programs hold the read-done marker"
        )
    names = StepTimes.__dataclass_fields__
    medians = StepTimes(**{n: round(statistics.median(getattr(v.times, n) for v in views)) for n in names})
    chosen = min(views, key=lambda view: _distance(view.times, medians))
    chosen.medians = medians
    chosen.num_steps = len(views)
    first_ns, last_ns = chosen.before.begin_ns or 0, (chosen.after.end_ns or 0)
    chosen.spans = [s for s in host.spans if s.end_ns > first_ns and s.start_ns < last_ns]
    chosen.operations = [o for o in device.operations if (o.end_ns or 0) > first_ns and o.begin_ns < last_ns]
    return chosen


def _distance(times: StepTimes, medians: StepTimes) -> float:
    pairs = [(getattr(times, n), getattr(medians, n)) for n in ("period", "execution", "gap", "in_place")]
    return sum(abs(value - median) / max(abs(median), 1) for value, median in pairs)


def complete_steps(host: HostRecords, device: DeviceRecords) -> list[StepView]:
    """Every decode step with one before and one after it, all seen from begin to end."""
    facts = {s.args.get("launch"): s.args for s in host.spans if s.name == "dispatch"}
    fences = fences_by_ticket(host.spans)
    steps = steps_of_operations(device)
    waits = {o.waited.ticket: o for o in device.operations if o.waited is not None and o.end_ns is not None}
    operations: dict[int, list[StreamOperation]] = {}
    for operation in device.operations:
        if operation.type != "wait" and id(operation) in steps:
            operations.setdefault(steps[id(operation)], []).append(operation)
    decodes = {
        e.step: e
        for e in device.executions.values()
        if e.begin_ns is not None and e.ended and facts.get(e.launch, {}).get("mode") == "DECODE"
    }
    views = []
    for number, step in decodes.items():
        before, after = decodes.get(number - 1), decodes.get(number + 1)
        wait = next((waits[m.ticket] for m in step.records if m.ticket in waits), None)
        mine = operations.get(number + 1, [])
        writes, published = [o for o in mine if o.type == "copy"], [o for o in mine if o.type == "record"]
        if before is None or after is None or wait is None or wait.waited is None or not writes or not published:
            continue
        times = _times(step, after, writes)
        if times is not None:
            fence, known = fences.get(wait.waited.ticket, "unknown"), facts[step.launch]
            views.append(
                StepView(fence, before, step, after, wait, writes, published[0], times, known["batch"],
                         known["program"])
            )  # fmt: skip
    return views


def _times(step: Execution, after: Execution, writes: list[StreamOperation]) -> StepTimes | None:
    read, read_after = step.record_on("read_done"), after.record_on("read_done")
    first_ns, last_ns = writes[0].enqueue_ns, writes[-1].end_ns
    begin_ns, end_ns = step.begin_ns, step.end_ns
    if None in (read, read_after, first_ns, last_ns, begin_ns, end_ns):
        return None
    assert read and read_after and first_ns and last_ns and begin_ns and end_ns
    return StepTimes(
        period=read_after.time_ns - read.time_ns,
        execution=end_ns - begin_ns,
        reads=read.time_ns - begin_ns,
        held=last_ns - first_ns,
        in_place=last_ns - begin_ns,
        gap=read_after.time_ns - end_ns,
    )

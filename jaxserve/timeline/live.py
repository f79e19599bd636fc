"""The newest steps while they happen: what the host did for each, when it was executed, and which fence followed it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from jaxserve.barrier import journal
from jaxserve.timeline.device_records import DeviceRecords, read_journal
from jaxserve.timeline.recorder import RECORDER, HostSpan

NEWEST_SPANS = 2048
NEWEST_ENTRIES = 4096  # of the journal; some 30 a step
STEPS_AT_ONCE = 100
WAIT_COMES_NS = 1_000_000_000
HOST = ("plan", "launch", "collect", "commit")

Between = list[float]  # [begin, end] in ms


class Step(NamedTuple):
    """One step. Times are ms since the watch began; None where nothing recorded them (a GPU records no executions).

    Attributes:
        mode: ``EXTEND``, ``DECODE`` or ``TARGET_VERIFY``.
        rows: sequences in it.
        drafted, accepted: of a verify step, else None.
        fence: ``kind:reason`` of the fence behind it.
        plan, launch, collect, commit: the host's work.
        execution: on the device; of several phases from the first to the last.
        read_done: when it had read the shared rows.
        wait: the schedule stream's wait for that.
    """

    step: int
    mode: str
    rows: int
    drafted: int | None
    accepted: int | None
    fence: str | None
    plan: Between | None
    launch: Between | None
    collect: Between | None
    commit: Between | None
    execution: Between | None
    read_done: float | None
    wait: Between | None


def steps_of(spans: Iterable[HostSpan], device: DeviceRecords, zero_ns: int, now_ns: int) -> list[Step]:
    """The steps that were committed, in order; each is complete but for what the records do not hold any more.

    The schedule stream may come to the wait for a step after the step was committed. Until it has, that step and those
    behind it are left out, but for no longer than ``WAIT_COMES_NS``: the record may be lost.

    Args:
        zero_ns, now_ns: of ``time.perf_counter_ns``: when the watch began, and now.
    """

    def ms(time_ns: int) -> float:
        return round((time_ns - zero_ns) / 1e6, 3)

    found: dict[int, dict[str, HostSpan]] = {}
    for span in spans:
        if span.name in (*HOST, "barrier") and "step" in span.args:
            found.setdefault(span.args["step"], {})[span.name] = span
    executions: dict[int, list[Any]] = {}
    for execution in device.executions.values():
        if execution.begin_ns is not None and execution.end_ns is not None:
            executions.setdefault(execution.step, []).append(execution)
    waits = {o.waited.ticket: o for o in device.operations if o.waited is not None and o.end_ns is not None}
    newest: dict[Any, int] = {}  # generation waited for on each ring: what comes before it and is missing is lost
    for ring, generation in waits:
        newest[ring] = max(generation, newest.get(ring, 0))
    steps = []
    for number, parts in sorted(found.items()):
        if "commit" not in parts or "plan" not in parts:
            continue
        plan, commit = parts["plan"].args, parts["commit"].args
        barrier = parts["barrier"].args if "barrier" in parts else {}
        times: dict[str, Any] = {
            name: [ms(parts[name].start_ns), ms(parts[name].end_ns)] if name in parts else None for name in HOST
        }
        own = executions.get(number, [])
        reads = [moment.time_ns for each in own if (moment := each.record_on("read_done")) is not None]
        wait = waits.get((barrier.get("ring"), barrier.get("generation")))  # type: ignore[call-overload]
        is_recent = device.executions and parts["commit"].end_ns > now_ns - WAIT_COMES_NS
        if wait is None and is_recent and barrier.get("generation", 0) > newest.get(barrier.get("ring"), 0):
            break  # (where executions are not recorded, waits are not either)
        steps.append(
            Step(
                number, plan.get("mode", ""), plan.get("batch", 0), plan.get("drafted"), commit.get("accepted"),
                f"{barrier['kind']}:{barrier['reason']}" if "kind" in barrier else None,
                **times,
                execution=[ms(min(e.begin_ns for e in own)), ms(max(e.end_ns for e in own))] if own else None,
                read_done=ms(max(reads)) if reads else None,
                wait=[ms(wait.begin_ns), ms(wait.end_ns)] if wait is not None and wait.end_ns else None,
            )
        )  # fmt: skip
    return steps


class Watch:
    """Records from construction to ``close``, and hands out steps as they are committed. One thread at a time."""

    def __init__(self, zero_ns: int):
        self._zero_ns, self._newest_step = zero_ns, 0
        self._entries = np.zeros(0, journal.ENTRY)
        self._chunks: deque[np.ndarray] = deque()
        self._spans = RECORDER.watch(NEWEST_SPANS)
        try:
            self._subscription = journal.subscribe(lambda entries, num_dropped: self._chunks.append(entries))
        except BaseException:
            RECORDER.unwatch(self._spans)
            raise

    def take(self) -> list[Step]:
        """The steps committed since the last call, the newest ``STEPS_AT_ONCE`` of them."""
        journal.pump()
        chunks = [self._chunks.popleft() for _ in range(len(self._chunks))]
        self._entries = np.concatenate([self._entries, *chunks])[-NEWEST_ENTRIES:]
        spans = list(self._spans.copy())
        if not any(s.name == "commit" and s.args.get("step", 0) > self._newest_step for s in spans):
            return []
        device = read_journal(self._entries, journal.names(), journal.strings())
        steps = steps_of(spans, device, self._zero_ns, time.perf_counter_ns())
        new = [step for step in steps if step.step > self._newest_step]
        if new:
            self._newest_step = new[-1].step
        return new[-STEPS_AT_ONCE:]

    def close(self) -> None:
        """Ends recording. Idempotent."""
        RECORDER.unwatch(self._spans)
        self._subscription.close()

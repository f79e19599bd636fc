"""A timeline in the Chrome trace event format, which Perfetto, chrome://tracing and Speedscope open."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

from jaxserve.timeline.model import Lane, Timeline


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The trace as JSON values: metadata first, then events in order of time, an enclosing slice ahead of its parts.

    One process per group of lanes, one thread per lane; times are microseconds since the first event.
    """
    groups = list(dict.fromkeys(lane.group for lane in timeline.lanes))
    where = {
        lane: {"pid": groups.index(lane.group) + 1, "tid": number + 1} for number, lane in enumerate(timeline.lanes)
    }
    times = [s.start_ns for s in timeline.slices] + [i.time_ns for i in timeline.instants]
    zero_ns = min(times, default=0)

    def microseconds(time_ns: int) -> float:
        return (time_ns - zero_ns) / 1000

    events: list[tuple[int, int, dict[str, Any]]] = []  # (time, rank at equal times, event)
    for each in timeline.slices:
        duration_ns = each.end_ns - each.start_ns
        event = {"ph": "X", "name": each.name, "cat": each.lane.group, "ts": microseconds(each.start_ns)}
        event |= {"dur": duration_ns / 1000, **where[each.lane]} | ({"args": each.args} if each.args else {})
        events.append((each.start_ns, -duration_ns, event))
    for instant in timeline.instants:
        event = {"ph": "i", "s": "t", "name": instant.name, "cat": instant.lane.group}
        event |= {"ts": microseconds(instant.time_ns), **where[instant.lane]}
        events.append((instant.time_ns, 1, event | ({"args": instant.args} if instant.args else {})))
    for number, arrow in enumerate(timeline.arrows, 1):
        common = {"name": arrow.name, "cat": "order", "id": number}
        start = common | {"ph": "s", "ts": microseconds(arrow.from_ns), **where[arrow.from_lane]}
        end = common | {"ph": "f", "bp": "e", "ts": microseconds(arrow.to_ns), **where[arrow.to_lane]}
        events += [(arrow.from_ns, 2, start), (arrow.to_ns, 3, end)]
    events.sort(key=lambda item: item[:2])
    return {
        "displayTimeUnit": "ms",
        "otherData": {"made by": "jaxserve", "clock": "CLOCK_MONOTONIC", "remarks": list(timeline.remarks)},
        "traceEvents": [*_metadata(groups, where), *(event for _, _, event in events)],
    }


def _metadata(groups: list[str], where: dict[Lane, dict[str, int]]) -> list[dict[str, Any]]:
    """Names and order of processes and threads."""
    events: list[dict[str, Any]] = []

    def add(what: str, at: dict[str, int], **args: Any) -> None:
        events.append({"ph": "M", "name": what, "ts": 0, **at, "args": args})

    for pid, group in enumerate(groups, 1):
        add("process_name", {"pid": pid, "tid": 0}, name=group)
        add("process_sort_index", {"pid": pid, "tid": 0}, sort_index=pid)
    for lane, at in where.items():
        add("thread_name", at, name=lane.name)
        add("thread_sort_index", at, sort_index=at["tid"])
    return events


def write_chrome_trace(timeline: Timeline, path: Path) -> None:
    """Writes the trace; gzipped if the name ends in ``.gz``. A reader never meets half of it."""
    import orjson  # only here: whoever writes no trace does without it

    written = orjson.dumps(chrome_trace(timeline), default=str)
    if path.suffix == ".gz":
        written = gzip.compress(written, compresslevel=5)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_bytes(written)
    unfinished.replace(path)

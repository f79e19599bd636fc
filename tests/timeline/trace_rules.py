"""The rules of the Chrome trace event format, as far as we use it, and what a reader of our traces relies on."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

NEEDED = {"M": {"name", "pid", "tid", "args"}, "X": {"name", "cat", "pid", "tid", "ts", "dur"},
          "i": {"name", "cat", "pid", "tid", "ts", "s"}, "s": {"name", "cat", "pid", "tid", "ts", "id"},
          "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"}}  # fmt: skip


def problems(trace: dict[str, Any]) -> list[str]:
    """Everything wrong with a trace; nothing if it keeps the rules."""
    events = trace["traceEvents"]
    return [
        *_fields(events), *_names(events), *_order(events), *_nesting(events), *_flows(events),
    ]  # fmt: skip


def lane_of(event: dict[str, Any]) -> tuple[int, int]:
    return event["pid"], event["tid"]


def slices_by_lane(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    lanes: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[lane_of(event)].append(event)
    return lanes


def _fields(events: list[dict[str, Any]]) -> list[str]:
    found = []
    for event in events:
        if event["ph"] not in NEEDED:
            found.append(f"unknown phase {event['ph']!r}")
        elif NEEDED[event["ph"]] - event.keys():
            found.append(f"{event} lacks {NEEDED[event['ph']] - event.keys()}")
        elif event["ph"] == "X" and event["dur"] < 0:
            found.append(f"{event['name']} lasts {event['dur']}")
        elif event["ts"] < 0:
            found.append(f"{event['name']} is at {event['ts']}")
    return found


def _names(events: list[dict[str, Any]]) -> list[str]:
    processes = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    threads = {lane_of(e) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    others = [e for e in events if e["ph"] != "M"]
    found = [f"process {pid} has no name" for pid in {e["pid"] for e in others} - processes]
    return found + [f"thread {lane} has no name" for lane in {lane_of(e) for e in others} - threads]


def _order(events: list[dict[str, Any]]) -> list[str]:
    latest: dict[tuple[int, int], float] = {}
    found = []
    for event in events:
        if event["ph"] != "M":
            if event["ts"] < latest.get(lane_of(event), 0):
                found.append(f"{event['name']} at {event['ts']} comes after {latest[lane_of(event)]}")
            latest[lane_of(event)] = event["ts"]
    return found


def _nesting(events: list[dict[str, Any]]) -> list[str]:
    """Slices of a lane lie within each other or apart."""
    found = []
    for slices in slices_by_lane(events).values():
        open_until: list[float] = []
        for event in slices:
            while open_until and open_until[-1] <= event["ts"] + 1e-6:
                open_until.pop()
            end = event["ts"] + event["dur"]
            if open_until and end > open_until[-1] + 1e-3:
                found.append(f"{event['name']} at {event['ts']} ends at {end}, after {open_until[-1]}")
            open_until.append(end)
    return found


def _flows(events: list[dict[str, Any]]) -> list[str]:
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    found = [f"flow {i} has one end" for i in starts.keys() ^ ends.keys()]
    lanes = slices_by_lane(events)
    for number in starts.keys() & ends.keys():
        start, end = starts[number], ends[number]
        if start["ts"] > end["ts"]:
            found.append(f"arrow {start['name']} goes from {start['ts']} back to {end['ts']}")
        for event in (start, end):
            if not any(s["ts"] <= event["ts"] <= s["ts"] + s["dur"] + 1e-6 for s in lanes[lane_of(event)]):
                found.append(f"arrow {event['name']} at {event['ts']} touches no slice")
    if sum(e["ph"] == "s" for e in events) != len(starts):
        found.append("a flow id is used twice")
    return found

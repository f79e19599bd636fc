"""Traces of a real engine: they keep the format's rules, and show what the fences do."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
from trace_rules import problems

CONFIGURATIONS = {
    "fine": {},
    "coarse": {"force_coarse_war_barrier": True},
    "prep": {"shared_read_marker": False},
    "no_overlap": {"disable_overlap_schedule": True},
    "upload": {"shared_updates": "upload"},
}


def slices(trace: dict[str, Any], start: str = "", **args: Any) -> list[dict[str, Any]]:
    """Slices whose name begins so and that have these args."""
    events = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["name"].startswith(start)]
    return [e for e in events if all(e.get("args", {}).get(key) == value for key, value in args.items())]


def lanes(trace: dict[str, Any]) -> dict[tuple[int, int], str]:
    metadata = [e for e in trace["traceEvents"] if e["ph"] == "M"]
    groups = {e["pid"]: e["args"]["name"] for e in metadata if e["name"] == "process_name"}
    threads = [e for e in metadata if e["name"] == "thread_name"]
    return {(e["pid"], e["tid"]): f"{groups[e['pid']]}/{e['args']['name']}" for e in threads}


def arrows(trace: dict[str, Any]) -> Counter[tuple[str, str, str]]:
    """(from lane, name, to lane) of every arrow."""
    named = lanes(trace)
    starts = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "s"}
    return Counter(
        (named[starts[e["id"]]["pid"], starts[e["id"]]["tid"]], e["name"], named[e["pid"], e["tid"]])
        for e in trace["traceEvents"]
        if e["ph"] == "f"
    )


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_trace_keeps_the_rules_of_the_format(recorded: Any, name: str) -> None:
    trace = recorded(**CONFIGURATIONS[name]).trace
    assert problems(trace) == []
    assert not trace["otherData"]["remarks"]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_step_is_planned_launched_executed_collected_and_committed(recorded: Any, name: str) -> None:
    trace = recorded(**CONFIGURATIONS[name]).trace
    steps = {e["args"]["step"] for e in slices(trace, "plan ")}
    assert len(steps) == 12  # two prompts, one of which lives one step longer
    for what in ("launch ", "barrier ", "collect ", "commit "):
        assert {e["args"]["step"] for e in slices(trace, what)} == steps, what
    executions = [e for e in slices(trace) if e["cat"] == "executions" and "launch" in e.get("args", {})]
    assert {e["args"]["step"] for e in executions} == steps
    assert not [e for e in slices(trace) if e.get("args", {}).get("still_open")]


def test_verify_steps_say_how_many_drafts_held(recorded: Any) -> None:
    """NGRAM has seen these answers before, so nearly all of its drafts hold."""
    run = recorded(speculative_algorithm="NGRAM", speculative_num_draft_tokens=4, speculative_adaptive=False,
                   speculative_ngram_capacity=10_000)  # fmt: skip
    assert problems(run.trace) == []
    plans = {e["args"]["step"]: e["args"] for e in slices(run.trace, "plan ", mode="TARGET_VERIFY")}
    executions = {e["args"]["step"]: e["args"] for e in slices(run.trace, "target_verify ")}
    commits = {e["args"]["step"]: e["args"] for e in slices(run.trace, "commit ") if "accepted" in e["args"]}
    assert plans.keys() == executions.keys() == commits.keys() and plans
    for step, plan in plans.items():
        assert executions[step]["drafted"] == plan["drafted"] >= commits[step]["accepted"]
        assert executions[step]["tokens_per_row"] == 4 and executions[step]["mode"] == "TARGET_VERIFY"
        assert commits[step]["tokens"] == commits[step]["accepted"] + plan["batch"]
    assert sum(commit["accepted"] for commit in commits.values()) >= 10


def test_arrows_say_who_waited_for_whom(recorded: Any) -> None:
    found = arrows(recorded().trace)
    stream, execution, host = "schedule stream/fences", "executions/target", "host/MainThread"
    assert found == {
        (host, "launch", execution): 12,
        (execution, "results", host): 12,
        (stream, "write_done", execution): 12,
        (execution, "read_done", stream): 10,
        (execution, "step_done", stream): 2,  # of the prefills, whose reads nobody audited
    }


def test_the_coarse_fence_waits_for_the_end_of_the_step(recorded: Any) -> None:
    found = arrows(recorded(**CONFIGURATIONS["coarse"]).trace)
    assert found["executions/target", "step_done", "schedule stream/fences"] == 12
    assert ("executions/target", "read_done", "schedule stream/fences") not in found


@pytest.mark.parametrize("coarse", [False, True])
def test_a_fine_wait_ends_before_its_execution_and_a_coarse_one_never(recorded: Any, coarse: bool) -> None:
    trace = recorded(long_steps=True, force_coarse_war_barrier=coarse).trace
    kind = "coarse:forced" if coarse else "fine:marker"
    waits = slices(trace, "wait ", fence=kind)
    executions = [e for e in slices(trace) if e["cat"] == "executions" and "launch" in e.get("args", {})]
    ends = {e["args"]["step"]: e["ts"] + e["dur"] for e in executions}
    assert len(waits) == (12 if coarse else 10)
    for wait in waits:
        ended_after = wait["ts"] + wait["dur"] - ends[wait["args"]["step"]]
        assert ended_after >= 0 if coarse else ended_after < 0, wait


def test_the_marker_is_an_instant_within_its_execution(recorded: Any) -> None:
    trace = recorded(long_steps=True, force_coarse_war_barrier=False).trace
    markers = [e for e in trace["traceEvents"] if e["ph"] == "i" and e["name"] == "read_done"]
    executions = [e for e in slices(trace, mode="DECODE") if e["cat"] == "executions"]
    assert len(markers) == len(executions) == 10
    for marker, execution in zip(markers, executions, strict=True):
        assert execution["ts"] < marker["ts"] < execution["ts"] + execution["dur"] - 40_000


def test_prep_programs_have_a_lane_of_their_own(recorded: Any) -> None:
    trace = recorded(**CONFIGURATIONS["prep"]).trace
    assert {"executions/target", "executions/target prep"} <= set(lanes(trace).values())


def test_copies_say_what_they_wrote_and_for_which_step(recorded: Any) -> None:
    trace = recorded().trace
    copies = [e for e in slices(trace) if lanes(trace)[e["pid"], e["tid"]] == "schedule stream/copies"]
    lengths = [e for e in copies if e["name"] == "write lengths" and "step" in e["args"]]
    assert {e["args"]["step"] for e in lengths} == {e["args"]["step"] for e in slices(trace, "plan ")}
    assert all(e["args"]["bytes"] == 4 * len(e["args"]["rows"]) for e in lengths)
    assert all(e["args"]["enqueued_at"].startswith("scheduler/") for e in copies)


def _reach_into_the_next(events: list[dict[str, Any]]) -> None:
    plan, launch = (next(e for e in events if e["name"].startswith(name)) for name in ("plan ", "launch "))
    plan["dur"] = launch["ts"] + launch["dur"] / 2 - plan["ts"]


BREAKS = {
    "a lane without a name": lambda events: events.remove(next(e for e in events if e["name"] == "thread_name")),
    "a negative duration": lambda events: next(e for e in events if e["ph"] == "X").update(dur=-1.0),
    "half a flow": lambda events: events.remove(next(e for e in events if e["ph"] == "f")),
    "an arrow back in time": lambda events: next(e for e in events if e["ph"] == "s").update(ts=1e9),
    "an unknown phase": lambda events: events.append({"ph": "Q", "name": "q", "ts": 1e9, "pid": 1, "tid": 1}),
    "events out of order": lambda events: events.append(dict(next(e for e in events if e["ph"] == "i"), ts=0.0)),
    "slices that cross": lambda events: _reach_into_the_next(events),
}


@pytest.mark.parametrize("name", BREAKS)
def test_the_rules_find_what_breaks_them(recorded: Any, name: str) -> None:
    trace = copy.deepcopy(recorded().trace)
    BREAKS[name](trace["traceEvents"])
    assert problems(trace)

"""The host's recorder: nothing while off, bounded while on, any thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from jaxserve.core.errors import ConfigError
from jaxserve.timeline.build import build_timeline
from jaxserve.timeline.device_records import DeviceRecords
from jaxserve.timeline.recorder import RECORDER, HostRecords, RequestSpan, note_first_token, span


@pytest.fixture
def recording() -> Iterator[None]:
    RECORDER.start(100)
    yield
    RECORDER.stop()


def test_while_off_a_span_is_one_object_that_keeps_nothing() -> None:
    assert span("plan", step=1) is span("launch")
    with span("plan") as planning:
        planning.note(step=1)
    with RequestSpan("GET", "/health", "r"):
        note_first_token()
    RECORDER.start(10)
    assert RECORDER.stop() == HostRecords()


def test_spans_nest_and_carry_what_was_noted(recording: None) -> None:
    with span("launch", step=3), span("barrier") as barrier:
        barrier.note(kind="fine")
    inner, outer = RECORDER.stop().spans
    assert (outer.name, outer.args) == ("launch", {"step": 3}) and inner.args == {"kind": "fine"}
    assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns
    assert outer.thread == inner.thread == threading.current_thread().name


def test_a_span_that_ends_in_an_error_says_so(recording: None) -> None:
    with pytest.raises(ZeroDivisionError), span("plan"):
        _ = 1 / 0
    assert RECORDER.stop().spans[0].args == {"error": "ZeroDivisionError"}


def test_the_newest_spans_are_kept_and_the_others_counted() -> None:
    RECORDER.start(10)

    def work() -> None:
        for i in range(50):
            with span("s", i=i):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = RECORDER.stop()
    assert len(records.spans) == 10 and records.num_dropped == 190
    assert "190 older host spans were dropped" in build_timeline(records, DeviceRecords()).remarks[0]


def test_two_recordings_at_once_are_refused(recording: None) -> None:
    with pytest.raises(ConfigError, match="already"):
        RECORDER.start(10)


def test_requests_that_overlap_get_lanes_of_their_own(recording: None) -> None:
    async def request(name: str, begun: asyncio.Event, end: asyncio.Event) -> None:
        with RequestSpan("POST", name, f"id-{name}") as http:
            begun.set()
            await end.wait()
            note_first_token()
            first_ns = [r.first_token_ns for r in RECORDER.requests if r.name == f"POST {name}"]
            note_first_token()
            assert first_ns == [r.first_token_ns for r in RECORDER.requests if r.name == f"POST {name}"]
            http.note(status=200)

    async def overlap() -> None:
        begun, end = [asyncio.Event() for _ in range(3)], [asyncio.Event() for _ in range(3)]
        tasks = []
        for i in range(2):
            tasks.append(asyncio.create_task(request(f"/{i}", begun[i], end[i])))
            await begun[i].wait()
        end[0].set()
        await tasks[0]
        tasks.append(asyncio.create_task(request("/2", begun[2], end[2])))
        await begun[2].wait()
        end[1].set(), end[2].set()
        await asyncio.gather(*tasks)

    asyncio.run(overlap())
    still_open = RequestSpan("GET", "/open", "id-open")
    still_open.__enter__()
    timeline = build_timeline(RECORDER.stop(), DeviceRecords())
    assert {s.name: s.lane.name for s in timeline.slices} == {
        "POST /0": "requests 1", "POST /1": "requests 2", "POST /2": "requests 1", "GET /open": "requests 1",
    }  # fmt: skip
    assert [s.args.get("status") for s in timeline.slices] == [200, 200, 200, None]
    assert timeline.slices[-1].args["still_open"] is True
    assert [(i.name, i.lane.name) for i in timeline.instants] == [
        ("first token", f"requests {lane}") for lane in (1, 2, 1)
    ]

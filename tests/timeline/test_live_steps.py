"""The newest steps as they happen, beside a recording and without one."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
from tiny import write_tiny

from jaxserve.barrier import journal
from jaxserve.core.config import EngineConfig
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.timeline import live
from jaxserve.timeline.device_records import DeviceRecords, read_journal
from jaxserve.timeline.live import STEPS_AT_ONCE, Step, Watch
from jaxserve.timeline.recorder import RECORDER, span


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    model = write_tiny(tmp_path_factory.mktemp("tiny"))
    return Engine(EngineConfig(
        model=str(model), page_size=4, num_pages=64, max_running_requests=2, chunked_prefill_size=16,
        context_length=128, prefill_token_buckets=(16,), decode_batch_buckets=(2,), skip_warmup=True,
    ))  # fmt: skip


def serve(engine: Engine, num_tokens: int) -> None:
    engine.add(Request(f"r{time.perf_counter_ns()}", (5, 6, 7), SamplingParams(max_tokens=num_tokens, ignore_eos=True)))
    while engine.has_work:
        engine.step()


def take(watch: Watch, engine: Engine) -> list[list[Step]]:
    """All that is handed out until the newest step is."""
    taken: list[list[Step]] = []
    deadline = time.monotonic() + 10
    while not taken or taken[-1][-1].step < engine.scheduler.step_number:
        assert time.monotonic() < deadline, taken
        if steps := watch.take():
            taken.append(steps)
    return taken


def test_every_step_is_handed_out_once_and_is_complete(engine: Engine) -> None:
    serve(engine, 2)
    watch = Watch(time.perf_counter_ns())
    try:
        serve(engine, 6)
        steps = [step for taken in take(watch, engine) for step in taken]
        assert [step.mode for step in steps] == ["EXTEND"] + ["DECODE"] * 5
        assert [step.step for step in steps] == list(range(steps[0].step, steps[0].step + 6))
        assert steps[0].fence == "coarse:extend" and {step.fence for step in steps[1:]} == {"fine:marker"}
        for step in steps:
            assert step.plan and step.launch and step.collect and step.commit and step.execution
            assert step.rows == 1 and step.drafted is None
            order = [0, step.plan[0], step.plan[1], step.launch[0], step.collect[1], step.commit[0], step.commit[1]]
            assert order == sorted(order)
            assert step.launch[0] <= step.execution[0] <= step.execution[1] <= step.collect[1]
        for step in steps[1:]:
            assert step.wait and step.read_done and step.execution
            assert step.execution[0] <= step.read_done <= step.execution[1] and step.wait[1] >= step.read_done
        assert watch.take() == []
        serve(engine, 3)
        numbers = [step.step for taken in take(watch, engine) for step in taken]
        assert numbers == [steps[-1].step + 1 + i for i in range(3)]
        serve(engine, STEPS_AT_ONCE // 2), serve(engine, STEPS_AT_ONCE // 2 + 20)
        first, *_ = take(watch, engine)
        assert len(first) == STEPS_AT_ONCE
    finally:
        watch.close()
    assert not RECORDER.on and not journal.is_on()


def test_a_step_whose_wait_is_still_to_come_is_held_back(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, other = Watch(time.perf_counter_ns()), Watch(time.perf_counter_ns())
    try:
        serve(engine, 4)
        newest = engine.scheduler.step_number
        assert take(other, engine)[-1][-1].wait is not None

        def without_the_last_wait(*arguments: Any) -> DeviceRecords:
            device = read_journal(*arguments)
            last = max((o for o in device.operations if o.waited is not None), key=lambda o: o.begin_ns)
            return dataclasses.replace(device, operations=[o for o in device.operations if o is not last])

        monkeypatch.setattr(live, "read_journal", without_the_last_wait)
        monkeypatch.setattr(live, "WAIT_COMES_NS", 60 * 10**9)
        assert [step.step for step in watch.take()] == [newest - 3, newest - 2, newest - 1]
        assert watch.take() == []
        monkeypatch.setattr(live, "WAIT_COMES_NS", 0)
        [step] = watch.take()
        assert step.step == newest and step.wait is None
    finally:
        watch.close()
        other.close()


def test_watching_does_not_disturb_a_recording_nor_the_other_way_round() -> None:
    spans = RECORDER.watch(10)
    with span("seen"):
        pass
    RECORDER.start(10)
    with span("both"):
        pass
    assert [each.name for each in RECORDER.stop().spans] == ["both"] and RECORDER.on
    with span("again"):
        pass
    assert [each.name for each in spans] == ["seen", "both", "again"]
    assert RECORDER.stop().spans == []
    RECORDER.start(10)
    RECORDER.unwatch(spans)
    assert RECORDER.on
    RECORDER.stop()
    assert not RECORDER.on

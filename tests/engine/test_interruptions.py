"""Interrupts, collections, closing and late failures at awkward moments: nothing is lost, nothing waits for ever."""

from __future__ import annotations

import gc
import threading
import time

import jax
import pytest
from rig import SETTINGS, Collected, add, check_alive, greedy, make_engine, prompt_of, run

from jaxserve.barrier.native import native_module
from jaxserve.barrier.shared_rows import SharedRows
from jaxserve.core.errors import EngineDead
from jaxserve.engine.llm import LLM
from jaxserve.runner.launch import Launch
from jaxserve.scheduler.scheduler import Scheduler


@pytest.fixture
def hold():
    points = native_module("cpu").hold_points
    yield points
    points.clear()


def test_an_interrupt_in_a_step_ends_what_ran_and_nothing_hangs(tiny, oracle, monkeypatch):
    """Ctrl-C falls between the dispatch of one step and the commit of the one before."""
    engine, collected = make_engine(tiny), Collected()
    ids = [add(engine, prompt_of(9, i), greedy(12)) for i in range(2)]
    while any(s.num_output < 3 for s in (*engine.scheduler.running, *engine.scheduler.waiting)):
        collected.take(engine.step())
    with monkeypatch.context() as patch:
        patch.setattr(Launch, "collect", lambda self: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    run(engine, collected)
    assert [collected[i].finish_reason for i in ids] == ["error", "error"]
    assert not engine.has_work
    check_alive(engine, oracle)
    engine.close()


def test_a_stream_collected_inside_a_step_does_not_wait_for_itself(tiny, monkeypatch):
    with LLM(str(tiny), **SETTINGS) as llm:

        class Box:
            pass

        box = Box()
        box.stream, box.myself = llm.stream(prompt_of(9, 2), greedy(40)), box
        next(box.stream)
        gc.disable()
        try:
            del box
            step = llm.engine.step
            monkeypatch.setattr(llm.engine, "step", lambda: (gc.collect(), step())[1])
            done = threading.Event()
            threading.Thread(
                target=lambda: (llm.generate([prompt_of(9, 1)], greedy(3)), done.set()), daemon=True
            ).start()
            assert done.wait(30), "the step waits for the lock it holds"
        finally:
            gc.enable()
        assert not llm.engine.open_requests


def test_a_failing_abort_reaches_the_other_streams(tiny, monkeypatch):
    with LLM(str(tiny), **SETTINGS) as llm:
        first, second = llm.stream(prompt_of(9, 1), greedy(60)), llm.stream(prompt_of(12, 2), greedy(60))
        next(first), next(second)
        clear = SharedRows.clear_slot
        with monkeypatch.context() as patch:
            patch.setattr(SharedRows, "clear_slot", lambda *_: (_ for _ in ()).throw(RuntimeError("planted failure")))
            patch.setattr(SharedRows, "recover", lambda self: patch.setattr(SharedRows, "clear_slot", clear))
            first.close()
        last = list(second)[-1]
        assert last.finish_reason == "error"
        assert "planted failure" in last.error


def test_a_closed_engine_serves_nothing(tiny):
    """Its launches would be fenced by nothing, so they are refused."""
    llm = LLM(str(tiny), **SETTINGS)
    llm.generate([prompt_of(9, 1)], greedy(3))
    stream = llm.stream(prompt_of(9, 1), greedy(3))
    llm.close()
    llm.close()
    with pytest.raises(EngineDead, match="closed"):
        llm.generate([prompt_of(9, 1)], greedy(3))
    with pytest.raises(EngineDead, match="closed"):
        next(stream)


def test_a_program_refuses_the_writes_of_a_closed_channel(tiny):
    engine = make_engine(tiny)
    rows, step_runner = engine.parts.rows, engine.parts.worker.step_runner
    add(engine, prompt_of(9, 1), greedy(3))
    batch = engine.scheduler.plan()
    engine.parts.worker.model_runner.channel.close()
    launch = step_runner.execute(batch, rows.publish(), wants_logprobs=False)
    with pytest.raises(jax.errors.JaxRuntimeError, match="engine that is closed"):
        launch.collect()


def test_closing_after_a_failed_launch_closes(tiny, hold):
    engine = make_engine(tiny, fence_timeout_s=0.3)
    add(engine, prompt_of(9, 1), greedy(3))
    hold.delay("stream.before_copy", 800_000)
    engine.scheduler.launch(engine.scheduler.plan())  # fails once its row writes are late, and nobody collects it
    engine.close()
    engine.close()


@pytest.mark.parametrize("marker", [True, False], ids=["marker", "no marker"])
def test_row_writes_that_are_given_up_fail_the_step(tiny, oracle, hold, marker):
    """Without the marker the host waits for the writes; wrong tokens would come out if it went on without them."""
    engine = make_engine(
        tiny, attention_backend="xla", shared_read_marker=marker, fence_timeout_s=0.4, hold_points=True
    )
    prompts = [prompt_of(9, i) for i in range(3)]
    check_alive(engine, oracle)  # compiled before the clock runs
    for point in ("snapshot.before_reads", "copy.before_reads"):
        hold.delay(point, 900_000)
    collected = Collected()
    ids = [add(engine, prompt, greedy(10)) for prompt in prompts]
    run(engine, collected)
    for request_id, prompt in zip(ids, prompts, strict=True):
        output = collected[request_id]
        assert output.token_ids == oracle(prompt, 10)[: len(output.token_ids)]
        assert output.finish_reason == "error" or len(output.token_ids) == 10
    assert any(collected[i].finish_reason == "error" for i in ids)
    hold.clear()
    check_alive(engine, oracle)
    engine.close()


def test_a_stream_of_row_writes_goes_without_the_interpreter_lock(hold):
    """What is queued may need a Python thread to get on; joining with the lock held would stop the whole process."""
    native = native_module("cpu")
    stream, ring = native.Stream(2, 64, 20.0), native.EventRing("ring", 2)
    stream.wait(ring, ring.reserve())
    threading.Timer(0.2, ring.record, [1]).start()
    start = time.monotonic()
    del stream
    assert time.monotonic() - start < 10


def test_a_failure_while_finishing_costs_no_token_of_the_others(tiny, oracle, monkeypatch):
    """Two sequences in one launch: one ends and its row cannot be cleared, the other waits, preempted meanwhile."""
    prompts = [prompt_of(10, 1), prompt_of(9, 2)]
    expected = [oracle(prompt, 20) for prompt in prompts]
    reached = False
    for position in range(2, 16):
        stop = expected[0][position]
        if stop in expected[0][:position]:
            continue
        engine, collected = make_engine(tiny, num_pages=9), Collected()
        ids = [add(engine, prompts[0], greedy(20, stop_token_ids=(stop,))), add(engine, prompts[1], greedy(20))]
        finish = Scheduler.finish

        def failing(self, sequence, reason, ids=ids, finish=finish):
            nonlocal reached
            if sequence.request.request_id == ids[0] and any(s.request.request_id == ids[1] for s in self.waiting):
                monkeypatch.setattr(Scheduler, "finish", finish)
                finish(self, sequence, reason)
                reached = True
                raise RuntimeError("planted failure")
            return finish(self, sequence, reason)

        monkeypatch.setattr(Scheduler, "finish", failing)
        run(engine, collected)
        monkeypatch.setattr(Scheduler, "finish", finish)
        other = collected[ids[1]]
        assert other.token_ids == expected[1][: len(other.token_ids)]
        assert other.finish_reason == "error" or len(other.token_ids) == 20
        engine.close()
        if reached:
            break
    assert reached, "no position made the second sequence wait when the first one ended"

"""A step that fails takes down its own requests and nothing else."""

from __future__ import annotations

import threading

import pytest
from rig import Collected, add, check_alive, generate, greedy, make_engine, prompt_of, run

from jaxserve.barrier.native import native_module
from jaxserve.core.errors import JaxserveError
from jaxserve.runner.launch import Launch
from jaxserve.runner.step_runner import StepRunner


@pytest.fixture(params=[False, True], ids=["overlap", "no overlap"])
def engine(request, engines, tiny):
    return engines(tiny, disable_overlap_schedule=True) if request.param else engines(tiny)


@pytest.fixture(scope="module")
def small(tiny):
    """Few pages, so that a failure falls into growth and preemption."""
    built = make_engine(tiny, num_pages=12)
    yield built
    built.close()


def start_two_and_queue_four(engine) -> tuple[Collected, list[str], list[list[int]]]:
    """Two requests decode, one prefills in chunks, three wait."""
    collected = Collected()
    prompts = [prompt_of(9, 1), prompt_of(14, 2), prompt_of(60, 3), prompt_of(5, 4), prompt_of(33, 5), prompt_of(7, 6)]
    ids = [add(engine, prompt, greedy(20)) for prompt in prompts[:2]]
    while any(s.num_output < 3 for s in (*engine.scheduler.running, *engine.scheduler.waiting)):
        collected.take(engine.step())
    ids += [add(engine, prompt, greedy(20)) for prompt in prompts[2:]]
    collected.take(engine.step())
    return collected, ids, prompts


def fail_once(monkeypatch, owner, name: str) -> list[int]:
    """Makes a method raise the next time it is called; returns a list that grows when it has."""
    real, raised = getattr(owner, name), []

    def broken(self, *arguments):
        if not raised:
            raised.append(1)
            raise RuntimeError("planted failure")
        return real(self, *arguments)

    monkeypatch.setattr(owner, name, broken)
    return raised


@pytest.mark.parametrize(
    ("owner", "name"), [(StepRunner, "execute"), (Launch, "collect")], ids=["at launch", "at collection"]
)
def test_requests_in_flight_fail_and_the_waiting_are_served(engine, oracle, monkeypatch, owner, name):
    collected, ids, prompts = start_two_and_queue_four(engine)
    raised = fail_once(monkeypatch, owner, name)
    run(engine, collected)  # step() never raises, and PAGES hold
    assert raised
    failed = [i for i in ids if collected[i].finish_reason == "error"]
    served = [i for i in ids if collected[i].finish_reason == "length"]
    assert set(ids[:2]) <= set(failed) and set(ids[4:]) <= set(served) and len(failed) + len(served) == 6
    for request_id, prompt in zip(ids, prompts, strict=True):
        right = oracle(prompt, 20)
        output = collected[request_id]
        if request_id in failed:
            assert "planted failure" in output.error
            assert output.token_ids == right[: len(output.token_ids)]
        else:
            assert output.token_ids == right
    check_alive(engine, oracle)


def test_failing_again_and_again_loses_nothing(engine, oracle, monkeypatch):
    """A failure at every eleventh collection, wherever that falls."""
    real, calls = Launch.collect, []

    def broken(self):
        calls.append(1)
        if len(calls) % 11 == 5:
            raise RuntimeError("planted failure")
        return real(self)

    monkeypatch.setattr(Launch, "collect", broken)
    prompts = [prompt_of(3 + 5 * i, i) for i in range(12)]
    ids = [add(engine, prompt, greedy(4)) for prompt in prompts]
    collected = run(engine, each_step=lambda step: engine.scheduler.check_integrity())
    reasons = [collected[i].finish_reason for i in ids]
    assert set(reasons) == {"error", "length"}
    for request_id, prompt, reason in zip(ids, prompts, reasons, strict=True):
        if reason == "length":
            assert collected.ids(request_id) == oracle(prompt, 4)
    monkeypatch.undo()
    check_alive(engine, oracle)


class FailingStream:
    """A schedule stream whose n-th write raises."""

    def __init__(self, real, fail_at: int):
        self._real, self._fail_at, self.writes = real, fail_at, 0

    def __getattr__(self, name):
        return getattr(self._real, name)

    def write_rows(self, *arguments):
        self.writes += 1
        if self.writes == self._fail_at:
            raise RuntimeError("planted write failure")
        self._real.write_rows(*arguments)


def test_a_failed_row_write_loses_no_page_or_slot(small, oracle, monkeypatch):
    """Writes that fail in admission, growth, preemption and release, one after the other."""
    rows = small.scheduler.rows
    prompts = [prompt_of(6, seed) for seed in range(3)]
    rights = [oracle(prompt, 18) for prompt in prompts]
    for fail_at in range(1, 60, 3):
        ids = [add(small, prompt, greedy(18)) for prompt in prompts]
        stream = FailingStream(rows.stream, fail_at)
        with monkeypatch.context() as patch:
            patch.setattr(rows, "stream", stream)
            collected = run(small, each_step=lambda step: small.scheduler.check_integrity())
        assert stream.writes >= fail_at
        assert any(collected[i].finish_reason == "error" for i in ids) or fail_at > 40
        for request_id, right in zip(ids, rights, strict=True):
            output = collected[request_id]
            assert output.finish_reason in ("length", "error")
            assert output.token_ids == (right if output.error is None else right[: len(output.token_ids)])
    check_alive(small, oracle)


def test_a_failed_row_write_in_a_preemption(small, oracle, monkeypatch):
    """The preempted sequence is in no list for a moment; it must be in one when its rows are cleared."""
    scheduler = small.scheduler
    real = scheduler.residency.preempt
    failed = []

    def preempt(sequence):
        if failed:
            return real(sequence)
        with monkeypatch.context() as patch:
            patch.setattr(scheduler.rows, "stream", FailingStream(scheduler.rows.stream, 1))
            failed.append(sequence.request.request_id)
            return real(sequence)

    monkeypatch.setattr(scheduler.residency, "preempt", preempt)
    prompts = [prompt_of(6, seed) for seed in range(3)]
    ids = [add(small, prompt, greedy(18)) for prompt in prompts]
    collected = run(small)
    assert failed
    for request_id, prompt in zip(ids, prompts, strict=True):
        output = collected[request_id]
        assert output.finish_reason in ("length", "error")
        right = oracle(prompt, 18)
        assert output.token_ids == (right if output.error is None else right[: len(output.token_ids)])


def test_a_failed_row_write_in_an_abort(small, oracle, monkeypatch):
    ids = [add(small, prompt_of(6, seed), greedy(10)) for seed in range(3)]
    collected = Collected()
    for _ in range(4):
        collected.take(small.step())
    with monkeypatch.context() as patch:
        patch.setattr(small.scheduler.rows, "stream", FailingStream(small.scheduler.rows.stream, 1))
        collected.take(small.abort(ids[0]))
    run(small, collected)
    assert collected[ids[0]].finish_reason == "abort"
    assert {collected[i].finish_reason for i in ids[1:]} == {"error"}
    check_alive(small, oracle)


# -- stalls ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def impatient(tiny):
    built = make_engine(tiny, fence_timeout_s=0.4, hold_points=True)
    generate(built, [(prompt_of(20), greedy(3))])  # compile before any clock runs
    yield built
    built.close()


@pytest.fixture
def gates():
    points = native_module("cpu").hold_points
    yield points
    points.clear()


@pytest.mark.parametrize("gate", ["snapshot.before_reads", "snapshot.before_record", "stream.before_copy"])
def test_a_stall_beyond_the_fence_timeout_fails_requests_and_heals(impatient, oracle, gates, gate):
    collected = Collected()
    prompts = [prompt_of(9, 1), prompt_of(14, 2), prompt_of(5, 3)]
    ids = [add(impatient, prompt, greedy(30)) for prompt in prompts]
    while any(s.num_output < 2 for s in (*impatient.scheduler.running, *impatient.scheduler.waiting)):
        collected.take(impatient.step())
    gates.close(gate)
    threading.Timer(1.5, gates.open, [gate]).start()
    run(impatient, collected)
    assert {collected[i].finish_reason for i in ids} == {"error"}
    for request_id, prompt in zip(ids, prompts, strict=True):
        output = collected[request_id]
        assert "was not recorded within 0.4" in output.error
        assert output.token_ids == oracle(prompt, 30)[: len(output.token_ids)]
    assert not impatient.scheduler.rows.stream.error
    for _ in range(3):
        check_alive(impatient, oracle)


def test_a_stall_after_the_last_request_harms_no_later_one(impatient, oracle):
    """The writes that clear the last request's rows time out when nobody is left to be told."""
    stream = impatient.scheduler.rows.stream
    ring = impatient.parts.worker.model_runner.channel.read_done
    generation = ring.reserve()
    stream.wait(ring, generation)  # nobody will record it
    with pytest.raises(RuntimeError, match="was not recorded"):
        stream.sync()
    ring.abandon(generation)
    check_alive(impatient, oracle)


def test_a_failing_warm_up_is_no_ready_engine(tiny, monkeypatch):
    monkeypatch.setattr(Launch, "collect", lambda self: (_ for _ in ()).throw(RuntimeError("planted failure")))
    with pytest.raises(JaxserveError, match="warm-up step failed: RuntimeError: planted failure"):
        make_engine(tiny, skip_warmup=False, num_pages=16)

"""Every operation of a run is made to fail, one at a time: nothing leaks, hangs or passes silently.

Kinds of operations and where they are: ``csrc/common/faults.h``. A dry run counts them. By default a few of the many
are tried, the first and the last included; JAXSERVE_TEST_FULL=1 tries every one.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from harness import SETTINGS
from oracle import greedy_full_recompute

from jaxserve.barrier.native import native_module
from jaxserve.barrier.shared_rows import MIN_STAGING_BLOCKS
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import JaxserveError
from jaxserve.core.request import CompletionOutput, Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.weights import load_model
from jaxserve.runner.step_runner import StepRunner

KINDS = ("allocate", "reserve", "record", "wait", "copy", "launch", "dispatched", "collect")
FULL = os.environ.get("JAXSERVE_TEST_FULL", "0") == "1"
ALL_UP_TO = 8  # so many of a kind are all tried; of more than that, so many spread evenly
FENCE_TIMEOUT_S = 10.0
LIMIT_S = FENCE_TIMEOUT_S / 2  # for a run with a fault: nobody may have to wait for a timeout to get on

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "native": {},
    "planned": {"attention_backend": "planned"},
    "xla-live, no marker": {"attention_backend": "xla-live", "shared_read_marker": False},
    "native, no overlap": {"disable_overlap_schedule": True},
}
MORE_CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "native, coarse": {"force_coarse_war_barrier": True},
    "planned, coarse": {"attention_backend": "planned", "force_coarse_war_barrier": True},
    "planned, no marker": {"attention_backend": "planned", "shared_read_marker": False},
    "xla-live": {"attention_backend": "xla-live"},
}
native = native_module("cpu")


def workload() -> list[tuple[list[int], int]]:
    """(prompt ids, max_tokens): more than fit, of more pages than there are, so one waits and one is preempted."""
    random = np.random.default_rng(11)
    return [([int(t) for t in random.integers(0, 250, p)], n) for p, n in [(21, 5), (6, 7), (3, 4), (4, 2)]]


def make_engine(model, **overrides: Any) -> Engine:
    few = {"max_running_requests": 2, "decode_batch_buckets": (2,), "num_pages": 9, "hold_points": False}
    return Engine(
        EngineConfig(model=str(model), **{**SETTINGS, **few, "fence_timeout_s": FENCE_TIMEOUT_S, **overrides})
    )


@pytest.fixture(scope="module")
def right(tiny_model) -> list[list[int]]:
    loaded = load_model(open_checkpoint(tiny_model), jnp.float32)
    return [greedy_full_recompute(loaded, prompt, output) for prompt, output in workload()]


@pytest.fixture(autouse=True)
def no_faults_left() -> Iterator[None]:
    yield
    native.faults.clear()


def run(engine: Engine) -> list[CompletionOutput]:
    """Outputs of the workload, whatever becomes of them."""
    outputs = {}
    for i, (prompt, count) in enumerate(workload()):
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        engine.add(Request(f"r{i}", tuple(prompt), params))
        outputs[f"r{i}"] = CompletionOutput(0, logprobs=[])
    deadline = time.monotonic() + 6 * FENCE_TIMEOUT_S
    while engine.has_work:
        assert time.monotonic() < deadline, "the engine does not come to rest"
        for delta in engine.step():
            assert outputs[delta.request_id].finish_reason is None, f"{delta} came after the output had ended"
            outputs[delta.request_id].append(delta)
    return list(outputs.values())


def check_rest(engine: Engine, live: dict[str, int]) -> None:
    """Nothing is owed, awaited, held or leaked."""
    engine.scheduler.check_integrity()
    assert engine.scheduler.memory.num_available == engine.scheduler.pool.num_usable
    assert not engine.scheduler.rows.mirror("block_tables").any(), "a stale row names a page"
    rows, channel = engine.parts.rows, engine.parts.worker.model_runner.channel
    rows.stream.sync()
    rings = (rows.write_done, channel.read_done, channel.step_done)
    deadline = time.monotonic() + 1.0
    while any(ring.num_owed for ring in rings) and time.monotonic() < deadline:
        time.sleep(0.001)  # a program dispatched by a call that failed may still be running
    assert {r.name: (r.num_owed, r.num_waiters) for r in rings if r.num_owed or r.num_waiters} == {}
    assert rows.stream.stats()["num_staging_in_use"] == 0
    assert native.live_objects() == live


def check_outputs(outputs: list[CompletionOutput], right: list[list[int]]) -> list[str]:
    """Right tokens, as far as they go. Returns the errors."""
    errors = []
    for output, tokens in zip(outputs, right, strict=True):
        if output.error is None:
            assert output.token_ids == tokens
        else:
            assert output.token_ids == tokens[: len(output.token_ids)]
            errors.append(output.error)
    return errors


def chosen(count: int) -> list[int]:
    """Which of ``count`` operations fail."""
    if FULL or count <= ALL_UP_TO:
        return list(range(1, count + 1))
    return sorted({int(n) for n in np.linspace(1, count, ALL_UP_TO)})


@pytest.fixture(scope="module", params=[*CONFIGURATIONS, *(MORE_CONFIGURATIONS if FULL else [])], ids=str)
def engine(request, tiny_model, right):
    gc.collect()  # engines of other tests, before anybody counts
    built = make_engine(tiny_model, **{**CONFIGURATIONS, **MORE_CONFIGURATIONS}[request.param])
    assert not check_outputs(run(built), right)  # compiles
    yield built
    built.close()


def fail_one(engine: Engine, kind: str, n: int, right: list[list[int]], live: dict[str, int], log) -> None:
    log.clear()
    native.faults.fail_nth(kind, n)
    start = time.monotonic()
    errors = check_outputs(run(engine), right)
    took_s = time.monotonic() - start
    failed = native.faults.failures(kind)
    assert failed == 1 or native.faults.passes(kind) < n
    native.faults.clear()
    assert took_s < LIMIT_S, f"it took {took_s:.1f} s to get on"
    assert all("injected fault" in error for error in errors), errors
    assert not check_outputs(run(engine), right), "a later request fails"
    # A stream that failed behind the last request is told of when the next one starts it anew.
    assert failed == 0 or errors or "injected fault" in log.text, "the fault passed silently"
    check_rest(engine, live)


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_fails_is_told_and_harms_nobody_else(engine: Engine, kind: str, right, caplog):
    live = native.live_objects()
    native.faults.fail_nth(kind, 0)
    assert not check_outputs(run(engine), right)
    count = native.faults.passes(kind)
    native.faults.clear()
    check_rest(engine, live)
    assert count >= 10, f"only {count} operations of kind {kind}: the workload exercises nothing"
    caplog.set_level(logging.WARNING)
    wrong = []
    for n in chosen(count):
        try:
            fail_one(engine, kind, n, right, live, caplog)
        except (AssertionError, RuntimeError) as error:
            wrong.append(f"{kind} {n} of {count}: {type(error).__name__}: {error}")
            native.faults.clear()
    assert not wrong, "\n".join(wrong)


# -- construction ------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_log() -> Iterator[None]:
    """Keeps pytest from keeping log records, whose tracebacks hold an engine."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def live_objects() -> dict[str, int]:
    gc.collect()
    return native.live_objects()


@pytest.mark.parametrize("kind", ["allocate", "copy"])
def test_an_engine_that_cannot_be_made_says_why_and_leaves_nothing(tiny_model, kind: str):
    overrides = {"shared_read_marker": False}  # with the completion thread
    live, num_threads = live_objects(), threading.active_count()
    native.faults.fail_nth(kind, 0)
    built = make_engine(tiny_model, **overrides)
    built.parts.rows.stream.sync()
    count = native.faults.passes(kind)
    built.close()
    del built
    assert live_objects() == live
    assert count == 1 if kind == "copy" else count > MIN_STAGING_BLOCKS
    for n in [1] if kind == "copy" else chosen(count):
        native.faults.fail_nth(kind, n)
        if kind == "copy":  # the first row write fails on the stream, behind the constructor
            built = make_engine(tiny_model, **overrides)
            with pytest.raises(native.NativeError, match="injected fault: copy 1"):
                built.parts.rows.stream.sync()
            built.close()
            del built
        else:
            with pytest.raises(native.InjectedFault, match=rf"injected fault: {kind} {n}\b"):
                make_engine(tiny_model, **overrides)
        assert native.faults.failures(kind) == 1
        native.faults.clear()
        assert live_objects() == live, f"{kind} {n} of {count}"
        assert threading.active_count() == num_threads


@pytest.mark.parametrize("kind", ["launch", "collect", "record"])
def test_a_warm_up_that_fails_leaves_nothing(tiny_model, monkeypatch, no_log, kind: str):
    monkeypatch.setattr(StepRunner, "warm_up", lambda self, progress: None)  # compile what is run, no more
    live, num_threads = live_objects(), threading.active_count()
    native.faults.fail_nth(kind, 2)
    with pytest.raises(JaxserveError, match=rf"the warm-up step failed: .*injected fault: {kind} 2"):
        make_engine(tiny_model, skip_warmup=False)
    native.faults.clear()
    assert live_objects() == live
    assert threading.active_count() == num_threads


# -- faults that stay --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_that_stays_is_told_in_bounded_time(tiny_model, right, no_log, kind: str):
    """Recovery fails as well: every request ends with an error, or step() raises and the engine is dead."""
    live = live_objects()
    built = make_engine(tiny_model)
    assert not check_outputs(run(built), right)
    native.faults.fail_nth(kind, 9, times=10**9)
    start = time.monotonic()
    try:
        errors = check_outputs(run(built), right)
    except native.InjectedFault as error:
        errors = [str(error)]
    assert time.monotonic() - start < LIMIT_S
    assert errors and all("injected fault" in error for error in errors)
    native.faults.clear()
    built.close()
    del built
    assert live_objects() == live

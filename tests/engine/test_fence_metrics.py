"""Every metric of the barrier and of programs moves when what it counts happens, and only then."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from rig import generate, greedy, make_engine, prompt_of

from jaxserve.attention import registry
from jaxserve.attention.base import SharedReadEnds
from jaxserve.attention.xla import XlaBackend, XlaLiveBackend
from jaxserve.barrier.native import native_module
from jaxserve.core.forward_mode import ForwardMode
from jaxserve.runner.captured_steps import ReplayCounts
from jaxserve.runner.program_cache import RetraceError

STEPS = 6  # one prefill, then a token each


class Unaudited(XlaBackend):
    """Somebody's backend; its author declared nothing."""


class Live(XlaLiveBackend):
    """Reads live rows, and declares that they end at a marker."""

    name = "live"

    def shared_read_ends(self, forward_mode):
        return SharedReadEnds.IN_REPLAY


@pytest.fixture(autouse=True)
def backends(monkeypatch):
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    registry.register_attention_backend("unaudited", Unaudited)
    registry.register_attention_backend("live", Live)


def answered(tiny, **settings):
    """An engine that has served one request."""
    engine = make_engine(tiny, **settings)
    generate(engine, [(prompt_of(9), greedy(STEPS))])
    return engine


def values(engine, name, *labels):
    """Samples of a metric: label values -> number."""
    found = {}
    for family in engine.metrics.registry.collect():
        for sample in family.samples:
            if sample.name == f"jaxserve:{name}":
                found[tuple(sample.labels[label] for label in labels)] = sample.value
    return found


def fences(engine):
    return values(engine, "fences_total", "kind", "reason")


@pytest.mark.parametrize(
    ("settings", "decode", "prefill"),
    [
        ({}, ("fine", "marker"), ("coarse", "extend")),
        ({"attention_backend": "planned"}, ("fine", "pre_replay"), ("fine", "pre_replay")),
        ({"attention_backend": "xla-live"}, ("fine", "post_replay"), ("coarse", "extend")),
        ({"attention_backend": "unaudited"}, ("coarse", "unknown"), ("coarse", "extend")),
        ({"attention_backend": "xla", "shared_read_marker": False}, ("fine", "pre_replay"), ("coarse", "extend")),
        ({"attention_backend": "live", "shared_read_marker": False}, ("fine", "post_replay"),
         ("fine", "post_replay")),
        ({"force_coarse_war_barrier": True}, ("coarse", "forced"), ("coarse", "forced")),
        ({"disable_war_barrier": True, "allow_unsafe": True}, ("none", "disabled"), ("none", "disabled")),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)  # fmt: skip
def test_fences_are_counted_by_kind_and_reason(tiny, settings, decode, prefill):
    engine = answered(tiny, **settings)
    wanted = {prefill: 0, decode: 0}
    wanted[prefill] += 1
    wanted[decode] += STEPS - 1
    assert fences(engine) == wanted
    assert {mode: use["fence"] for mode, use in engine.fences_in_use().items()} == {
        "EXTEND": ":".join(prefill),
        "DECODE": ":".join(decode),
    }
    engine.close()


@pytest.mark.parametrize(("reason", "counted"), [("ngram", "ngram"), (None, "cleared")])
def test_a_worker_that_clears_the_mailbox_may_say_why(tiny, monkeypatch, reason, counted):
    engine = make_engine(tiny)
    worker = engine.parts.worker
    execute = worker.execute

    def cleared(batch, *arguments):
        launch = execute(batch, *arguments)
        if batch.mode is ForwardMode.DECODE:
            worker.model_runner.shared_read_done_event = None
        return dataclasses.replace(launch, coarse_reason=reason)

    monkeypatch.setattr(worker, "execute", cleared)
    generate(engine, [(prompt_of(9), greedy(STEPS))])
    prefill = "extend" if reason is None else reason
    assert fences(engine)["coarse", counted] == STEPS - (prefill == "extend")
    assert ("fine", "marker") not in fences(engine)
    engine.close()


def test_a_reason_does_not_make_a_fine_fence_coarse(tiny, monkeypatch):
    engine = make_engine(tiny)
    execute = engine.parts.worker.execute
    monkeypatch.setattr(
        engine.parts.worker, "execute", lambda *a: dataclasses.replace(execute(*a), coarse_reason="ngram")
    )
    generate(engine, [(prompt_of(9), greedy(STEPS))])
    assert fences(engine)["fine", "marker"] == STEPS - 1
    engine.close()


@pytest.mark.parametrize(("settings", "kind"), [({}, "fine"), ({"force_coarse_war_barrier": True}, "coarse")])
def test_waits_are_timed_by_kind(tiny, settings, kind):
    """The step is held in front of its end: only the coarse fence, and what stands behind it, takes that long."""
    engine = make_engine(tiny, hold_points=True, **settings)
    hold = native_module("cpu").hold_points
    generate(engine, [(prompt_of(9), greedy(2))])
    engine.metrics.reset()
    held_s = 0.02
    hold.delay("end.before_record", int(held_s * 1e6))
    try:
        generate(engine, [(prompt_of(9), greedy(STEPS))])
    finally:
        hold.clear()
    engine.parts.rows.stream.sync()
    held_up = values(engine, "row_writes_held_up_seconds_sum", "kind")
    counts = values(engine, "row_writes_held_up_seconds_count", "kind")
    waits = values(engine, "fence_wait_seconds_count", "kind")
    assert waits[kind,] >= STEPS - 1
    assert sum(counts.values()) == STEPS
    # The first decode step is planned behind the prefill's coarse fence, the others behind their own kind.
    behind = counts[kind,] - (kind == "coarse")
    assert behind >= STEPS - 2
    slow = values(engine, "row_writes_held_up_seconds_bucket", "kind", "le")
    quick = slow[kind, "0.008192"]
    assert (quick == counts[kind,]) if kind == "fine" else (quick <= 1 and held_up[kind,] > held_s)
    engine.close()


def test_buckets_hold_every_wait_once(tiny):
    engine = answered(tiny)
    engine.parts.rows.stream.sync()
    buckets = values(engine, "fence_wait_seconds_bucket", "kind", "le")
    counts = values(engine, "fence_wait_seconds_count", "kind")
    assert counts["coarse",] == 1 and counts["fine",] == STEPS - 1
    for (kind,), count in counts.items():
        rising = [value for (k, _), value in buckets.items() if k == kind]
        assert rising == sorted(rising) and rising[-1] == count


def test_demotions_are_counted_and_said_once(tiny, caplog):
    with caplog.at_level(logging.WARNING):
        engine = answered(tiny, attention_backend="xla", shared_read_marker=False)
        generate(engine, [(prompt_of(9), greedy(STEPS))])
    assert values(engine, "demotions_total", "from", "to", "backend") == {
        ("IN_REPLAY", "PRE_REPLAY", "xla"): 2 * (STEPS - 1)
    }
    (warning,) = [record.message for record in caplog.records if "declares IN_REPLAY" in record.message]
    assert "'xla'" in warning and "DECODE" in warning and "--no-shared-read-marker" in warning
    engine.close()


def test_reads_that_cannot_be_hoisted_are_demoted_to_the_end(tiny, caplog):
    with caplog.at_level(logging.WARNING):
        engine = answered(tiny, attention_backend="live", shared_read_marker=False)
    assert values(engine, "demotions_total", "from", "to", "backend") == {("IN_REPLAY", "POST_REPLAY", "live"): STEPS}
    warnings = [record.message for record in caplog.records if "declares IN_REPLAY" in record.message]
    assert len(warnings) == 2 and {"EXTEND", "DECODE"} == {w.split(" for ")[1].split(",")[0] for w in warnings}
    engine.close()


def test_a_backend_nobody_audited_is_named_once(tiny, caplog):
    with caplog.at_level(logging.WARNING):
        engine = answered(tiny, attention_backend="unaudited")
    (warning,) = [record.message for record in caplog.records if "not been audited" in record.message]
    assert "'unaudited'" in warning and "shared_read_ends()" in warning
    assert values(engine, "demotions_total", "from", "to", "backend") == {}
    engine.close()


def test_nothing_is_said_of_a_backend_that_gets_what_it_declares(tiny, caplog):
    with caplog.at_level(logging.WARNING):
        engine = answered(tiny)
    assert [record.message for record in caplog.records] == []
    engine.close()


def test_compiles_are_counted_with_their_seconds(tiny):
    engine = make_engine(tiny, skip_warmup=False, greedy_programs=False)
    compiled = values(engine, "programs_compiled_total", "kind")
    assert compiled == {("step",): 2, ("prep",): 0}  # warm-up's own count stays
    assert values(engine, "program_compile_seconds_total", "kind")["step",] > 0.001
    assert values(engine, "late_compiles_total", "kind") == {("step",): 0, ("prep",): 0}
    assert fences(engine) == {}  # its fences do not
    key = engine.parts.worker.step_runner.steps.keys()[-1]
    del engine.parts.worker.step_runner.steps._compiled[key]
    generate(engine, [(prompt_of(9), greedy(STEPS))])
    assert values(engine, "late_compiles_total", "kind") == {("step",): 1, ("prep",): 0}
    assert values(engine, "programs_compiled_total", "kind")["step",] == 3
    engine.close()


def test_captured_steps_are_counted_by_what_became_of_them(tiny):
    engine = answered(tiny)
    assert values(engine, "captured_steps_total", "outcome") == {}
    counts = ReplayCounts(uncaptured=3, captured=2, moved=1, replayed=40, nodes=21, capture_ns=5, arena_bytes=9)
    engine.parts.worker.model_runner.captured = SimpleNamespace(counts=lambda: counts, close=lambda: None)
    assert values(engine, "captured_steps_total", "outcome") == {("replayed",): 40, ("uncaptured",): 3, ("moved",): 1}
    engine.close()


def test_a_retrace_is_counted_and_names_the_argument(tiny, caplog):
    engine = answered(tiny)
    cache = engine.parts.worker.step_runner.steps
    key = cache.keys()[0]
    arguments = list(jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), cache._arguments(key)))
    arguments[2] = np.zeros(9, np.int32)
    assert values(engine, "retraces_total", "kind")["step",] == 0
    with caplog.at_level(logging.ERROR), pytest.raises(RetraceError):
        cache.call(key, *arguments)
    assert values(engine, "retraces_total", "kind") == {("step",): 1, ("prep",): 0}
    assert "relay.tokens int32[9], was int32[5]" in caplog.text
    engine.close()


def test_a_wait_for_a_staging_block_is_timed(tiny):
    engine = make_engine(tiny)
    assert values(engine, "staging_wait_seconds_total") == {(): 0}
    rows, hold = engine.parts.rows, native_module("cpu").hold_points
    hold.delay("stream.before_copy", 500)
    try:
        for i in range(100):  # more than there are blocks
            rows.set_lengths(np.array([0], np.int32), np.array([i], np.int32))
    finally:
        hold.clear()
    assert values(engine, "staging_wait_seconds_total")[()] > 0.001
    engine.close()


def test_graph_splits_are_absent_until_they_are_known(tiny, caplog):
    engine = make_engine(tiny)
    assert values(engine, "program_graph_splits", "program") == {}
    decode = engine.parts.worker.step_runner.program_keys()[0][-1]
    with caplog.at_level(logging.WARNING):
        engine.metrics.set_graph_splits({f"step {decode.label}": 2, "step decode[batch=99]": 1})
    assert values(engine, "program_graph_splits", "program") == {(f"step {decode.label}",): 2}
    assert "this engine has no step decode[batch=99]" in caplog.text
    engine.metrics.reset()
    assert values(engine, "program_graph_splits", "program") == {(f"step {decode.label}",): 2}
    engine.close()

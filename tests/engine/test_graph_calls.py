"""Calls are counted over decode steps alone, from what the profiler really wrote."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest
from rig import make_engine, prompt_of

from jaxserve.bench import compare
from jaxserve.bench.graph_calls import GRAPH_LAUNCHED, GRAPH_MADE, GRAPH_UPDATED, GraphCalls, count_graph_calls

NOTES = {GRAPH_MADE: 1, GRAPH_UPDATED: 2, GRAPH_LAUNCHED: 3, "cuGraphLaunch": 3, "cuLaunchKernelEx": 4, "cuMemcpy": 5}


@pytest.fixture
def noting(tiny):
    """An engine that notes in the profile, at each launch, what XLA and the driver would on a card."""
    engine = make_engine(tiny, disable_radix_cache=True)
    launch, planned = engine.scheduler.launch, []

    def noted(batch):
        planned.append(batch.mode)
        for name, count in NOTES.items():
            for number in range(count):
                with jax.profiler.TraceAnnotation(name, num_executions=number):
                    pass
        return launch(batch)

    engine.scheduler.launch = noted
    yield SimpleNamespace(engine=engine, planned=planned)
    engine.close()


def test_calls_of_the_profiled_steps_are_counted_and_no_others(noting):
    prompts = [prompt_of(8, seed) for seed in range(3)]
    found = count_graph_calls(noting.engine, prompts, 14, 6)
    assert found == GraphCalls(num_steps=6, made=6, updated=12, launched=18, driver_launches=42)
    assert len(noting.planned) > 6 + len(prompts)
    assert not noting.engine.has_work
    noting.engine.scheduler.check_integrity()


def test_every_profiled_step_decodes_all_prompts(noting, monkeypatch):
    seen, trace = [], jax.profiler.trace

    def begun(*arguments, **settings):
        seen.append(len(noting.planned))
        return trace(*arguments, **settings)

    monkeypatch.setattr(jax.profiler, "trace", begun)
    count_graph_calls(noting.engine, [prompt_of(8, seed) for seed in range(4)], 14, 5)
    [first] = seen
    assert {mode.name for mode in noting.planned[first : first + 5]} == {"DECODE"}


def test_a_driver_that_was_not_seen_is_not_reported_as_silent(noting, monkeypatch):
    comparison = compare.Comparison(models={"tiny": {}}, batches=(1,), max_tokens=12)
    assert compare._calls(comparison, noting.engine, [prompt_of(8)], "gpu").num_steps == 9
    monkeypatch.setattr("jaxserve.bench.graph_calls.DRIVER_LAUNCHES", ("cuLaunchNothing",))
    assert compare._calls(comparison, noting.engine, [prompt_of(8)], "gpu") is None


def test_too_few_tokens_are_refused(noting):
    with pytest.raises(ValueError, match="3 prompts and 6 steps need 11 tokens each, got 10"):
        count_graph_calls(noting.engine, [prompt_of(8)] * 3, 10, 6)
    assert not noting.engine.has_work

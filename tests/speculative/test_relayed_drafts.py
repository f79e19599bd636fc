"""Draft models on the device: they change the number of steps, never a token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from draft_oracle import ALGORITHMS, NUM_DRAFTS, SAMPLED, TREES, drafting
from harness import SETTINGS, STALL_US, change_sizes, make_engine, run, workload
from oracle import greedy_full_recompute

from jaxserve.barrier.native import native_module
from jaxserve.barrier.race_check import RaceError
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.runner import step_program
from jaxserve.runner.worker import DraftWorker
from jaxserve.testing import algorithm_conformance, examine_algorithm
from jaxserve.testing.poison import Poison

# Programs for several prompts take long to compile. Every algorithm has them in one configuration or more; others do
# without.
ALONE = {"max_prefill_tokens": 0}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "native": {},
    "native, page size 1, no overlap": {"page_size": 1, "disable_overlap_schedule": True} | ALONE,
    "native, few pages": {"num_pages": 24},
    "xla-live": {"attention_backend": "xla-live"} | ALONE,
    "planned": {"attention_backend": "planned"} | ALONE,
    "xla, no marker": {"attention_backend": "xla", "shared_read_marker": False} | ALONE,
}
CASES = [(algorithm, "native") for algorithm in ALGORITHMS if algorithm != "STANDALONE"]
CASES += [("EAGLE3", name) for name in CONFIGURATIONS if name not in ("native", "xla-live", "planned")]
CONFIGURATIONS["race check"] = {"race_check": True}
CONFIGURATIONS["changing sizes"] = {"speculative_adaptive": True}
CONFIGURATIONS["trees, changing sizes"] = TREES | ALONE | {"speculative_adaptive": True}
CASES += [("EAGLE", "trees, changing sizes"), ("EAGLE3", "race check"), ("DFLASH", "xla-live")]
CASES += [("STANDALONE", "changing sizes")]
STALLS = {"snapshot.before_reads": STALL_US // 2, "stream.before_copy": STALL_US // 4}


@pytest.fixture(scope="module")
def sampled_tokens(tiny_model: Path) -> list[list[int]]:
    """What plain decoding draws."""
    engine = make_engine(tiny_model)
    try:
        return run(engine, params=SAMPLED)
    finally:
        engine.close()


@pytest.fixture
def points() -> Iterator[Any]:
    """Hold points, let go afterwards."""
    found = native_module("cpu").hold_points
    yield found
    found.clear()


@pytest.mark.parametrize(("algorithm", "configuration"), CASES)
def test_tokens_are_those_of_plain_decoding(
    algorithm, configuration, tiny_model, heads, right_tokens, sampled_tokens, points, monkeypatch
):
    """Greedy and drawn, with every shared row overwritten as soon as the barrier allows it, and under stalls."""
    engine = drafting(tiny_model, heads, algorithm, **CONFIGURATIONS[configuration])
    poison = Poison(engine)
    if "changing" in configuration:
        change_sizes(monkeypatch, engine)
    try:
        assert run(engine, "greedy") == right_tokens
        engine.scheduler.speculation.reset_figures()
        for point, microseconds in STALLS.items():
            points.delay(point, microseconds)
        assert run(engine, "sampled", params=SAMPLED) == sampled_tokens
        figures = engine.scheduler.speculation.figures
        assert figures.num_accepted > 5, "nothing is known of what happens when a draft holds"
        assert figures.acceptance_rate < 1.0 or algorithm == "STANDALONE"
        assert poison.num_poisoned > 20
        if "few pages" in configuration:
            assert engine.scheduler.num_preemptions > 0
        engine.scheduler.check_integrity()
    finally:
        points.clear()
        engine.close()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_who_owns_the_event(algorithm, tiny_model, heads):
    """The draft model's program reads rows last, but DFLASH's reads none."""
    engine = drafting(tiny_model, heads, algorithm, decode_batch_buckets=(4,))
    worker = engine.parts.worker
    try:
        run(engine)
        owner = worker.model_runner if algorithm == "DFLASH" else worker.draft_runner.runner
        assert worker.last_shared_read_runner is owner
        counts = engine.scheduler.barrier.counts
        assert counts["fine", "marker"] > 10
        assert set(counts) == {("fine", "marker"), ("coarse", "extend")}
        read = [runner.reads_shared_rows for runner in worker.step_runners]
        assert read == [True, algorithm != "DFLASH"]
    finally:
        engine.close()


def test_the_target_does_not_own_the_event_of_a_draft_model(tiny_model, heads, monkeypatch):
    """The race check sees a fence that ends with the target's reads while the draft model's are still to come."""
    monkeypatch.setattr(DraftWorker, "last_shared_read_runner", property(lambda self: self.model_runner))
    engine = drafting(tiny_model, heads, "EAGLE3", race_check=True)
    try:
        with pytest.raises(RaceError, match=r"(?s)write .*\n  read .* execution \(draft, "):
            run(engine)
    finally:
        monkeypatch.undo()
        engine.close()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_it_conforms(algorithm, tiny_model, heads):
    own = {"speculative_draft_model_path": str(heads[algorithm]), "speculative_num_draft_tokens": NUM_DRAFTS + 1}
    report = algorithm_conformance(
        algorithm, page_sizes=(4,), settings=SETTINGS | {"greedy_programs": False, "model": str(tiny_model)} | own
    )
    assert report.num_drafted > 500 and report.num_accepted > 5


def test_the_suite_finds_drafts_that_are_believed(tiny_model, heads, monkeypatch):
    """Verification accepts whatever a head drafts: the suite must say that tokens differ."""
    algorithm = "EAGLE3"
    accept = step_program.accept
    monkeypatch.setattr(
        step_program, "accept", lambda tokens, parents, _: accept(tokens, parents, jnp.roll(tokens, -1, axis=1))
    )
    own = {"speculative_draft_model_path": str(heads[algorithm]), "speculative_num_draft_tokens": NUM_DRAFTS + 1}
    report = examine_algorithm(
        algorithm, page_sizes=(4,), settings=SETTINGS | {"greedy_programs": False, "model": str(tiny_model)} | own
    )
    assert any("greedy output differs from plain decoding" in text for text in report.violations)


@pytest.mark.parametrize("algorithm", ["STANDALONE", "EAGLE3"])
def test_trees_chains_and_plain_decoding_agree_for_200_tokens(algorithm, tiny_model, heads, target):
    """O-30. Of STANDALONE, which drafts with the target itself, whole paths hold; of a head single drafts."""
    prompts, length = [prompt for prompt, _ in workload()[1:4]], 200
    right = [greedy_full_recompute(target, prompt, length) for prompt in prompts]
    head = {algorithm: heads["sure" if algorithm == "EAGLE3" else algorithm]}
    for settings in ({"speculative_eagle_topk": 4, "speculative_num_steps": 3, "speculative_num_draft_tokens": 8}, {}):
        engine = drafting(tiny_model, head, algorithm, context_length=256, greedy_programs=True, **ALONE, **settings)
        try:
            for number, prompt in enumerate(prompts):
                params = SamplingParams(max_tokens=length, ignore_eos=True, temperature=0)
                engine.add(Request(str(number), tuple(prompt), params))
            tokens: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
            while engine.has_work:
                for delta in engine.step():
                    tokens[delta.request_id] += delta.token_ids
            assert list(tokens.values()) == right
            assert engine.scheduler.speculation.figures.num_accepted > (300 if algorithm == "STANDALONE" else 3)
        finally:
            engine.close()

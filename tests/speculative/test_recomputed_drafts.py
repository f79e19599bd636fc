"""What draft models draft, and the KV they leave, against a full recomputation and against an engine without cache."""

from __future__ import annotations

import numpy as np
import pytest
from draft_oracle import ALGORITHMS, NUM_DRAFTS, SAMPLED, TREES, Oracle, drafting, paths_of, recomputed_tree
from harness import change_sizes, workload

from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine


def compare_drafts(engine: Engine, oracle: Oracle, requests: list[tuple[list[int], int]]) -> tuple[int, list[int]]:
    """Runs requests together; every draft behind every step must be the recomputed one. Returns how many were compared,
    and how many tokens of each prompt were cached."""
    compared, cached = 0, [0] * len(requests)
    for number, (prompt, length) in enumerate(requests):
        params = SamplingParams(max_tokens=length, ignore_eos=True, **{**SAMPLED, "seed": number})
        engine.add(Request(str(number), tuple(prompt), params))
    while engine.has_work:
        for delta in engine.step():
            cached[int(delta.request_id)] = delta.cached_tokens or 0
        relay = np.asarray(engine.parts.worker.draft_runner.runner.relay)
        for sequence in engine.scheduler.running:
            if sequence.slot is None or sequence.prefilling or sequence.num_in_flight:
                continue
            there = sequence.num_drafts
            assert np.all(relay[sequence.slot, there:] == -1), "as many as the scheduler counts on"
            known = zip(relay[sequence.slot, :there], oracle.drafts(sequence), strict=False)
            for drafted, (token, margin) in known:
                if margin < 1e-3:
                    break  # rounding may decide, and all that follows depends on it
                assert drafted == token, f"behind {len(sequence.token_ids)} tokens"
                compared += 1
    return compared, cached


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_drafts_equal_a_full_recomputation(algorithm, tiny_model, heads, target, monkeypatch):
    """Behind prompts of one and of several chunks and behind every step, whether it verifies many drafts, few or none;
    several sequences at a time."""
    engine = drafting(tiny_model, heads, algorithm, disable_overlap_schedule=True, speculative_adaptive=True)
    chosen = change_sizes(monkeypatch, engine)
    try:
        compared, _ = compare_drafts(engine, Oracle(engine, target, algorithm), workload()[1:4])
        assert set(chosen) == {1, 2, NUM_DRAFTS + 1}
        assert compared > 12
        assert engine.scheduler.speculation.figures.num_accepted > 1
    finally:
        engine.close()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_drafts_behind_cached_pages_equal_a_full_recomputation(algorithm, tiny_model, heads, target):
    """The second round shares whole pages with the first, and goes on with another token right behind them: what a
    draft model knows of a page's last position may depend on that token."""
    engine = drafting(tiny_model, heads, algorithm, disable_overlap_schedule=True)
    oracle = Oracle(engine, target, algorithm)
    begin = workload()[1][0][:12]
    try:
        compare_drafts(engine, oracle, [([*begin, 7, 8], 2)])
        requests = [([*begin, token, token + 1], 4) for token in (7, 100)]
        compared, cached = compare_drafts(engine, oracle, requests)
        assert cached == ([12, 8] if algorithm.startswith("EAGLE") else [12, 12])
        assert compared > 3
        engine.scheduler.check_integrity()
    finally:
        engine.close()


def kv_behind(engine: Engine, begin: list[int], together: bool = False) -> tuple[int, dict[str, np.ndarray]]:
    """Cached tokens of a prompt that parts from an earlier one behind ``begin``; and of its positions, and some of its
    output, the KV in each pool, [position, layers, 2, heads, D]. The cache is empty afterwards.

    Args:
        together: both arrive at once, so it hits what the other computes meanwhile.
    """
    prompts = {"first": (*begin, 7, 8), "second": (*begin, 100, 9, 10)}
    for name, prompt in prompts.items():
        while engine.has_work and not together:
            engine.step()
        engine.add(Request(name, prompt, SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)))
    [sequence] = engine._requests["second"]
    while len(sequence.token_ids) < len(prompts["second"]) + 12:
        engine.step()
    worker, known = engine.parts.worker, np.arange(len(prompts["second"]) + 10)
    pages, offsets = np.array(sequence.page_ids)[known // 4], known % 4
    runners = {"target": worker.model_runner, "draft": worker.draft_runner.runner}
    kept = {name: np.asarray(runner.pool.data)[:, :, :, pages, offsets] for name, runner in runners.items()}
    while engine.has_work:
        engine.step()
    engine.flush_cache()
    return sequence.num_cached_tokens or 0, {name: np.moveaxis(kv, 3, 0) for name, kv in kept.items()}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_kv_is_that_of_an_engine_without_cache_and_with_one_pace(algorithm, tiny_model, heads, monkeypatch):
    """Position by position, in both pools: behind a hit, and behind steps that verify many drafts, few or none. With a
    lookahead too short the comparison finds the one position whose entry depends on the token behind its page."""
    begin, found = workload()[1][0][:12], {}
    needs_lookahead = algorithm.startswith("EAGLE")
    for off in (True, False):
        engine = drafting(tiny_model, heads, algorithm, disable_overlap_schedule=True, disable_radix_cache=off)
        try:
            found["no cache" if off else "cache"] = kv_behind(engine, begin)
            if not off:
                found["together"] = kv_behind(engine, begin, together=True)
            if needs_lookahead and not off:
                engine.scheduler.memory.cache.lookahead = 0
                found["no lookahead"] = kv_behind(engine, begin)
        finally:
            engine.close()
    engine = drafting(
        tiny_model, heads, algorithm, disable_overlap_schedule=True, disable_radix_cache=True, speculative_adaptive=True
    )
    chosen = change_sizes(monkeypatch, engine)
    try:
        found["changing sizes"] = kv_behind(engine, begin)
        assert set(chosen) == {1, 2, NUM_DRAFTS + 1}
    finally:
        engine.close()

    def wrong(way: str, pool: str) -> list[int]:
        pairs = zip(found[way][1][pool], found["no cache"][1][pool], strict=True)
        return [position for position, (kv, right) in enumerate(pairs) if not np.allclose(kv, right, rtol=0, atol=1e-4)]

    assert [cached for cached, _ in found.values()] == [0, *([8, 8, 12] if needs_lookahead else [12, 12]), 0]
    for way in ("cache", "together", "changing sizes"):
        assert wrong(way, "target") == wrong(way, "draft") == []
    if needs_lookahead:
        assert wrong("no lookahead", "target") == [] and wrong("no lookahead", "draft")[:1] == [11]


def test_trees_equal_a_full_recomputation(tiny_model, heads, target):
    topk, num_steps, count = 3, 3, 6
    sure = {"EAGLE3": heads["sure"]}
    engine = drafting(tiny_model, sure, "EAGLE3", disable_overlap_schedule=True, **TREES)
    oracle = Oracle(engine, target, "EAGLE3")
    shapes = set()
    try:
        for number, (prompt, _) in enumerate(workload()[1:3]):
            engine.add(
                Request(str(number), tuple(prompt), SamplingParams(max_tokens=4, ignore_eos=True, temperature=0))
            )
        while engine.has_work:
            engine.step()
            relay = np.asarray(engine.parts.worker.draft_runner.runner.relay)
            for sequence in engine.scheduler.running:
                if sequence.slot is None or sequence.prefilling or sequence.num_in_flight:
                    continue
                tokens, parents = np.split(relay[sequence.slot], 2)
                paths = paths_of(tokens, parents)
                assert set(paths) == recomputed_tree(oracle, sequence.token_ids, topk, num_steps, count)
                shapes.add(tuple(parents.tolist()))
        assert len(shapes) > 1, "trees follow the likelihoods"
    finally:
        engine.close()

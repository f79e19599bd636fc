"""Draft models on the device: they change the number of steps, never a token, and draft what they would draft alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import SETTINGS, STALL_US, change_sizes, make_engine, run, workload
from oracle import full_attention

from jaxserve.barrier.native import native_module
from jaxserve.barrier.race_check import RaceError
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.sequence import Sequence
from jaxserve.engine.engine import Engine
from jaxserve.models.draft import FINAL
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.draft import init_draft, save_draft
from jaxserve.models.loading.weights import LoadedModel, load_model
from jaxserve.runner.sampler import gumbel_noise
from jaxserve.runner.sampling_rows import SEED_HIGH, SEED_LOW, sampling_row
from jaxserve.runner.worker import DraftWorker
from jaxserve.testing import algorithm_conformance
from jaxserve.testing.poison import Poison

ALGORITHMS = ("STANDALONE", "EAGLE", "EAGLE3", "DFLASH")
SAMPLED = {"temperature": 2.0, "seed": 3}  # flat: drafts of random heads hold now and then
NUM_DRAFTS = 3
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "native": {},
    "native, page size 1, no overlap": {"page_size": 1, "disable_overlap_schedule": True},
    "native, few pages": {"num_pages": 24},
    "xla-live": {"attention_backend": "xla-live"},
    "planned": {"attention_backend": "planned"},
    "xla, no marker": {"attention_backend": "xla", "shared_read_marker": False},
}
CASES = [(algorithm, "native") for algorithm in ALGORITHMS if algorithm != "STANDALONE"]
CASES += [("EAGLE3", name) for name in CONFIGURATIONS if name not in ("native", "xla-live", "planned")]
CONFIGURATIONS["race check"] = {"race_check": True}
CONFIGURATIONS["trees"] = {"speculative_eagle_topk": 3, "speculative_num_steps": 3, "speculative_num_draft_tokens": 7}
CONFIGURATIONS["changing sizes"] = {"speculative_adaptive": True}
CONFIGURATIONS["trees, changing sizes"] = CONFIGURATIONS["trees"] | {"speculative_adaptive": True}
CASES += [("EAGLE", "trees, changing sizes"), ("EAGLE3", "race check"), ("DFLASH", "xla-live")]
CASES += [("STANDALONE", "changing sizes")]
PADDED = 64  # tokens the oracle computes at a time, so that it compiles once; those behind a sequence change nothing
STALLS = {"snapshot.before_reads": STALL_US // 2, "stream.before_copy": STALL_US // 4}


@pytest.fixture(scope="module")
def target(tiny_model: Path) -> LoadedModel:
    return load_model(open_checkpoint(tiny_model), jnp.float32)


@pytest.fixture(scope="module")
def heads(tiny_model: Path, target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A draft model for each algorithm. STANDALONE drafts with the target itself, and is nearly always right."""
    folder = tmp_path_factory.mktemp("heads")
    more: dict[str, dict[str, Any]] = {
        "EAGLE": {}, "EAGLE3": {"target_ids": list(range(0, 260, 2))}, "DFLASH": {"block_size": NUM_DRAFTS + 1},
    }  # fmt: skip
    for algorithm, settings in more.items():
        save_draft(folder / algorithm, init_draft(algorithm, target, jnp.float32, **settings))
    # Surer of itself than a random head is, so that its trees go deep.
    head = init_draft("EAGLE3", target, jnp.float32, **more["EAGLE3"])
    leaves = [30 * leaf if path == "lm_head" else leaf for path, leaf in zip(head.paths, head.leaves, strict=True)]
    save_draft(folder / "sure", dataclasses.replace(head, leaves=leaves))
    return {"STANDALONE": tiny_model, **{name: folder / name for name in (*more, "sure")}}


@pytest.fixture(scope="module")
def sampled_tokens(tiny_model: Path) -> list[list[int]]:
    """What plain decoding draws."""
    engine = make_engine(tiny_model)
    try:
        return run(engine, params=SAMPLED)
    finally:
        engine.close()


def drafting(tiny_model: Path, heads: dict[str, Path], algorithm: str, **settings: Any) -> Engine:
    drafts = {"speculative_algorithm": algorithm, "speculative_draft_model_path": str(heads[algorithm])}
    return make_engine(tiny_model, **{"speculative_adaptive": False, **drafts, **settings})


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
    report = algorithm_conformance(algorithm, page_sizes=(4,), settings=SETTINGS | {"model": str(tiny_model)} | own)
    assert report.num_drafted > 500 and report.num_accepted > 5


# -- drafts against a full recomputation ------------------------------------------------------------------------------


POSITIONS = np.arange(PADDED, dtype=np.int32)


def padded(token_ids: list[int]) -> np.ndarray:
    return np.pad(np.array(token_ids, np.int32), (0, PADDED - len(token_ids)))


class Oracle:
    """Drafts behind a sequence, computed without cache, batch or block table.

    Args:
        engine: whose draft model it is.
    """

    def __init__(self, engine: Engine, target: LoadedModel, algorithm: str):
        self.target, self.algorithm = target, algorithm
        draft = engine.scheduler.speculation.algorithm.draft
        self.model: Any = draft.bind(draft.leaves)
        self._leaves = draft.leaves
        attend = full_attention(draft.config.attention_windows)

        @jax.jit
        def features_of(target_leaves: list[jax.Array], leaves: list[jax.Array], token_ids: np.ndarray) -> jax.Array:
            seen: dict[int, jax.Array] = {}
            attend = full_attention(target.config.attention_windows)
            seen[FINAL] = target.bind(target_leaves)(token_ids, POSITIONS, attend, seen.__setitem__)
            model: Any = draft.bind(leaves)
            return model.features(jnp.concatenate([seen[point] for point in model.feature_points], axis=1))

        @jax.jit
        def hidden_of(leaves: list[jax.Array], token_ids: np.ndarray, *features: jax.Array) -> jax.Array:
            return draft.bind(leaves)(token_ids, POSITIONS, *features, attend)

        @jax.jit
        def logits_of(leaves: list[jax.Array], hidden: jax.Array) -> jax.Array:
            return draft.bind(leaves).logits(hidden[None])[0]

        self._features_of, self._hidden_of, self._logits_of = features_of, hidden_of, logits_of

    def features(self, token_ids: list[int]) -> jax.Array:
        """What the draft model builds on, one row per position."""
        return self._features_of(self.target.leaves, self._leaves, padded(token_ids))

    def logits(self, hidden: jax.Array) -> np.ndarray:
        """float32[draft vocabulary]."""
        return np.asarray(self._logits_of(self._leaves, hidden))

    def target_ids(self) -> np.ndarray:
        """The target's id of each draft id."""
        ids = getattr(self.model, "target_ids", None)
        return np.arange(self.target.config.vocab_size) if ids is None else np.asarray(ids[...])

    def state_of(self, token_ids: list[int], path: tuple[int, ...]) -> jax.Array:
        """The draft model's state behind these tokens and drafts."""
        hidden_of = self._chain(token_ids)
        for length in range(len(path)):
            hidden_of(list(path[:length]))
        return hidden_of(list(path))

    def choose(self, hidden: jax.Array, sequence: Sequence, position: int) -> tuple[int, float]:
        """The draft for ``position``, and how far it is ahead of the next best."""
        vocab = self.target.config.vocab_size
        ids = self.target_ids()
        _, ints = sampling_row(sequence.request.params, sequence.seed, vocab)
        noise = gumbel_noise(*(jnp.int32(ints[place]) for place in (SEED_LOW, SEED_HIGH)), jnp.int32(position), vocab)
        scaled = self.logits(hidden) / SAMPLED["temperature"]
        scores = scaled + np.asarray(noise)[ids]
        second, first = np.argsort(scores)[-2:]
        return int(ids[first]), float(scores[first] - scores[second])

    def drafts(self, sequence: Sequence) -> list[tuple[int, float]]:
        """The newest token of the sequence has not been computed by the target."""
        token_ids = sequence.token_ids
        hidden_of = self._block(token_ids) if self.algorithm == "DFLASH" else self._chain(token_ids)
        drafts: list[tuple[int, float]] = []
        for place in range(NUM_DRAFTS):
            hidden = hidden_of([token for token, _ in drafts])
            drafts.append(self.choose(hidden, sequence, len(token_ids) + place))
        return drafts

    def _chain(self, token_ids: list[int]) -> Any:
        features = None if self.algorithm == "STANDALONE" else self.features(token_ids)

        def hidden_of(drafts: list[int]) -> jax.Array:
            nonlocal features
            tokens = [*token_ids, *drafts]
            if features is None:
                return self._hidden_of(self._leaves, padded(tokens))[len(tokens) - 1]
            last = len(tokens) - 2  # entry i takes the features at i and the token behind it
            hidden = self._hidden_of(self._leaves, padded(tokens[1:]), features)
            features = features.at[last + 1].set(hidden[last])
            return hidden[last]

        return hidden_of

    def _block(self, token_ids: list[int]) -> Any:
        known = len(token_ids) - 1
        context = self.model.context(self.features(token_ids), POSITIONS)
        seen = np.concatenate([known > POSITIONS, np.ones(NUM_DRAFTS + 1, bool)])

        def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: None = None) -> jax.Array:
            keys, values = (jnp.concatenate([old, new]) for old, new in zip(context[layer], (k, v), strict=True))
            keys, values = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (keys, values))
            scores = jnp.einsum("qhd,khd->hqk", q, keys) / np.sqrt(q.shape[2])
            weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
            return jnp.einsum("hqk,khd->qhd", weights, values)

        block = np.array([token_ids[-1]] + [self.model.mask_token_id] * NUM_DRAFTS, np.int32)
        hidden = self.model(block, np.arange(known, known + NUM_DRAFTS + 1, dtype=np.int32), attend)
        return lambda drafts: hidden[len(drafts) + 1]


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


def recomputed_tree(
    oracle: Oracle, token_ids: list[int], topk: int, num_steps: int, count: int
) -> set[tuple[int, ...]]:
    """The drafted paths: nodes by what leads to them."""
    scores: dict[tuple[int, ...], float] = {}
    beam: list[tuple[int, ...]] = [()]
    ids = oracle.target_ids()
    for _ in range(num_steps):
        children: dict[tuple[int, ...], float] = {}
        for path in beam:
            hidden = oracle.state_of(token_ids, path)
            likely = np.asarray(jax.nn.log_softmax(oracle.logits(hidden)))
            for place in np.argsort(-likely)[:topk]:
                children[*path, int(ids[place])] = scores.get(path, 0.0) + float(likely[place])
        scores |= children
        beam = sorted(children, key=lambda path: -children[path])[:topk]
    return set(sorted(scores, key=lambda path: -scores[path])[:count])


def paths_of(tokens: np.ndarray, parents: np.ndarray) -> list[tuple[int, ...]]:
    """What leads to each draft, itself included."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        assert parent < len(paths), "a parent stands before its children"
        paths.append((*paths[parent], token))
    return paths[1:]


def test_trees_equal_a_full_recomputation(tiny_model, heads, target):
    topk, num_steps, count = 3, 3, 6
    sure = {"EAGLE3": heads["sure"]}
    engine = drafting(tiny_model, sure, "EAGLE3", disable_overlap_schedule=True, **CONFIGURATIONS["trees"])
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

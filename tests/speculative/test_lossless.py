"""Speculation changes the number of steps, never a token: every backend and fence, under poison and stalls."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafters import Prophet, TreeProphet
from harness import STALL_US, make_engine, run
from oracle import full_attention, greedy_full_recompute

from jaxserve.barrier.native import native_module
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.weights import load_model
from jaxserve.speculative.base import Proposals
from jaxserve.speculative.registry import temporarily_registered
from jaxserve.testing.poison import Poison

CONFIGURATIONS = {
    "native": {},
    "native, page size 1": {"page_size": 1},
    "native, no overlap": {"disable_overlap_schedule": True},
    "native, forced coarse": {"force_coarse_war_barrier": True},
    "native, few pages": {"num_pages": 24},
    "xla, page size 16": {"attention_backend": "xla", "page_size": 16},
    "xla-live": {"attention_backend": "xla-live"},
    "planned": {"attention_backend": "planned"},
    "xla, no marker": {"attention_backend": "xla", "shared_read_marker": False},
    "upload": {"shared_updates": "upload"},
}
DRAFT_STALL = {
    "drafts.before_acceptance": STALL_US,
    "drafts.before_reads": STALL_US // 4,
    "snapshot.before_reads": STALL_US // 2,
}


# Where drafts are read depends on the source of the other rows; the rest is tried with one algorithm.
ROW_SOURCES = ("native", "planned", "xla, no marker")
CASES = [("LIVE-PROPHET", name) for name in CONFIGURATIONS]
CASES += [(algorithm, name) for algorithm in ("PROPHET", "TREE-PROPHET") for name in ROW_SOURCES]


@pytest.mark.parametrize(("algorithm", "configuration"), CASES)
def test_tokens_equal_the_oracle(algorithm, configuration, prophets, tiny_model, right_tokens):
    settings = CONFIGURATIONS[configuration]
    engine = make_engine(tiny_model, **settings, speculative_algorithm=algorithm, speculative_adaptive=False)
    poison = Poison(engine, Prophet.future_of) if "shared_updates" not in settings else None
    points = native_module("cpu").hold_points
    try:
        assert run(engine, "plain") == right_tokens
        for point, microseconds in DRAFT_STALL.items():
            points.delay(point, microseconds)
        assert run(engine, "stalled") == right_tokens
        figures = engine.scheduler.speculation.figures
        assert 0.2 < figures.acceptance_rate < 1.0
        assert figures.num_accepted > 40
        if poison is not None:
            assert poison.num_poisoned > 20
        if configuration == "native, few pages":
            assert engine.scheduler.num_preemptions > 0
    finally:
        points.clear()
        engine.close()


def test_fences_of_verify(prophets, tiny_model):
    for algorithm, fence in (("PROPHET", ("fine", "marker")), ("LIVE-PROPHET", ("coarse", "ngram"))):
        engine = make_engine(tiny_model, speculative_algorithm=algorithm, speculative_adaptive=False)
        try:
            run(engine)
            run(engine, "again")  # its requests decode together in few steps
            counts = engine.scheduler.barrier.counts
            assert counts[fence] > 10
            assert algorithm == "PROPHET" or counts["fine", "marker"] < counts[fence]
        finally:
            engine.close()


class Forks(TreeProphet):
    """Nodes 0 root, 1 a(0), 2 b(0), 3 c(2), 4 d(1), of which 2, 1 or 0 hold behind the root: one number per answer."""

    def propose(self, contexts, num_drafts):
        tokens, parents = np.zeros((2, len(contexts), num_drafts), np.int32)
        counts = np.zeros(len(contexts), np.int32)
        for row, context in enumerate(contexts):
            own = [answer[: len(context)] == context.tolist() for answer in self.answers].index(True)
            future = self.future_of(context.tolist())[:2]
            if num_drafts < 4 or len(future) < 2:
                continue
            (b, c), (a, d) = future, [(token + 1) % 250 for token in future]
            tokens[row, :4] = [[a, b, c, d], [a, b, d, c], [a, d, c, c]][own]
            parents[row, :4], counts[row] = [0, 0, 2, 1], 4
        return Proposals(tokens, parents, counts)


@pytest.fixture(scope="module")
def keys_and_values(tiny_model):
    """KV of every token, computed at once: token ids -> float32[layers, 2, KV heads, 64, D]."""
    loaded = load_model(open_checkpoint(tiny_model), jnp.float32)
    plain = full_attention(loaded.config.attention_windows)

    @jax.jit
    def compute(leaves, token_ids):
        found = []

        def attend(layer, q, k, v, sinks=None):
            found.append((k, v))
            return plain(layer, q, k, v, sinks)

        loaded.bind(leaves)(token_ids, jnp.arange(64), attend)
        return jnp.array(found).transpose(0, 1, 3, 2, 4)

    return lambda token_ids: np.asarray(compute(loaded.leaves, np.array(token_ids + [0] * (64 - len(token_ids)))))


FORKED = [list(b"two drafts hold"), list(b"a single draft holds"), list(b"no draft ever holds")]


@pytest.mark.parametrize(("page_size", "batch"), [(4, 3), (4, 1), (1, 3)])
def test_kv_of_accepted_nodes_ends_right_behind_the_root(page_size, batch, tiny_model, keys_and_values, monkeypatch):
    """O-30. The first sequence's path is nodes 0, 2, 3. Mask and positions: tests/runner/test_verify.py."""
    loaded = load_model(open_checkpoint(tiny_model), jnp.float32)
    answers = [prompt + greedy_full_recompute(loaded, prompt, 13) for prompt in FORKED[:batch]]
    right = [keys_and_values(answer) for answer in answers]
    monkeypatch.setattr(Prophet, "answers", answers)
    with temporarily_registered(Forks) as name:
        engine = make_engine(
            tiny_model, page_size=page_size, speculative_algorithm=name, speculative_adaptive=False,
            disable_overlap_schedule=True,
        )  # fmt: skip
    compared = 0
    try:
        for i, prompt in enumerate(FORKED[:batch]):
            engine.add(Request(str(i), tuple(prompt), SamplingParams(max_tokens=13, temperature=0.0, ignore_eos=True)))
        while engine.has_work:
            lengths = {s: len(s.token_ids) for s in engine.scheduler.running if not s.prefilling}
            drafted = {delta.request_id for delta in engine.step() if delta.speculation.num_drafted}
            pool = np.asarray(engine.parts.worker.model_runner.pool.data)
            for sequence in engine.scheduler.running:
                i, known = int(sequence.request.request_id), len(sequence.token_ids) - 1
                assert sequence.token_ids == answers[i][: known + 1]
                if sequence.prefilling:
                    continue
                if str(i) in drafted and sequence.max_total - known > 4:
                    assert known + 1 - lengths[sequence] == 3 - i
                places = np.array(sequence.page_ids)[np.arange(known) // page_size], np.arange(known) % page_size
                np.testing.assert_allclose(pool[:, :, :, *places], right[i][:, :, :, :known], atol=1e-5)
                compared += 1
    finally:
        engine.close()
    assert compared > 4 * batch - 2

"""Drafts drawn with the target's noise: the output's distribution, and how often such drafts hold (bug case O-31)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness import make_engine
from tiny import BYTE_VOCAB, write_markov

from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams

FIRST = 60  # the ids below stand for the case's tokens 1 .. 4
TARGET, DRAFT = np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.1, 0.2, 0.3, 0.4])
LIMIT = 18.4  # chi-square with 2 degrees of freedom, p = 1e-4


def model(folder: Path, probabilities: np.ndarray) -> Path:
    """Draws these tokens whatever came before."""
    logits = np.full(BYTE_VOCAB, -40.0, np.float32)
    with np.errstate(divide="ignore"):
        logits[FIRST : FIRST + 4] = np.maximum(np.log(probabilities), -40.0)
    return write_markov(folder, np.tile(logits, (BYTE_VOCAB, 1)), max_position_embeddings=2048)


def filtered(probabilities: np.ndarray, temperature: float, top_k: int) -> np.ndarray:
    powers = probabilities ** (1 / temperature)
    if top_k:
        powers[np.argsort(powers)[:-top_k]] = 0.0
    return powers / powers.sum()


def agreement(p: np.ndarray, q: np.ndarray) -> float:
    """How often argmax(log p + g) = argmax(log q + g) with the same Gumbel noise g.

    Token i wins both when its exponential clock, at rates p_i and q_i, comes before those of all others j:
    sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i).
    """
    both = [i for i in range(len(p)) if p[i] > 0 and q[i] > 0]
    return float(sum(1 / sum(max(p[j] / p[i], q[j] / q[i]) for j in range(len(p))) for i in both))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("drawn")
    return model(folder / "target", TARGET), model(folder / "draft", DRAFT)


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.7, 2)])
def test_the_distribution_and_the_acceptance(models, temperature, top_k):
    target, draft = models
    engine = make_engine(
        target, context_length=1024, speculative_algorithm="STANDALONE", speculative_draft_model_path=str(draft),
        speculative_num_steps=1, speculative_adaptive=False,
    )  # fmt: skip
    counts = np.zeros(BYTE_VOCAB, int)
    try:
        for seed in range(4):
            params = SamplingParams(
                max_tokens=1000, temperature=temperature, top_k=top_k, top_p=1.0, seed=seed, ignore_eos=True
            )
            engine.add(Request(f"r{seed}", (FIRST,), params))
        while engine.has_work:
            for delta in engine.step():
                assert delta.error is None
                np.add.at(counts, list(delta.token_ids), 1)
        figures = engine.scheduler.speculation.figures
    finally:
        engine.close()
    p, q = filtered(TARGET, temperature, top_k), filtered(DRAFT, temperature, top_k)
    assert counts.sum() == 4000
    drawn = counts[FIRST : FIRST + 4]
    assert drawn.sum() == 4000 and drawn[p == 0].sum() == 0
    expected = 4000 * p[p > 0]
    assert ((drawn[p > 0] - expected) ** 2 / expected).sum() < LIMIT
    rate, wanted = figures.acceptance_rate, agreement(p, q)
    assert abs(rate - wanted) < 4 * np.sqrt(max(wanted, 1e-3) * (1 - wanted) / figures.num_drafted)


def test_agreement_is_between_its_bounds():
    """The formula against the bounds of the paper, and equal distributions."""
    distance = 0.5 * np.abs(TARGET - DRAFT).sum()
    assert (1 - distance) / (1 + distance) <= agreement(TARGET, DRAFT) <= 1 - distance
    assert agreement(TARGET, TARGET) == pytest.approx(1.0)
    assert agreement(TARGET, DRAFT) == pytest.approx(0.42, abs=0.005)

"""The examples run, and their models and backends say what a plain full recompute says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import oracle
import own_backend
import own_model
import own_model_checkpoint
import pytest
import tiny

from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.weights import load_model

EXAMPLES = Path(__file__).parents[1] / "examples"
MARGIN = 1e-3  # between the two best logits of every step; rounding differs by less than a hundredth of it


def expected(folder: Path, text: str, max_tokens: int) -> list[int]:
    """Greedy tokens of the plain recompute, from a checkpoint whose choices are clear."""
    checkpoint = open_checkpoint(folder)
    loaded = load_model(checkpoint, jnp.float32)
    prompt = checkpoint.tokenizer.encode(text)
    tokens = oracle.greedy_full_recompute(loaded, prompt, max_tokens)
    assert oracle.smallest_margin(loaded, prompt, tokens) > MARGIN
    return tokens


def test_an_own_model_equals_a_full_recompute(tmp_path):
    folder = own_model_checkpoint.write_checkpoint(tmp_path)
    tokens = own_model.main(folder)
    assert len(set(tokens)) > 3  # one that repeats itself would hide a cache that isn't read
    assert tokens == expected(folder, "Once upon a time", len(tokens))


def test_the_own_model_example_runs_by_itself():
    done = subprocess.run([sys.executable, EXAMPLES / "own_model.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[")


@pytest.fixture(scope="module")
def backends(tmp_path_factory):
    folder = tiny.write_tiny(tmp_path_factory.mktemp("backend") / "tiny")
    return folder, own_backend.main(str(folder))


def test_an_own_backend_equals_a_full_recompute(backends):
    folder, results = backends
    wanted = expected(folder, "Once upon a time", 12)
    assert {name: tokens for name, (tokens, _) in results.items()} == {"plain": wanted, "plain-audited": wanted}


def test_a_backend_that_declares_nothing_gets_the_coarse_fence(backends):
    _, results = backends
    assert {kind for kind, _ in results["plain"][1]} == {"coarse"}


def test_a_backend_that_declares_its_read_end_gets_the_fine_fence(backends):
    _, results = backends
    assert set(results["plain-audited"][1]) == {("fine", "marker")}

"""The examples run, and their models and backends say what a plain full recompute says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import oracle
import own_algorithm
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


def test_an_own_algorithm_equals_a_full_recompute(backends, capsys):
    folder, _ = backends
    tokens = own_algorithm.main(str(folder))
    wanted = expected(folder, "one two three one two three one two", 24)
    assert tokens == {None: wanted, "prompt-lookup": wanted}
    assert "the same tokens" in capsys.readouterr().out


def test_prompt_lookup_drafts_what_followed():
    lookup = own_algorithm.PromptLookup(None)
    contexts = [np.array(c, np.int32) for c in ([1, 2, 3, 4, 1, 2, 5, 1, 2], [7], [7, 7], [1, 2, 3], [4, 4, 4])]
    tokens, _, counts = lookup.propose(contexts, 2)
    assert counts.tolist() == [2, 0, 0, 0, 1] and tokens[[0, 4]].tolist() == [[5, 1], [4, 0]]

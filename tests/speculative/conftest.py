"""The tiny model, what it must say, and algorithms that know it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "race"))

from drafters import registered
from harness import workload
from oracle import greedy_full_recompute
from tiny import write_tiny

from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.weights import load_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with TINY."""
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def right_tokens(tiny_model: Path) -> list[list[int]]:
    """What the plain full-recompute loop gives for the workload."""
    loaded = load_model(open_checkpoint(tiny_model), jnp.float32)
    return [greedy_full_recompute(loaded, prompt, output) for prompt, output in workload()]


@pytest.fixture(scope="module")
def prophets(right_tokens) -> Iterator[None]:
    """Algorithms that draft what is right, now and then."""
    with registered([prompt + output for (prompt, _), output in zip(workload(), right_tokens, strict=True)]):
        yield

"""Checkpoints of the engine's tests, once per session."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from oracle import greedy_full_recompute
from rig import make_engine
from tiny import write_tiny

from jaxserve.engine.engine import Engine
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.weights import load_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with TINY."""
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def oracle(tiny: Path) -> Callable[..., list[int]]:
    """``oracle(prompt_ids, max_tokens)``: what TINY says, by recomputing everything."""
    loaded = load_model(open_checkpoint(tiny), jnp.float32)
    known: dict[tuple[int, ...], list[int]] = {}

    def right(prompt: list[int], max_tokens: int) -> list[int]:
        key = tuple(prompt)
        if len(known.get(key, ())) < max_tokens:
            known[key] = greedy_full_recompute(loaded, prompt, max_tokens)
        return known[key][:max_tokens]

    return right


@pytest.fixture(scope="session")
def engines() -> Iterator[Callable[..., Engine]]:
    """``engines(model, **overrides)``: an engine, the same for the same arguments; closed at the end."""
    made: dict[Any, Engine] = {}

    def engine(model: Path, **overrides: Any) -> Engine:
        key = (model, tuple(sorted(overrides.items())))
        if key not in made:
            made[key] = make_engine(model, **overrides)
        return made[key]

    yield engine
    for each in made.values():
        each.close()

"""The tiny model, what it must say, and algorithms that know it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "race"))

from draft_oracle import NUM_DRAFTS
from drafters import registered
from harness import workload
from oracle import greedy_full_recompute
from tiny import write_tiny

from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.draft import init_draft, save_draft
from jaxserve.models.loading.weights import LoadedModel, load_model


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

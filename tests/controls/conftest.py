"""The tiny model, and requests that do things to logits, with what they must say."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))

from controls_oracle import continued
from drafters import registered
from requests_with_controls import Case, cases
from tiny import write_tiny

from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.weights import LoadedModel, load_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with TINY."""
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def loaded(tiny: Path) -> LoadedModel:
    """TINY's weights."""
    return load_model(open_checkpoint(tiny), jnp.float32)


@pytest.fixture(scope="session")
def wanted(loaded: LoadedModel) -> list[tuple[Case, list[int]]]:
    """Every case and its right output."""
    found = []
    for case in cases():
        output, margin = continued(loaded, case.prompt, case.params, case.constraint)
        assert margin > 1e-4, f"{case.name} is too close to call ({margin})"
        found.append((case, output))
    return found


@pytest.fixture(scope="module")
def prophets(wanted: list[tuple[Case, list[int]]]) -> Iterator[None]:
    """Algorithms that draft what is right, now and then."""
    with registered([[*case.prompt, *output] for case, output in wanted]):
        yield

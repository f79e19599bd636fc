"""Fixtures and markers shared by all tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# Test modules import the oracle and the tiny checkpoints by name, from whatever folder they lie in.
sys.path.insert(0, str(Path(__file__).parent))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "regenerate: recomputes expected values with transformers; needs torch")


@pytest.fixture(scope="session")
def default_model() -> Path:
    """Path of the default model; skips where it is neither cached nor downloadable."""
    from jaxserve.core.errors import ModelLoadError  # not before: -m regenerate runs without jax
    from jaxserve.models.loading.default_model import default_model_path

    try:
        return default_model_path()
    except ModelLoadError as error:
        pytest.skip(str(error))

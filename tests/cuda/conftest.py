"""Skips with a reason where the CUDA twin isn't built; nothing here needs a GPU."""

from __future__ import annotations

import importlib
import importlib.util

import pytest

from jaxserve.testing import deviceless


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "h100: compiles for an H100 without one; needs the CUDA 13 plugin of jax")


@pytest.fixture(scope="session")
def cuda_module():
    """The CUDA twin."""
    return importlib.import_module("jaxserve._cuda")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needs_module = [i for i in items if "cuda_module" in getattr(i, "fixturenames", ())]
    needs_plugin = [i for i in items if i.get_closest_marker("h100")]
    if needs_module and importlib.util.find_spec("jaxserve._cuda") is None:
        skip = pytest.mark.skip(
            reason="jaxserve._cuda isn't built: no CUDA toolkit was found (JAXSERVE_CUDA=1 says why)"
        )
        for item in needs_module:
            item.add_marker(skip)
    if needs_plugin and (reason := deviceless.why_not()):
        for item in needs_plugin:
            item.add_marker(pytest.mark.skip(reason=reason))

"""Fixtures and markers shared by all tests."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from pathlib import Path

import pytest

# Engines of equal shapes share compiled programs, which is most of the time they take: in one process, between the
# workers of a run, and with the commands and servers that tests start. Set here because jax reads it when it is
# imported, which other conftest files do. The folder is the run's own: nothing of an earlier one is found.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _programs = tempfile.TemporaryDirectory(prefix="jaxserve-programs-", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _programs.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"

# Tracing makes many objects that live as long as their program. Looking through all of them for garbage as often as
# Python does by default took 6 % of the processor time of some tests. Not much less often: engines that nobody holds
# any more have a hundred memory mappings for each program, and a process may have 65530 of them.
gc.set_threshold(20_000, 10, 10)

# Files that take half a minute or more, the longest first. Whole files go to workers: where a long one begins last, the
# others have nothing to do meanwhile.
LONGEST = (
    "reference_model/test_greedy_reference.py", "speculative/test_relayed_drafts.py",
    "speculative/test_recomputed_drafts.py", "attention/test_conformance.py", "speculative/test_check_lossless.py",
    "race/test_stalls.py", "race/test_race_check.py", "speculative/test_algorithm_conformance.py",
    "server/test_server_fuzz.py", "speculative/test_mtp_served.py", "speculative/test_figures.py",
    "controls/test_logit_controls.py", "engine/test_mimo_serving.py", "cuda/test_fake_device.py",
    "speculative/test_drawn_drafts.py", "runner/test_compiled_programs.py",
)  # fmt: skip

# Test modules import the oracle and the tiny checkpoints by name, from whatever folder they lie in.
sys.path.insert(0, str(Path(__file__).parent))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "regenerate: recomputes expected values with transformers; needs torch")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {Path(__file__).parent / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


@pytest.fixture(scope="session")
def default_model() -> Path:
    """Path of the default model; skips where it is neither cached nor downloadable."""
    from jaxserve.core.errors import ModelLoadError  # not before: -m regenerate runs without jax
    from jaxserve.models.loading.default_model import default_model_path

    try:
        return default_model_path()
    except ModelLoadError as error:
        pytest.skip(str(error))

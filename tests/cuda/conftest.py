"""Fixtures of the CUDA tests. Only those marked gpu need one; what can't run here skips with a reason."""

from __future__ import annotations

import importlib
import importlib.util
import shutil

import fake_build
import jax
import pytest

from jaxserve.testing import deviceless


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "h100: compiles for an H100 without one; needs the CUDA 13 plugin of jax")
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU and jax with its plugin")


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


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Not when tests are collected: looking starts jax, and the compiler for the H100 has to be set up before that.
    if item.get_closest_marker("gpu") and jax.default_backend() == "cpu":
        pytest.skip("jax finds no GPU")


@pytest.fixture(scope="session")
def loaded():
    """The twin built on the fake runtime, and the runtime's switches; its handlers are CPU targets fake_*."""
    home = deviceless.cuda_data_dir()
    if home is None or not (home / "include" / "cuda_runtime.h").is_file() or shutil.which("g++") is None:
        pytest.skip("needs g++ and the headers of a CUDA toolkit: put nvcc on PATH or set CUDA_HOME")
    module, switches = fake_build.load(fake_build.build(home / "include"))
    names = ["snapshot", "snapshot_graph", "record_end", "record_end_graph", "hold", "compute_stream"]
    for name in [*names, "paged_attention_bf16", "captured_step"]:
        capsule = jax.ffi.pycapsule(getattr(switches, f"fake_{name}"))
        jax.ffi.register_ffi_target(f"fake_{name}", capsule, platform="cpu")
    return module, switches


@pytest.fixture
def fake(loaded):
    """The twin built on the fake runtime, with nothing held and no current launch."""
    module, switches = loaded
    module.hold_points.clear()
    module.set_current_launch(bytes(64))
    yield module
    module.hold_points.clear()
    module.set_current_launch(bytes(64))
    switches.fake_sync_after_handlers(1)
    switches.fake_compute_sync()


@pytest.fixture
def switches(loaded, fake):
    """The fake runtime's switches."""
    return loaded[1]

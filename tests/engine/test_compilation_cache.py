"""Where compiled programs are kept, when engines of one process want different folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve.engine.assembly import enable_compilation_cache


@pytest.fixture(autouse=True)
def cache_of_the_run() -> Iterator[None]:
    yield
    enable_compilation_cache(None)


def compile_another(number: int) -> None:
    """A program that nobody has compiled before, and that takes long enough to be kept."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.jit(lambda x: x * 3.5 + number)(np.arange(7))


def num_programs(folder: Path) -> int:
    return sum(name.endswith("-cache") for name in os.listdir(folder)) if folder.exists() else 0


def test_each_engine_keeps_its_programs_in_its_own_folder(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for number, (folder, after) in enumerate([(first, (1, 0)), (second, (1, 1)), (first, (2, 1))]):
        enable_compilation_cache(str(folder))
        compile_another(number)
        assert (num_programs(first), num_programs(second)) == after


def test_no_folder_means_none(tmp_path):
    enable_compilation_cache(str(tmp_path / "kept"))
    compile_another(10)
    enable_compilation_cache("")
    compile_another(11)
    assert num_programs(tmp_path / "kept") == 1


def test_the_default_comes_back(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "default"))
    enable_compilation_cache(str(tmp_path / "own"))
    enable_compilation_cache(None)
    compile_another(20)
    assert num_programs(tmp_path / "default") == 1 and num_programs(tmp_path / "own") == 0

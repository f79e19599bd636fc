"""``jaxserve bench`` run once, for tests that look at what it wrote."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from jaxserve.cli.main import main

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
needs_matplotlib = pytest.mark.skipif(not HAS_MATPLOTLIB, reason="needs jaxserve[plot]")


def run_bench(folder: Path, *arguments: str) -> Path:
    """Runs a bench that writes found.json, found.md and, where it can be drawn, found.png; returns their folder."""
    command = ["bench", *arguments, "--json", str(folder / "found.json"), "--table", str(folder / "found.md")]
    if HAS_MATPLOTLIB:
        command += ["--plot", str(folder / "found.png")]
    assert main(command) == 0
    return folder

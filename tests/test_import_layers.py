"""The shape of the source: imports point down, files stay short, bindings alone know pybind11, nobody imports torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Lowest first. A package may import itself and those before it.
LAYERS = (
    "core", "barrier", "timeline", "text", "models", "attention", "runner", "speculative", "scheduler", "engine",
    "server", "cli",
)  # fmt: skip
# Ships to users beside the engine: may import every layer below the command line, and only the command line imports it.
FREE = ("testing", "bench", "training")
FREE_IMPORTS_BELOW = "cli"
MAX_LINES = 400
FORBIDDEN = ("torch",)


def imports_of(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import in ``source``, wherever it stands.

    Imports under ``if TYPE_CHECKING`` count too: an annotation is a dependency for whoever reads the file.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def layer_of(module: str) -> str | None:
    """The layer a dotted name belongs to; None outside the layers (other packages, ``jaxserve`` itself)."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "jaxserve" and parts[1] in (*LAYERS, *FREE) else None


def _height(layer: str) -> float:
    """Position of a layer; the free ones stand right below the command line."""
    return LAYERS.index(FREE_IMPORTS_BELOW) - 0.5 if layer in FREE else LAYERS.index(layer)


def upward_imports(source: str, module: str) -> list[str]:
    """Imports of ``module`` (dotted name of a file) that point to a higher layer."""
    own = layer_of(module)
    if own is None:
        return []
    found = []
    for line, target in imports_of(source, module.rpartition(".")[0]):
        layer = layer_of(target)
        if layer is not None and _height(layer) > _height(own):
            found.append(f"{module}:{line}: {own} imports {target}, which is above it")
    return found


def forbidden_imports(source: str, module: str) -> list[str]:
    """Imports of packages jaxserve must do without."""
    return [
        f"{module}:{line}: imports {target}"
        for line, target in imports_of(source, module.rpartition(".")[0])
        if target.split(".")[0] in FORBIDDEN
    ]


def includes_pybind11(source: str) -> bool:
    return re.search(r'^\s*#\s*include\s*[<"]pybind11/', source, re.MULTILINE) is not None


def python_files() -> list[Path]:
    return sorted((ROOT / "jaxserve").rglob("*.py"))


def native_files() -> list[Path]:
    return sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cc", ".cu", ".h", ".cuh"))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


# -- the repository ----------------------------------------------------------------------------------------------------


def test_imports_point_down():
    found = [line for path in python_files() for line in upward_imports(path.read_text("utf-8"), module_name(path))]
    assert found == []


def test_every_package_has_a_layer():
    packages = {path.parent.name for path in (ROOT / "jaxserve").glob("*/__init__.py")}
    assert packages <= {*LAYERS, *FREE}


def test_files_stay_short():
    lengths = {path: len(path.read_text("utf-8").splitlines()) for path in [*python_files(), *native_files()]}
    assert {str(path): lines for path, lines in lengths.items() if lines > MAX_LINES} == {}


def test_bindings_alone_include_pybind11():
    found = [path.relative_to(ROOT).as_posix() for path in native_files() if includes_pybind11(path.read_text("utf-8"))]
    assert found == ["csrc/cuda/decoder/bindings.cc", "csrc/cuda/decoder/bindings.h", "csrc/module.cc"]


def test_nothing_imports_torch():
    found = [line for path in python_files() for line in forbidden_imports(path.read_text("utf-8"), module_name(path))]
    assert found == []


# -- the checks themselves ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "from jaxserve.scheduler.scheduler import Scheduler",
        "import jaxserve.scheduler.scheduler",
        "from jaxserve import scheduler",
        "from ..scheduler import scheduler",
        "def late():\n    from jaxserve.scheduler.scheduler import Scheduler",
        "if TYPE_CHECKING:\n    from jaxserve.scheduler.scheduler import Scheduler",
        "from jaxserve.testing.hlo_text import parse",
    ],
)
def test_an_upward_import_is_found(source):
    assert len(upward_imports(source, "jaxserve.runner.planted")) == 1


@pytest.mark.parametrize(
    "source",
    [
        "from jaxserve.core.errors import ConfigError",
        "from jaxserve.runner.batch import StepBatch",
        "from .batch import StepBatch",
        "from ..core import errors",
        "import jax",
        "from jaxserve import LLM",
        "'from jaxserve.scheduler import scheduler'",
    ],
)
def test_a_downward_import_is_not(source):
    assert upward_imports(source, "jaxserve.runner.planted") == []


def test_only_the_command_line_imports_the_test_tools_and_they_do_not_import_it():
    source = "from jaxserve.testing.hlo_text import parse_module"
    assert upward_imports(source, "jaxserve.cli.planted") == []
    assert len(upward_imports(source, "jaxserve.server.planted")) == 1
    assert len(upward_imports("from jaxserve.cli.main import main", "jaxserve.testing.planted")) == 1
    assert upward_imports("from jaxserve.engine.engine import Engine", "jaxserve.testing.planted") == []


def test_the_line_of_an_upward_import_is_named():
    source = "import os\n\nfrom jaxserve.cli.main import main\n"
    assert upward_imports(source, "jaxserve.core.planted") == [
        "jaxserve.core.planted:3: core imports jaxserve.cli.main.main, which is above it"
    ]


@pytest.mark.parametrize(
    "source", ["import torch", "import torch.nn", "from torch import nn", "def f():\n    import torch"]
)
def test_an_import_of_torch_is_found(source):
    assert len(forbidden_imports(source, "jaxserve.models.planted")) == 1
    assert forbidden_imports("import torchless\nfrom .torch import x", "jaxserve.models.planted") == []


def test_an_include_of_pybind11_is_found():
    assert includes_pybind11("#pragma once\n#  include <pybind11/stl.h>\n")
    assert not includes_pybind11("// what pybind11 does\n#include <string>\n")

"""The tables of the fence bench in the documentation are those of the result they name."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULT = "docs/results/fence-cpu-2-cores.json"


@pytest.fixture(scope="module")
def docs():
    spec = importlib.util.spec_from_file_location("bench_docs", ROOT / "bench" / "docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["README.md", "docs/performance.md"])
def test_the_documentation_shows_the_result(docs, name):
    found = json.loads((ROOT / RESULT).read_text("utf-8"))
    text = (ROOT / name).read_text("utf-8")
    assert docs.replaced(text, docs.blocks(found, RESULT)[name]) == text, f"run: python bench/docs.py {RESULT}"
    assert docs.PICTURE.name in text and (ROOT / docs.PICTURE).is_file()


def test_text_outside_the_markers_stays(docs):
    text = "a\n<!-- fence bench: begin -->\nold\n<!-- fence bench: end -->\nb\n"
    assert docs.replaced(text, "new\n\n") == text.replace("old", "new")
    with pytest.raises(ValueError, match="once"):
        docs.replaced("a\nb\n", "new")
    with pytest.raises(ValueError, match="once"):
        docs.replaced(text + text, "new")

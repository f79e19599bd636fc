"""The tables of the benches in the documentation are those of the results they name."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = {
    "fence bench": ("docs/results/fence-cpu-2-cores.json", ("README.md", "docs/performance.md")),
    "speculation bench": (
        "docs/results/speculation-cpu-2-cores.json",
        ("README.md", "docs/speculative_decoding.md"),
    ),
}


@pytest.fixture(scope="module")
def docs():
    spec = importlib.util.spec_from_file_location("bench_docs", ROOT / "bench" / "docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", RESULTS)
def test_the_documentation_shows_the_result(docs, name):
    result, documents = RESULTS[name]
    found = json.loads((ROOT / result).read_text("utf-8"))
    assert docs.name_of(found) == name
    blocks = docs.blocks(found, result)
    assert tuple(blocks) == documents
    for document, block in blocks.items():
        text = (ROOT / document).read_text("utf-8")
        assert docs.replaced(text, block, name) == text, f"run: python bench/docs.py {result}"
    assert docs.PICTURES[name].name in text and (ROOT / docs.PICTURES[name]).is_file()


def test_text_outside_the_markers_stays(docs):
    text = "a\n<!-- fence bench: begin -->\nold\n<!-- fence bench: end -->\nb\n"
    assert docs.replaced(text, "new\n\n", "fence bench") == text.replace("old", "new")
    with pytest.raises(ValueError, match="once"):
        docs.replaced("a\nb\n", "new", "fence bench")
    with pytest.raises(ValueError, match="once"):
        docs.replaced(text + text, "new", "fence bench")
    with pytest.raises(ValueError, match="speculation bench"):
        docs.replaced(text, "new", "speculation bench")

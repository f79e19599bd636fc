"""Targets to train drafts for, and how the tests train them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "race"))

from walk import SMALL, write_llama, write_mimo, write_texts

from jaxserve.training.settings import TrainSettings
from jaxserve.training.train_draft import TextSource, train_draft

Train = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``model``: a Llama, ``mimo``: a MiMo-V2-Flash without MTP layers, ``text.jsonl``: what they would write."""
    path = tmp_path_factory.mktemp("walk")
    write_llama(path / "model")
    write_mimo(path / "mimo")
    write_texts(path / "text.jsonl")
    return path


@pytest.fixture(scope="session")
def train(folder: Path) -> Train:
    """``train(output, algorithm, until=None, model=None, data=None, **settings)``, small and for the model it suits."""

    def run(
        output: Path, algorithm: str = "EAGLE3", until: int | None = None, model: Path | None = None,
        data: Path | None = None, **settings: Any,
    ) -> dict[str, Any]:  # fmt: skip
        known = {} if algorithm == "MTP" else {"draft_vocab_size": 100}
        chosen = TrainSettings(algorithm, **{**SMALL, **known, **settings})
        model = folder / ("mimo" if algorithm == "MTP" else "model") if model is None else model
        source = TextSource((data or folder / "text.jsonl",))
        return train_draft(chosen, str(model), source, output, quiet=True, until=until)

    return run


@pytest.fixture(scope="session")
def trained(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """By algorithm, a whole training: its folder and its report."""
    done: dict[str, tuple[Path, dict[str, Any]]] = {}
    more: dict[str, dict[str, Any]] = {"MTP": {"num_layers": 2}}

    def of(algorithm: str) -> tuple[Path, dict[str, Any]]:
        if algorithm not in done:
            path = tmp_path_factory.mktemp(algorithm.lower())
            done[algorithm] = path, train(path, algorithm, **more.get(algorithm, {}))
        return done[algorithm]

    return of

"""Recomputes the committed expectations with transformers (``pytest -m regenerate``; needs torch)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

FIXTURES = Path(__file__).parent.parent / "fixtures"

pytestmark = [
    pytest.mark.regenerate,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")),
        reason="torch and transformers are not installed",
    ),
]


@pytest.mark.parametrize("name", ["gqa", "tied", "llama3_rope", "biases", "qwen3"])
def test_expected_logits_are_what_transformers_computes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FIXTURES))
    import make_checkpoints

    expected = np.load(FIXTURES / name / "expected.npz")
    assert list(expected["token_ids"]) == make_checkpoints.TOKEN_IDS
    found = make_checkpoints.expected_logits(FIXTURES / name)
    np.testing.assert_allclose(found, expected["logits"], atol=1e-5, rtol=0)


def test_expectations_of_mimo_are_what_transformers_and_plain_torch_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FIXTURES))
    import make_mimo

    expected = np.load(FIXTURES / "mimo" / "expected.npz")
    found = make_mimo.expected(FIXTURES / "mimo")
    assert set(found) == set(expected)
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], atol=1e-5, rtol=0, err_msg=name)

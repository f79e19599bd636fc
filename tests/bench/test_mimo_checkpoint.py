"""The model written for the bench of MTP layers: an engine loads it, and its text is neither one token nor any."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import mimo_checkpoint
import numpy as np
import pytest
from oracle import full_recompute_logits, greedy_full_recompute
from tiny import write_tiny

from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.weights import load_model


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = open_checkpoint(write_tiny(tmp_path_factory.mktemp("tiny")))
    return mimo_checkpoint.write_checkpoint(tmp_path_factory.mktemp("mimo"), source, hidden=256, num_layers=3)


def test_it_has_the_tokenizer_it_was_given(written: Path) -> None:
    checkpoint = open_checkpoint(written)
    assert checkpoint.tokenizer.encode("two bees") == [*b"two bees"]
    assert checkpoint.model_config.eos_token_ids == (257,) and checkpoint.chat_template
    assert checkpoint.model_config.attention_windows == (None, 128, 128)


def test_each_token_has_a_likely_successor_and_a_second_one(written: Path) -> None:
    loaded = load_model(open_checkpoint(written), jnp.float32)
    text = greedy_full_recompute(loaded, [*b"two bees"], 60)
    assert len(set(text)) > 20 and max(text) < 256  # control tokens are never written
    best = np.sort(full_recompute_logits(loaded, text)[8:], axis=1)[:, -3:]
    first, second, third = best[:, 2].mean(), best[:, 1].mean(), best[:, 0].mean()
    assert first > 6 and first - second < 2 and second - third > 1

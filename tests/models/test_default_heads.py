"""The heads that come with jaxserve: small enough to ship, and made for the default model."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.draft import default_draft_path, load_draft
from jaxserve.models.loading.weights import load_model

HEADS = ("EAGLE3",)
MOST_BYTES = 20_000_000


@pytest.mark.parametrize("algorithm", HEADS)
def test_a_head_is_small_enough_to_ship(algorithm: str) -> None:
    files = list(default_draft_path(algorithm).iterdir())
    assert {"config.json", "model.safetensors"} <= {file.name for file in files}
    assert sum(file.stat().st_size for file in files) < MOST_BYTES


@pytest.mark.parametrize("algorithm", HEADS)
def test_a_head_fits_the_default_model(algorithm: str, default_model: Path) -> None:
    checkpoint = open_checkpoint(default_model)
    target = load_model(checkpoint, jnp.float32)
    draft = load_draft(default_draft_path(algorithm), algorithm, target, jnp.float32)
    assert draft.leaf("embed_tokens") is target.leaf("embed_tokens")
    known = set(np.asarray(draft.leaf("target_ids")).tolist())
    assert set(target.config.eos_token_ids) <= known
    # Nearly every token of ordinary English is one the head can guess.
    ids = checkpoint.tokenizer.encode(
        "The capital of France is Paris. Here is a short list of the things you need:\n\n1. "
    )
    assert sum(i in known for i in ids) >= 0.9 * len(ids)

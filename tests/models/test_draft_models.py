"""Draft models against what torch and transformers give for the published formulas; see fixtures/make_drafts.py."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import full_attention

from jaxserve.models.draft import FINAL
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.draft import load_draft
from jaxserve.models.loading.weights import LoadedModel, load_model

FIXTURES = Path(__file__).parent.parent / "fixtures"


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return load_model(open_checkpoint(FIXTURES / "gqa"), jnp.float32)


def captured_states(target: LoadedModel, token_ids: np.ndarray, points: tuple[int, ...]) -> jax.Array:
    """The target's states a draft asks for: Float[T, points * hidden]."""
    seen: dict[int, jax.Array] = {}
    model = target.bind(target.leaves)
    positions = np.arange(len(token_ids), dtype=np.int32)
    seen[FINAL] = model(token_ids, positions, full_attention(target.config.attention_windows), seen.__setitem__)
    return jnp.concatenate([seen[point] for point in points], axis=1)


@pytest.mark.parametrize(
    ("name", "algorithm"), [("eagle", "EAGLE"), ("eagle3", "EAGLE3"), ("eagle3_speculators", "EAGLE3")]
)
def test_chain_equals_the_reference(target: LoadedModel, name: str, algorithm: str) -> None:
    expected = np.load(FIXTURES / "drafts" / name / "expected.npz")
    loaded = load_draft(FIXTURES / "drafts" / name, algorithm, target, jnp.float32)
    model = loaded.bind(loaded.leaves)
    token_ids = expected["token_ids"].astype(np.int32)
    num_rows = len(token_ids) - 1
    attend = full_attention(model.config.attention_windows)
    features = model.features(captured_states(target, token_ids, model.feature_points))[:num_rows]

    hidden = model(token_ids[1:], np.arange(num_rows, dtype=np.int32), features, attend)
    np.testing.assert_allclose(model.logits(hidden), expected["logits"], atol=2e-4, rtol=0)
    np.testing.assert_allclose(hidden, expected["hidden"], atol=2e-4, rtol=1e-5)

    longer = np.append(token_ids[1:], expected["guess"]).astype(np.int32)
    fed_back = jnp.concatenate([features, hidden[-1:]])
    behind = model(longer, np.arange(num_rows + 1, dtype=np.int32), fed_back, attend)
    np.testing.assert_allclose(model.logits(behind[-1:])[0], expected["next_logits"], atol=2e-4, rtol=0)


def test_block_equals_the_reference(target: LoadedModel) -> None:
    expected = np.load(FIXTURES / "drafts" / "dflash" / "expected.npz")
    loaded = load_draft(FIXTURES / "drafts" / "dflash", "DFLASH", target, jnp.float32)
    model = loaded.bind(loaded.leaves)
    assert (model.block_size, model.mask_token_id, model.window, model.feature_points) == (4, 259, None, (1, FINAL))
    token_ids = expected["token_ids"].astype(np.int32)
    positions = np.arange(len(token_ids), dtype=np.int32)
    pool = model.context(model.features(captured_states(target, token_ids, model.feature_points)), positions)

    for start, logits in zip(expected["starts"], expected["logits"], strict=True):

        def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, start: int = int(start)) -> jax.Array:
            keys, values = (jnp.concatenate([old[:start], new]) for old, new in zip(pool[layer], (k, v), strict=True))
            keys, values = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (keys, values))
            weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, keys) / np.sqrt(q.shape[2]), axis=-1)
            return jnp.einsum("hqk,khd->qhd", weights, values)

        block = np.array([token_ids[start], 259, 259, 259], np.int32)
        hidden = model(block, np.arange(start, start + 4, dtype=np.int32), attend)
        np.testing.assert_allclose(model.logits(hidden), logits, atol=2e-4, rtol=0)

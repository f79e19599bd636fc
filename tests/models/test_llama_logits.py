"""Logits of the Flax model against transformers, in float32."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracle import full_attention, full_recompute_logits, greedy_full_recompute, smallest_margin
from tiny import TINY_PROMPT, write_markov, write_tiny

from jaxserve.core.errors import ModelLoadError
from jaxserve.models.llama import LlamaForCausalLM
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.weights import LoadedModel, dummy_model, load_model
from jaxserve.models.registry import read_model_config

FIXTURES = Path(__file__).parent.parent / "fixtures"
REFERENCE = Path(__file__).parent.parent / "reference"


@pytest.mark.parametrize("name", ["gqa", "gqa.gguf", "tied", "llama3_rope", "biases", "qwen3"])
def test_logits_equal_transformers(name: str) -> None:
    expected = np.load(FIXTURES / name.removesuffix(".gguf") / "expected.npz")
    loaded = load_model(open_checkpoint(FIXTURES / name), jnp.float32)
    logits = full_recompute_logits(loaded, expected["token_ids"])
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def smollm2(default_model: Path) -> LoadedModel:
    return load_model(open_checkpoint(default_model), jnp.float32)


@pytest.mark.parametrize("name", ["01_chat_capital", "05_raw_code", "07_chat_unicode"])
def test_first_logits_of_smollm2(smollm2: LoadedModel, name: str) -> None:
    prompt_ids = json.loads((REFERENCE / f"{name}.json").read_text())["prompt_ids"]
    expected = np.load(REFERENCE / "first_logits.npz")[name]
    np.testing.assert_allclose(full_recompute_logits(smollm2, prompt_ids)[-1], expected, atol=2e-3, rtol=0)


def test_rows_of_several_sequences_do_not_mix() -> None:
    """Rows are related by ``attend`` alone: the model may be given any sequences side by side."""
    loaded = dummy_model(open_checkpoint(FIXTURES / "gqa").model_config, jnp.float32)
    attend = full_attention(loaded.config.attention_windows)
    first, second = np.array([1, 2, 3], np.int32), np.array([9, 8, 7, 6], np.int32)

    def attend_both(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.concatenate([attend(layer, q[:3], k[:3], v[:3]), attend(layer, q[3:], k[3:], v[3:])])

    model = loaded.bind(loaded.leaves)
    both = model(np.concatenate([first, second]), np.array([0, 1, 2, 0, 1, 2, 3], np.int32), attend_both)
    alone = model(second, np.arange(4, dtype=np.int32), attend)
    np.testing.assert_allclose(both[3:], alone, atol=1e-5)


def test_structure_needs_no_memory_and_few_leaves() -> None:
    config = open_checkpoint(FIXTURES / "gqa").model_config
    model = nnx.eval_shape(lambda: LlamaForCausalLM(config, jnp.bfloat16, nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.split(model)[1])
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) and leaf.dtype == jnp.bfloat16 for leaf in leaves)
    assert len(leaves) == 4 * config.num_layers + 3  # embedding, head, norms


def test_bfloat16_logits_are_float32_and_close() -> None:
    expected = np.load(FIXTURES / "gqa" / "expected.npz")
    loaded = load_model(open_checkpoint(FIXTURES / "gqa"), jnp.bfloat16)
    assert {leaf.dtype for leaf in loaded.leaves} == {jnp.dtype(jnp.bfloat16)}
    logits = full_recompute_logits(loaded, expected["token_ids"])
    assert logits.dtype == np.float32
    assert np.abs(logits - expected["logits"]).max() < 0.3


def test_window_counts_only_where_layers_are_declared_sliding(tmp_path: Path) -> None:
    """O-33 b: a sliding_window beside full_attention layers hides nothing."""
    kinds = {"full": ["full_attention"] * 2, "sliding": ["sliding_attention"] * 2}
    prompt = list(range(40, 80))
    changed = {}
    for name, layer_types in kinds.items():
        path = write_tiny(tmp_path / name, sliding_window=8, layer_types=layer_types)
        loaded = load_model(open_checkpoint(path), jnp.float32)
        before, after = (full_recompute_logits(loaded, ids)[-1] for ids in (prompt, [7, *prompt[1:]]))
        changed[name] = float(np.abs(before - after).max())
    assert changed["full"] > 1e-3
    assert changed["sliding"] == 0.0  # two layers of 8 reach back 14 tokens, not 39


def test_markov_logits_are_its_table(tmp_path: Path) -> None:
    table = np.random.default_rng(1).standard_normal((260, 260)).astype(np.float32) * 3
    loaded = load_model(open_checkpoint(write_markov(tmp_path, table)), jnp.float32)
    token_ids = [5, 250, 5, 17]
    np.testing.assert_allclose(full_recompute_logits(loaded, token_ids), table[token_ids], atol=1e-5)


def test_tiny_has_clear_margins_and_feels_its_whole_context(tmp_path: Path) -> None:
    loaded = load_model(open_checkpoint(write_tiny(tmp_path)), jnp.float32)
    output = greedy_full_recompute(loaded, TINY_PROMPT, 200)
    assert smallest_margin(loaded, TINY_PROMPT, output) >= 0.01
    changed = greedy_full_recompute(loaded, (7, *TINY_PROMPT[1:]), 24)
    assert changed != output[:24]


def test_qwen3_windows_in_old_words_are_refused() -> None:
    raw = json.loads((FIXTURES / "qwen3" / "config.json").read_text())
    read_model_config(raw, {}, "config.json")
    del raw["layer_types"]
    with pytest.raises(ModelLoadError, match="use_sliding_window without layer_types"):
        read_model_config({**raw, "use_sliding_window": True, "sliding_window": 64}, {}, "config.json")

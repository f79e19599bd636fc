"""Reading config.json, and the rotary frequencies it asks for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny import tiny_config

from jaxserve.core.errors import ModelLoadError
from jaxserve.models.config import ModelConfig
from jaxserve.models.layers import rope_inverse_frequencies

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (8.0, [1, 0.24438460, 0.013042256, 0.0039528471, 0.00125, 0.00039528471, 0.000125, 0.000039528471]),
        (32.0, [1, 0.23668712, 0.0037253549, 0.00098821177, 0.0003125]),
    ],
)
def test_llama3_frequencies(factor: float, expected: list[float]) -> None:
    """O-33 a."""
    found = rope_inverse_frequencies(16, 1e4, {**LLAMA3, "factor": factor})
    np.testing.assert_allclose(found[: len(expected)], expected, rtol=1e-6)


def test_linear_and_listed_frequencies() -> None:
    plain = rope_inverse_frequencies(8, 1e4, None)
    np.testing.assert_allclose(plain, [1, 0.1, 0.01, 0.001], rtol=1e-6)
    linear = rope_inverse_frequencies(8, 1e4, {"rope_type": "linear", "factor": 4.0})
    np.testing.assert_allclose(linear, plain / 4, rtol=1e-6)
    listed = rope_inverse_frequencies(8, 1e4, {"rope_type": "frequency_factors", "factors": [1, 1, 2, 8]})
    np.testing.assert_allclose(listed, plain / [1, 1, 2, 8], rtol=1e-6)


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3"}},
        {"rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        {"rope_theta": None, "rope_parameters": {"full_attention": {**LLAMA3, "rope_theta": 5e5}}},
    ],
)
def test_both_spellings_of_rope(keys: dict[str, Any]) -> None:
    config = ModelConfig.from_hf(tiny_config(**keys))
    assert config.rope_theta == 5e5
    assert config.rope_scaling == LLAMA3


def test_old_configs_lack_keys() -> None:
    raw = tiny_config(head_dim=None, num_key_value_heads=None, eos_token_id=[257, 258, 257])
    del raw["rope_theta"]
    config = ModelConfig.from_hf(raw)
    assert (config.head_dim, config.num_kv_heads, config.rope_theta) == (16, 4, 10000.0)
    assert config.eos_token_ids == (257, 258)
    assert config.rope_scaling is None
    assert config.attention_windows == (None, None)
    assert ModelConfig.from_hf(raw, {"eos_token_id": 259}).eos_token_ids == (259,)


def test_windows_follow_layer_types() -> None:
    assert ModelConfig.from_hf(tiny_config(sliding_window=8)).attention_windows == (None, None)
    layer_types = ["sliding_attention", "full_attention"]
    config = ModelConfig.from_hf(tiny_config(sliding_window=8, layer_types=layer_types))
    assert config.attention_windows == (8, None)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4}}, "low_freq_factor"),
        ({"rope_parameters": {"a": {"rope_theta": 1e4}, "b": {"rope_theta": 1e6}}}, "a, b"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"num_attention_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window"),
        ({"layer_types": ["linear_attention"] * 2}, "'linear_attention'"),
        ({"architectures": []}, "architectures"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_refusals_name_the_key(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=named):
        ModelConfig.from_hf(tiny_config(**keys))

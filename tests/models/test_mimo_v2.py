"""MiMo-V2-Flash and its MTP layers, in float32, against transformers and plain torch (``fixtures/make_mimo.py``)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import full_attention, full_recompute_logits
from tiny import byte_tokenizer_files, write_folder

from jaxserve.core.errors import ModelLoadError
from jaxserve.models.loading.checkpoint import Checkpoint, open_checkpoint
from jaxserve.models.loading.mtp import load_mtp_layers
from jaxserve.models.loading.weights import LoadedModel, abstract_model, load_model
from jaxserve.models.mimo_v2_config import MiMoV2Config
from jaxserve.models.registry import read_model_config

MIMO = Path(__file__).parent.parent / "fixtures" / "mimo"
RAW = json.loads((MIMO / "config.json").read_text())


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    return dict(np.load(MIMO / "expected.npz"))


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(MIMO)


@pytest.fixture(scope="module")
def target(checkpoint: Checkpoint) -> LoadedModel:
    return load_model(checkpoint, jnp.float32)


@pytest.fixture(scope="module")
def observed(target: LoadedModel, expected: dict[str, np.ndarray]) -> dict[int, jax.Array]:
    """The residual stream of the prompt by observation point."""

    def run(leaves: list[jax.Array], token_ids: jax.Array) -> dict[int, jax.Array]:
        found: dict[int, jax.Array] = {}
        attend = full_attention(target.config.attention_windows)
        target.bind(leaves)(token_ids, jnp.arange(24, dtype=jnp.int32), attend, lambda i, x: found.update({i: x}))
        return found

    return jax.jit(run)(target.leaves, jnp.asarray(expected["token_ids"], jnp.int32))


def test_logits_equal_transformers(target: LoadedModel, expected: dict[str, np.ndarray]) -> None:
    logits = full_recompute_logits(target, expected["token_ids"])
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4, rtol=0)


def test_the_residual_stream_is_observed_at_every_layer(
    observed: dict[int, jax.Array], expected: dict[str, np.ndarray]
) -> None:
    assert list(observed) == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(observed[4], expected["residual"], atol=1e-4, rtol=0)


def test_mtp_layers_equal_plain_torch(
    checkpoint: Checkpoint, target: LoadedModel, observed: dict[int, jax.Array], expected: dict[str, np.ndarray]
) -> None:
    layers = load_mtp_layers(checkpoint, target, jnp.float32)
    assert len(layers) == 2
    sequence = np.concatenate([expected["token_ids"], expected["generated"]])
    for number, layer in enumerate(layers):
        assert layer.config.attention_windows == (5,)

        def run(
            leaves: list[jax.Array], token_ids: jax.Array, captured: dict[int, jax.Array], layer: LoadedModel = layer
        ) -> tuple[jax.Array, jax.Array]:
            model = layer.bind(leaves)
            assert model.target_ids is None and not model.chains_features
            features = model.features(jnp.concatenate([captured[point] for point in model.feature_points], axis=1))
            attend = full_attention(layer.config.attention_windows)
            hidden = model(token_ids, jnp.arange(24, dtype=jnp.int32), features, attend)
            return hidden, model.logits(hidden)

        tokens = jnp.asarray(sequence[number + 1 : number + 25], jnp.int32)
        hidden, logits = jax.jit(run)(layer.leaves, tokens, observed)
        np.testing.assert_allclose(hidden, expected["mtp_hidden"][number], atol=1e-4, rtol=0)
        np.testing.assert_allclose(logits, expected["mtp_logits"][number], atol=1e-4, rtol=0)


def test_mtp_layers_share_embedding_and_head(checkpoint: Checkpoint, target: LoadedModel) -> None:
    model = target.bind(target.leaves)
    for layer in load_mtp_layers(checkpoint, target, jnp.float32):
        for shared in (model.embed_tokens[...], model.lm_head[...]):
            assert any(leaf is shared for leaf in layer.leaves)


def test_the_router_stays_in_float32(checkpoint: Checkpoint, expected: dict[str, np.ndarray]) -> None:
    loaded = load_model(checkpoint, jnp.bfloat16)
    model = loaded.bind(loaded.leaves)
    kinds = {name: getattr(model.layers[1], name)[...].dtype for name in ("router", "router_bias", "sinks", "qkv_proj")}
    assert kinds == {"router": "float32", "router_bias": "float32", "sinks": "bfloat16", "qkv_proj": "bfloat16"}
    error = np.abs(full_recompute_logits(loaded, expected["token_ids"]) - expected["logits"])
    assert np.median(error) < 0.1  # a token may meet another expert


def test_a_larger_pool_changes_nothing(checkpoint: Checkpoint, expected: dict[str, np.ndarray]) -> None:
    """Heads are repeated and padded to what the pool has, whichever of keys and values is wider."""
    loaded = load_model(checkpoint, jnp.float32)
    larger = dataclasses.replace(loaded.config, num_kv_heads=4, head_dim=20)
    abstract = abstract_model(larger, jnp.float32)
    shapes: list[tuple[int, ...]] = []
    attend = full_attention(larger.attention_windows)

    def recorded(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, *sinks: jax.Array) -> jax.Array:
        shapes.extend((q.shape, k.shape, v.shape))
        return attend(layer, q, k, v, *sinks)

    model = abstract.bind(loaded.leaves)
    run = jax.jit(lambda tokens: model.logits(model(tokens, jnp.arange(24, dtype=jnp.int32), recorded)))
    logits = run(jnp.asarray(expected["token_ids"], jnp.int32))
    assert set(shapes) == {(24, 4, 20)}
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4, rtol=0)


# -- config.json -------------------------------------------------------------------------------------------------------


def published(**changes: Any) -> dict[str, Any]:
    """The fixture's configuration in the spelling of the published checkpoint."""
    added = {
        "hybrid_layer_pattern": [0, 1, 0, 1],
        "moe_layer_freq": [0, 1, 1, 1],
        "sliding_window_size": 4,
        "swa_num_key_value_heads": 2,
        "swa_num_attention_heads": 4,
        "swa_head_dim": 12,
        "swa_v_head_dim": 8,
        "rope_theta": 5000.0,
        "swa_rope_theta": 100.0,
        "partial_rotary_factor": 0.334,
        "rope_scaling": None,
        "layernorm_epsilon": 2e-5,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_shared_experts": None,
        "routed_scaling_factor": None,
    }
    dropped = ("layer_types", "mlp_layer_types", "rope_parameters", "rms_norm_eps", "sliding_window")
    return {**{key: value for key, value in RAW.items() if key not in dropped}, **added, **changes}


def test_both_spellings_say_the_same() -> None:
    ours, theirs = MiMoV2Config.from_hf(RAW), MiMoV2Config.from_hf(published())
    assert theirs.routing == dataclasses.replace(ours.routing, scale=1.0)
    sliding = dataclasses.replace(ours.sliding, rotary_dim=4)  # one factor for both kinds
    assert theirs.sliding == sliding
    assert theirs.layers == (ours.layers[0], sliding) * 2
    assert theirs.is_sparse == ours.is_sparse == (False, True, True, True)
    config = read_model_config(published())
    assert (config.rms_norm_eps, config.num_kv_heads, config.head_dim) == (2e-5, 2, 12)
    assert config.attention_windows == (None, 5, None, 5)
    assert config.attention_sinks


def test_keys_that_are_missing_have_the_defaults_of_transformers() -> None:
    dropped = ("layer_types", "mlp_layer_types", "rope_parameters", "sliding_window", "head_dim", "v_head_dim")
    own = MiMoV2Config.from_hf({**{k: v for k, v in RAW.items() if k not in dropped}, "num_hidden_layers": 8})
    assert [kind.window for kind in own.layers] == [None, 129, 129, 129, 129, None, 129, 129]
    assert own.is_sparse == (False,) + (True,) * 7
    assert (own.sliding.rope_theta, own.layers[0].rope_theta, own.sliding.rotary_dim) == (1e4, 5e6, 64)
    assert (own.head_dim, own.v_head_dim, own.value_scale) == (192, 128, 0.707)
    assert MiMoV2Config.from_hf({**RAW, "attention_value_scale": None}).value_scale == 1.0


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"n_shared_experts": 1}, "n_shared_experts"),
        ({"swa_head_dim": 16}, "swa_head_dim must be that of the other layers, 12, got 16"),
        ({"swa_num_key_value_heads": 3}, "KV heads"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "'yarn'"),
        ({"partial_rotary_factor": 0.3}, "even number of features that rotate, got 3"),
        ({"sliding_window_size": None, "sliding_window": 0}, "sliding_window must be"),
        ({"hybrid_layer_pattern": [0, 1, 0]}, "hybrid_layer_pattern has 3 entries"),
        ({"hybrid_layer_pattern": [0, 1, 2, 0]}, "hybrid_layer_pattern of layer 2 is 2"),
        ({"mlp_layer_types": ["dense", "sparse", "sparse", "latent"]}, "layer 3 is 'latent'"),
        ({"n_group": 3}, "n_group"),
        ({"topk_group": 3}, "topk_group must be 1 .. 2, got 3"),
        ({"num_experts_per_tok": 5}, r"num_experts_per_tok must be 1 .. 4, got 5"),
        ({"hidden_act": "gelu"}, "'gelu'"),  # the common refusals hold
    ],
)
def test_refusals_name_the_key(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=named):
        read_model_config(published(**keys))


def test_what_the_reader_allows_stays_refused_elsewhere() -> None:
    llama = {**RAW, "architectures": ["LlamaForCausalLM"]}
    with pytest.raises(ModelLoadError, match="rope_parameters differ"):
        read_model_config(llama)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def changed_checkpoint(path: Path, change: Callable[[dict[str, np.ndarray]], None], **keys: Any) -> Checkpoint:
    """The fixture with other tensors or other keys of ``config.json``."""
    tensors = {name: np.array(tensor) for name, tensor in open_checkpoint(MIMO).tensors.items()}
    change(tensors)
    return open_checkpoint(write_folder(byte_tokenizer_files(path), {**RAW, **keys}, tensors))


def test_names_as_transformers_holds_them(tmp_path: Path, target: LoadedModel, expected: dict[str, np.ndarray]) -> None:
    def fuse(tensors: dict[str, np.ndarray]) -> None:
        for name in [n for n in tensors if n.endswith("attention_sink_bias") and ".mtp." not in n]:
            tensors[name.replace("attention_sink_bias", "sinks")] = tensors.pop(name)
        for layer in (1, 2, 3):
            experts = f"model.layers.{layer}.mlp.experts"
            parts = {
                part: np.stack([tensors.pop(f"{experts}.{i}.{part}_proj.weight") for i in range(8)])
                for part in ("gate", "up", "down")
            }
            tensors[f"{experts}.gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
            tensors[f"{experts}.down_proj"] = parts["down"]

    loaded = load_model(changed_checkpoint(tmp_path, fuse), jnp.float32)
    for found, right in zip(loaded.leaves, target.leaves, strict=True):
        np.testing.assert_array_equal(found, right)


def _drop(beginning: str) -> Callable[[dict[str, np.ndarray]], None]:
    def change(tensors: dict[str, np.ndarray]) -> None:
        for name in [n for n in tensors if n.startswith(beginning)]:
            del tensors[name]

    return change


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (_drop("model.mtp."), "holds no MTP layers"),
        (_drop("model.mtp.layers.0."), r"numbered from 0 without gaps, found \[1\]"),
        (_drop("model.mtp.layers.1.hnorm"), "tensor model.mtp.layers.1.hnorm.weight is missing"),
        (lambda t: t.update({"model.mtp.norm.weight": np.ones(32, np.float32)}), "do not use: model.mtp.norm.weight"),
        (
            lambda t: t.update({"model.mtp.layers.0.eh_proj.weight": np.ones((32, 32), np.float32)}),
            r"eh_proj.weight has shape \[32, 32\], the config asks for \[32, 64\]",
        ),
    ],
)
def test_mtp_layers_that_do_not_fit_are_refused(
    tmp_path: Path, target: LoadedModel, change: Callable[[dict[str, np.ndarray]], None], refusal: str
) -> None:
    checkpoint = changed_checkpoint(tmp_path, change)
    load_model(checkpoint, jnp.float32)  # the model itself does not mind
    with pytest.raises(ModelLoadError, match=refusal):
        load_mtp_layers(checkpoint, target, jnp.float32)


def test_mtp_layers_of_another_model_are_refused(tmp_path: Path, target: LoadedModel) -> None:
    other = changed_checkpoint(tmp_path / "other", lambda tensors: None, rms_norm_eps=1e-6)
    with pytest.raises(ModelLoadError, match="belong to another model"):
        load_mtp_layers(other, target, jnp.float32)
    with pytest.raises(ModelLoadError, match=r"this is LlamaForCausalLM"):
        load_mtp_layers(open_checkpoint(MIMO.parent / "gqa"), target, jnp.float32)


def test_a_tensor_of_the_model_that_is_not_used_is_refused(tmp_path: Path) -> None:
    checkpoint = changed_checkpoint(tmp_path, lambda t: t.update({"model.mtpx": np.ones(1, np.float32)}))
    with pytest.raises(ModelLoadError, match=r"does not use: model\.mtpx"):
        load_model(checkpoint, jnp.float32)

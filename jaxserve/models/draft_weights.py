"""One decoder layer of a draft model, to and from the names of published checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.config import ModelConfig
from jaxserve.models.draft import DraftLayer
from jaxserve.models.weight_map import Tensors, take, take_rows

_HEAD_NORMS = ("q_norm", "k_norm")


def layer_weights(
    config: ModelConfig, tensors: Tensors, index: int, num_inputs: int, head_norms: bool = False
) -> Iterator[tuple[str, np.ndarray]]:
    """Parameters of ``layers[index]`` from tensors named ``layers.{index}.…``."""
    hidden, inner = config.hidden_size, config.intermediate_size
    source = target = f"layers.{index}"
    heads, halves = _heads(config, source), _halves(config, source)
    yield f"{target}.qkv_proj", take_rows(tensors, {f"{n}.weight": rows for n, rows in heads.items()}, num_inputs)
    q_size = config.num_heads * config.head_dim
    yield f"{target}.o_proj", take(tensors, f"{source}.self_attn.o_proj.weight", (hidden, q_size))
    yield f"{target}.gate_up_proj", take_rows(tensors, {f"{n}.weight": rows for n, rows in halves.items()}, hidden)
    yield f"{target}.down_proj", take(tensors, f"{source}.mlp.down_proj.weight", (hidden, inner))
    if config.attention_bias:
        yield f"{target}.qkv_bias", np.concatenate([take(tensors, f"{n}.bias", (r,)) for n, r in heads.items()])
        yield f"{target}.o_bias", take(tensors, f"{source}.self_attn.o_proj.bias", (hidden,))
    if head_norms:
        names = [f"{source}.self_attn.{name}.weight" for name in _HEAD_NORMS]
        yield f"{target}.head_norms", np.stack([take(tensors, name, (config.head_dim,)) for name in names])


def layer_tensors(config: ModelConfig, layer: DraftLayer, index: int) -> Iterator[tuple[str, jax.Array]]:
    """The inverse of ``layer_weights``."""
    source = f"layers.{index}"
    heads, halves = _heads(config, source), _halves(config, source)
    cuts = np.cumsum(list(heads.values()))[:-1]
    yield from zip((f"{n}.weight" for n in heads), jnp.split(layer.qkv_proj[...], cuts), strict=True)
    yield f"{source}.self_attn.o_proj.weight", layer.o_proj[...]
    yield from zip((f"{n}.weight" for n in halves), jnp.split(layer.gate_up_proj[...], 2), strict=True)
    yield f"{source}.mlp.down_proj.weight", layer.down_proj[...]
    if layer.qkv_bias is not None and layer.o_bias is not None:
        yield from zip((f"{n}.bias" for n in heads), jnp.split(layer.qkv_bias[...], cuts), strict=True)
        yield f"{source}.self_attn.o_proj.bias", layer.o_bias[...]
    if layer.head_norms is not None:
        names = (f"{source}.self_attn.{name}.weight" for name in _HEAD_NORMS)
        yield from zip(names, layer.head_norms[...], strict=True)


def _heads(config: ModelConfig, source: str) -> dict[str, int]:
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = f"{source}.self_attn"
    return {f"{attention}.q_proj": q_size, f"{attention}.k_proj": kv_size, f"{attention}.v_proj": kv_size}


def _halves(config: ModelConfig, source: str) -> dict[str, int]:
    inner = config.intermediate_size
    return {f"{source}.mlp.gate_proj": inner, f"{source}.mlp.up_proj": inner}

"""Qwen3 (dense): a Llama whose query and key heads are normalised before rotary embedding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.core.errors import ModelLoadError
from jaxserve.models.captured import DecoderParts
from jaxserve.models.config import ModelConfig
from jaxserve.models.layers import rms_norm
from jaxserve.models.llama import LlamaForCausalLM, llama_weight_map
from jaxserve.models.weight_map import Tensors, take


class Qwen3ForCausalLM(LlamaForCausalLM):
    """As ``LlamaForCausalLM``, with two more norms per layer.

    Attributes:
        head_norms: Float[2 * num_layers, head_dim]: of the query heads and the key heads of each layer.
    """

    def __init__(self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs):
        super().__init__(config, dtype, rngs)
        self.head_norms = nnx.Param(jnp.ones((2 * config.num_layers, config.head_dim), dtype))

    def before_rope(self, layer: int, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        norms, eps = self.head_norms[...], self.config.rms_norm_eps
        return rms_norm(q, norms[2 * layer], eps), rms_norm(k, norms[2 * layer + 1], eps)

    def decoder_parts(self, positions: jax.Array) -> DecoderParts:
        return super().decoder_parts(positions)._replace(head_norms=self.head_norms[...])


def read_qwen3_config(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Nothing of its own; refuses what older files say about windows in other words than ``layer_types``.

    Raises:
        ModelLoadError: sliding windows that would be left out.
    """
    if config.get("use_sliding_window") and config.get("layer_types") is None:
        raise ModelLoadError(
            f"{source}: use_sliding_window without layer_types is not supported; name the layers' types"
        )
    return {}


def qwen3_weight_map(config: ModelConfig, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    """Parameters of ``Qwen3ForCausalLM`` from tensors with Hugging Face names."""
    yield from llama_weight_map(config, tensors)
    names = [f"model.layers.{i}.self_attn.{kind}_norm.weight" for i in range(config.num_layers) for kind in "qk"]
    yield "head_norms", np.stack([take(tensors, name, (config.head_dim,)) for name in names])

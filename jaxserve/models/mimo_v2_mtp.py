"""The multi-token-prediction layers of MiMo-V2-Flash: draft models, one for each token ahead.

Layer n (from 0) drafts the token n + 2 places behind a position. Its entry for position i is the target's residual
stream at i, behind the last layer and before the final norm, together with token i + 1 + n, at rotary position i. Every
layer takes the target's own features: they are not chained. Near the end of a sequence the tokens come from the layers
before, so those entries have to be computed again once the real tokens are known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.models.config import ModelConfig
from jaxserve.models.layers import linear, rms_norm
from jaxserve.models.llama import Attend
from jaxserve.models.mimo_v2_config import MiMoV2Config
from jaxserve.models.mimo_v2_flash import (
    MiMoV2Layer,
    attention_tensors,
    attention_weights,
    dense_tensors,
    dense_weights,
    kind_tables,
    random_weights,
)
from jaxserve.models.weight_map import Tensors, take

_NORMS = ("enorm", "hnorm", "input_layernorm", "pre_mlp_layernorm", "final_layernorm")


def mtp_config(target: ModelConfig) -> ModelConfig:
    """Configuration of an MTP layer of ``target``: one decoder layer with a sliding window, and its own KV pool."""
    own = MiMoV2Config.from_hf(target.extra)
    return dataclasses.replace(
        target,
        architecture="MiMoV2MTPLayer",
        num_layers=1,
        num_kv_heads=own.sliding.num_kv_heads,
        rope_theta=own.sliding.rope_theta,
        attention_windows=(own.sliding.window,),
        attention_sinks=own.sliding.has_sinks,
    )


class MiMoV2MTPLayer(nnx.Module):
    """One MTP layer.

    Attributes:
        config: of this decoder of one layer (``mtp_config``).
        feature_points: what it wants of the target: the residual stream behind the last layer.
        chains_features: False: every layer takes features of the target, none those of the layer before.
        target_ids: None, its vocabulary is the target's.
        embed_tokens, lm_head: the target's own.
        eh_proj: Float[hidden, 2 * hidden]; its columns take the embedding first, then the features.
        layer: the decoder layer; its MLP is dense.
        norms: Float[5, hidden]: of the embedding, of the features, before attention, before the MLP, and the final one.
    """

    chains_features = False
    target_ids: jax.Array | None = None

    def __init__(self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs):
        """Random weights; ``nnx.eval_shape`` over this makes none."""
        self.config = config
        self.feature_points = (config.extra["num_hidden_layers"],)
        hidden, own = config.hidden_size, MiMoV2Config.from_hf(config.extra)
        self.embed_tokens = random_weights(rngs, (config.vocab_size, hidden), dtype)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else random_weights(rngs, (config.vocab_size, hidden), dtype)
        self.eh_proj = random_weights(rngs, (hidden, 2 * hidden), dtype)
        self.layer = MiMoV2Layer(config, own, own.sliding, False, dtype, rngs)
        self.norms = nnx.Param(jnp.ones((5, hidden), dtype))

    def features(self, captured: jax.Array) -> jax.Array:
        """Features of the target as this layer takes them: Float[T, hidden], unchanged."""
        return captured

    def __call__(self, token_ids: jax.Array, positions: jax.Array, features: jax.Array, attend: Attend) -> jax.Array:
        """Hidden states after the final norm.

        Args:
            token_ids: Int32[T], for layer n of each entry at position i the token i + 1 + n.
            positions: Int32[T], i.
            features: Float[T, hidden], of the target at i.
            attend: called once, with layer 0.

        Returns:
            Float[T, hidden].
        """
        norms, eps = self.norms[...], self.config.rms_norm_eps
        embedded = rms_norm(self.embed_tokens[...][token_ids], norms[0], eps)
        seen = rms_norm(features, norms[1], eps)
        x = linear(jnp.concatenate([embedded, seen], axis=1), self.eh_proj[...])
        x = self.layer(self.config, 0, x, norms[2:4], kind_tables(self.layer.kind, positions), attend)
        return rms_norm(x, norms[4], eps)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Scores of the drafted token: Float[R, hidden] -> Float32[R, vocab]."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return linear(hidden, head[...], out_dtype=jnp.float32)


def mtp_weight_map(config: ModelConfig, number: int, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    """Parameters of MTP layer ``number``, but for those of the target, from tensors with the published names."""
    own, hidden = MiMoV2Config.from_hf(config.extra), config.hidden_size
    source = _source(number)
    yield "eh_proj", take(tensors, f"{source}.eh_proj.weight", (hidden, 2 * hidden))
    for name, value in attention_weights(config, own, own.sliding, f"{source}.self_attn", tensors):
        yield f"layer.{name}", value
    for name, value in dense_weights(f"{source}.mlp", hidden, config.intermediate_size, tensors):
        yield f"layer.{name}", value
    yield "norms", np.stack([take(tensors, f"{source}.{name}.weight", (hidden,)) for name in _NORMS])


def mtp_tensors(layer: MiMoV2MTPLayer, number: int) -> Iterator[tuple[str, jax.Array]]:
    """The inverse of ``mtp_weight_map``: tensors with the published names of MTP layer ``number``."""
    source = _source(number)
    yield f"{source}.eh_proj.weight", layer.eh_proj[...]
    yield from attention_tensors(layer.config, layer.layer, f"{source}.self_attn")
    yield from dense_tensors(layer.layer, f"{source}.mlp")
    yield from zip((f"{source}.{name}.weight" for name in _NORMS), layer.norms[...], strict=True)


def _source(number: int) -> str:
    return f"model.mtp.layers.{number}"

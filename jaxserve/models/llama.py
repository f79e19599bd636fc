"""Llama and its look-alikes in Flax NNX.

Few large leaves, because every leaf costs dispatch time: q, k and v are one matrix, gate and up are one matrix, and the
norm weights of all layers are one array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.models.captured import DecoderParts, LayerWeights
from jaxserve.models.config import ModelConfig
from jaxserve.models.layers import apply_rope, linear, rms_norm, rope_inverse_frequencies, rope_tables
from jaxserve.models.weight_map import Tensors, take, take_rows

# (layer, q [T, H, D], k [T, KV, D], v [T, KV, D]) -> [T, H, D]; owns the cache, the mask and the 1/sqrt(D) scale. A
# layer with attention sinks gives them, [H], as a fifth argument.
Attend = Callable[..., jax.Array]
# (index, x [T, hidden]): the residual stream before layer ``index``; index num_layers: behind the last one, before the
# final norm. For draft models that build on what the target model computes.
Observe = Callable[[int, jax.Array], None]


def _random(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: Any) -> nnx.Param[Any]:
    return nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * jnp.asarray(0.02, dtype))


def _zeros(shape: tuple[int, ...], dtype: Any) -> nnx.Param[Any]:
    return nnx.Param(jnp.zeros(shape, dtype))


class LlamaLayer(nnx.Module):
    """Weights of one decoder layer; the norms live in the model."""

    def __init__(self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs):
        hidden, inner = config.hidden_size, config.intermediate_size
        q_size, qkv_size = config.num_heads * config.head_dim, _qkv_size(config)
        self.qkv_proj = _random(rngs, (qkv_size, hidden), dtype)  # rows: q heads, k heads, v heads
        self.o_proj = _random(rngs, (hidden, q_size), dtype)
        self.gate_up_proj = _random(rngs, (2 * inner, hidden), dtype)  # rows: gate, up
        self.down_proj = _random(rngs, (hidden, inner), dtype)
        self.qkv_bias = _zeros((qkv_size,), dtype) if config.attention_bias else None
        self.o_bias = _zeros((hidden,), dtype) if config.attention_bias else None
        self.gate_up_bias = _zeros((2 * inner,), dtype) if config.mlp_bias else None
        self.down_bias = _zeros((hidden,), dtype) if config.mlp_bias else None


class LlamaForCausalLM(nnx.Module):
    """Decoder of T token rows that may belong to any number of sequences; the engine's ``attend`` relates them.

    Attributes:
        embed_tokens: Float[vocab, hidden].
        layers: one ``LlamaLayer`` each.
        norms: Float[2 * num_layers + 1, hidden]: before attention and before the MLP of each layer, and the final one.
        lm_head: Float[vocab, hidden], or None when the embedding serves for the logits.
    """

    def __init__(self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs):
        """Random weights; ``nnx.eval_shape`` over this makes none."""
        self.config = config
        self.embed_tokens = _random(rngs, (config.vocab_size, config.hidden_size), dtype)
        self.layers = nnx.List([LlamaLayer(config, dtype, rngs) for _ in range(config.num_layers)])
        self.norms = nnx.Param(jnp.ones((2 * config.num_layers + 1, config.hidden_size), dtype))
        head_shape = (config.vocab_size, config.hidden_size)
        self.lm_head = None if config.tie_word_embeddings else _random(rngs, head_shape, dtype)

    def __call__(
        self, token_ids: jax.Array, positions: jax.Array, attend: Attend, observe: Observe | None = None
    ) -> jax.Array:
        """Hidden states after the final norm.

        Args:
            token_ids: Int32[T].
            positions: Int32[T], position of each row within its own sequence.
            attend: called once per layer, in order, with q and k after rotary embedding.
            observe: called with the residual stream before each layer and behind the last one.

        Returns:
            Float[T, hidden].
        """
        config = self.config
        num_rows, eps, norms = token_ids.shape[0], config.rms_norm_eps, self.norms[...]
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        cos, sin = self._rope_tables(positions)
        x = self.embed_tokens[...][token_ids]
        for index, layer in enumerate(self.layers):
            if observe is not None:
                observe(index, x)
            h = rms_norm(x, norms[2 * index], eps)
            qkv = linear(h, layer.qkv_proj[...], _value(layer.qkv_bias))
            q, k, v = jnp.split(qkv, (q_size, q_size + kv_size), axis=1)
            q = q.reshape(num_rows, config.num_heads, config.head_dim)
            k = k.reshape(num_rows, config.num_kv_heads, config.head_dim)
            q, k = (apply_rope(heads, cos, sin) for heads in self.before_rope(index, q, k))
            v = v.reshape(num_rows, config.num_kv_heads, config.head_dim)
            attended = attend(index, q, k, v).reshape(num_rows, q_size)
            x = x + linear(attended, layer.o_proj[...], _value(layer.o_bias))
            h = rms_norm(x, norms[2 * index + 1], eps)
            gate, up = jnp.split(linear(h, layer.gate_up_proj[...], _value(layer.gate_up_bias)), 2, axis=1)
            x = x + linear(jax.nn.silu(gate) * up, layer.down_proj[...], _value(layer.down_bias))
        if observe is not None:
            observe(len(self.layers), x)
        return rms_norm(x, norms[-1], eps)

    def before_rope(self, layer: int, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What a look-alike does to query heads [T, H, D] and key heads [T, KV, D] before rotary embedding: nothing."""
        return q, k

    def _rope_tables(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        config = self.config
        return rope_tables(positions, rope_inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling))

    def decoder_parts(self, positions: jax.Array) -> DecoderParts:
        """What captured decode steps are computed from, for rows at ``positions`` int32[T]."""
        embedding = self.embed_tokens[...]
        layers = [
            LayerWeights(
                *(layer.qkv_proj[...], layer.o_proj[...], layer.gate_up_proj[...], layer.down_proj[...]),
                *map(_value, (layer.qkv_bias, layer.o_bias, layer.gate_up_bias, layer.down_bias)),
            )
            for layer in self.layers
        ]
        cosines, sines = (x[:, 0] for x in self._rope_tables(positions))
        head = embedding if self.lm_head is None else self.lm_head[...]
        return DecoderParts(cosines, sines, embedding, head, self.norms[...], None, layers)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Scores of the next token: Float[R, hidden] -> Float32[R, vocab]."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return linear(hidden, head[...], out_dtype=jnp.float32)


def _value(param: nnx.Param[Any] | None) -> jax.Array | None:
    return None if param is None else param[...]


def _qkv_size(config: ModelConfig) -> int:
    return (config.num_heads + 2 * config.num_kv_heads) * config.head_dim


def llama_weight_map(config: ModelConfig, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    """Parameters of ``LlamaForCausalLM`` from tensors with Hugging Face names."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    norm_names: list[str] = []
    yield "embed_tokens", take(tensors, "model.embed_tokens.weight", (config.vocab_size, hidden))
    for index in range(config.num_layers):
        source, target = f"model.layers.{index}", f"layers.{index}"
        attention, mlp = f"{source}.self_attn", f"{source}.mlp"
        heads = {f"{attention}.q_proj": q_size, f"{attention}.k_proj": kv_size, f"{attention}.v_proj": kv_size}
        halves = {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}
        yield f"{target}.qkv_proj", take_rows(tensors, {f"{n}.weight": rows for n, rows in heads.items()}, hidden)
        yield f"{target}.o_proj", take(tensors, f"{attention}.o_proj.weight", (hidden, q_size))
        yield f"{target}.gate_up_proj", take_rows(tensors, {f"{n}.weight": rows for n, rows in halves.items()}, hidden)
        yield f"{target}.down_proj", take(tensors, f"{mlp}.down_proj.weight", (hidden, inner))
        if config.attention_bias:
            biases = [take(tensors, f"{name}.bias", (rows,)) for name, rows in heads.items()]
            yield f"{target}.qkv_bias", np.concatenate(biases)
            yield f"{target}.o_bias", take(tensors, f"{attention}.o_proj.bias", (hidden,))
        if config.mlp_bias:
            biases = [take(tensors, f"{name}.bias", (rows,)) for name, rows in halves.items()]
            yield f"{target}.gate_up_bias", np.concatenate(biases)
            yield f"{target}.down_bias", take(tensors, f"{mlp}.down_proj.bias", (hidden,))
        norm_names += [f"{source}.input_layernorm.weight", f"{source}.post_attention_layernorm.weight"]
    norm_names.append("model.norm.weight")
    yield "norms", np.stack([take(tensors, name, (hidden,)) for name in norm_names])
    if not config.tie_word_embeddings:
        yield "lm_head", take(tensors, "lm_head.weight", (config.vocab_size, hidden))

"""MiMo-V2-Flash in Flax NNX: mixture of experts, hybrid attention with sinks, partial rotary embeddings.

Layers of full attention and of a sliding window differ in KV heads and rotary base, and values are narrower than keys.
The KV pool has one shape for all: KV heads are repeated and features padded with zeros to the largest kind, which
changes no result (``docs/decisions.md`` says what it costs).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.models.config import ModelConfig
from jaxserve.models.experts import apply_experts, choose_experts
from jaxserve.models.layers import apply_rope, linear, rms_norm, rope_inverse_frequencies, rope_tables
from jaxserve.models.llama import Attend, Observe
from jaxserve.models.mimo_v2_config import AttentionKind, MiMoV2Config
from jaxserve.models.weight_map import Tensors, take, take_rows


def random_weights(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: Any) -> nnx.Param[Any]:
    """Small random numbers."""
    return nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * jnp.asarray(0.02, dtype))


class MiMoV2Layer(nnx.Module):
    """One decoder layer; its norms live in the model.

    Attributes:
        qkv_proj: rows of q heads, k heads, v heads; qkv_bias or None.
        sinks: Float[heads], or None.
        gate_up_proj, down_proj: of the MLP; with a leading axis of experts in a sparse layer.
        router, router_bias: Float32[experts, hidden], Float32[experts] of a sparse layer, else None.
    """

    def __init__(
        self, config: ModelConfig, own: MiMoV2Config, kind: AttentionKind, is_sparse: bool, dtype: Any, rngs: nnx.Rngs
    ):
        self.own, self.kind = own, kind
        hidden, heads = config.hidden_size, config.num_heads
        qkv_size = sum(qkv_sizes(config, own, kind))
        self.qkv_proj = random_weights(rngs, (qkv_size, hidden), dtype)
        self.qkv_bias = random_weights(rngs, (qkv_size,), dtype) if config.attention_bias else None
        self.o_proj = random_weights(rngs, (hidden, heads * own.v_head_dim), dtype)
        self.sinks = random_weights(rngs, (heads,), dtype) if kind.has_sinks else None
        experts = (own.routing.num_experts,) if is_sparse else ()
        inner = own.expert_size if is_sparse else config.intermediate_size
        self.gate_up_proj = random_weights(rngs, (*experts, 2 * inner, hidden), dtype)
        self.down_proj = random_weights(rngs, (*experts, hidden, inner), dtype)
        self.router = random_weights(rngs, (*experts, hidden), jnp.float32) if is_sparse else None
        self.router_bias = random_weights(rngs, experts, jnp.float32) if is_sparse else None

    def __call__(
        self,
        config: ModelConfig,
        index: int,
        x: jax.Array,
        norms: jax.Array,
        tables: tuple[jax.Array, jax.Array],
        attend: Attend,
    ) -> jax.Array:
        """The residual stream behind this layer.

        Args:
            config: of the KV pool.
            index: number of the layer, for ``attend``.
            x: Float[T, hidden].
            norms: Float[2, hidden], before attention and before the MLP.
            tables: cosine and sine of ``rope_tables``.
        """
        x = x + self._attention(config, index, rms_norm(x, norms[0], config.rms_norm_eps), tables, attend)
        return x + self._mlp(rms_norm(x, norms[1], config.rms_norm_eps))

    def _attention(
        self, config: ModelConfig, index: int, h: jax.Array, tables: tuple[jax.Array, jax.Array], attend: Attend
    ) -> jax.Array:
        own, num_kv_heads = self.own, self.kind.num_kv_heads
        q_size, k_size, _ = qkv_sizes(config, own, self.kind)
        qkv = linear(h, self.qkv_proj[...], None if self.qkv_bias is None else self.qkv_bias[...])
        q, k, v = jnp.split(qkv, (q_size, q_size + k_size), axis=1)
        q = apply_rope(q.reshape(-1, config.num_heads, own.head_dim), *tables)
        k = apply_rope(k.reshape(-1, num_kv_heads, own.head_dim), *tables)
        v = v.reshape(-1, num_kv_heads, own.v_head_dim) * own.value_scale
        if config.head_dim != own.head_dim:  # attend divides by the root of the pool's head_dim
            q = q * (config.head_dim / own.head_dim) ** 0.5
        q, k, v = (_widened(heads, config.head_dim) for heads in (q, k, v))
        repeats = config.num_kv_heads // num_kv_heads  # a group of query heads becomes so many smaller ones
        k, v = (jnp.repeat(heads, repeats, axis=1) if repeats > 1 else heads for heads in (k, v))
        sinks = () if self.sinks is None else (self.sinks[...],)
        attended = attend(index, q, k, v, *sinks)[:, :, : own.v_head_dim]
        return linear(attended.reshape(-1, config.num_heads * own.v_head_dim), self.o_proj[...])

    def _mlp(self, h: jax.Array) -> jax.Array:
        if self.router is not None and self.router_bias is not None:
            routing = self.own.routing
            chosen, weights = choose_experts(
                h, self.router[...], self.router_bias[...],
                num_chosen=routing.num_chosen, num_groups=routing.num_groups,
                num_groups_chosen=routing.num_groups_chosen, normalize=routing.normalize, scale=routing.scale,
            )  # fmt: skip
            return apply_experts(h, self.gate_up_proj[...], self.down_proj[...], chosen, weights)
        gate, up = jnp.split(linear(h, self.gate_up_proj[...]), 2, axis=1)
        return linear(jax.nn.silu(gate) * up, self.down_proj[...])


class MiMoV2FlashForCausalLM(nnx.Module):
    """Decoder of T token rows that may belong to any number of sequences; the engine's ``attend`` relates them.

    Attributes:
        embed_tokens: Float[vocab, hidden].
        layers: one ``MiMoV2Layer`` each.
        norms: Float[2 * num_layers + 1, hidden]: before attention and before the MLP of each layer, and the final one.
        lm_head: Float[vocab, hidden], or None when the embedding serves for the logits.
    """

    def __init__(self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs):
        """Random weights; ``nnx.eval_shape`` over this makes none."""
        self.config = config
        own = MiMoV2Config.from_hf(config.extra)
        self.embed_tokens = random_weights(rngs, (config.vocab_size, config.hidden_size), dtype)
        kinds = zip(own.layers, own.is_sparse, strict=True)
        self.layers = nnx.List([MiMoV2Layer(config, own, *kind, dtype, rngs) for kind in kinds])
        self.norms = nnx.Param(jnp.ones((2 * config.num_layers + 1, config.hidden_size), dtype))
        head_shape = (config.vocab_size, config.hidden_size)
        self.lm_head = None if config.tie_word_embeddings else random_weights(rngs, head_shape, dtype)

    def __call__(
        self, token_ids: jax.Array, positions: jax.Array, attend: Attend, observe: Observe | None = None
    ) -> jax.Array:
        """Hidden states after the final norm.

        Args:
            token_ids: Int32[T].
            positions: Int32[T], position of each row within its own sequence.
            attend: called once per layer, in order, with q and k after rotary embedding, at the pool's sizes; with the
                layer's sinks, where it has any.
            observe: called with the residual stream before each layer and behind the last one.

        Returns:
            Float[T, hidden].
        """
        norms = self.norms[...]
        tables = {kind: kind_tables(kind, positions) for kind in {layer.kind for layer in self.layers}}
        x = self.embed_tokens[...][token_ids]
        for index, layer in enumerate(self.layers):
            if observe is not None:
                observe(index, x)
            x = layer(self.config, index, x, norms[2 * index : 2 * index + 2], tables[layer.kind], attend)
        if observe is not None:
            observe(len(self.layers), x)
        return rms_norm(x, norms[-1], self.config.rms_norm_eps)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Scores of the next token: Float[R, hidden] -> Float32[R, vocab]."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return linear(hidden, head[...], out_dtype=jnp.float32)


def qkv_sizes(config: ModelConfig, own: MiMoV2Config, kind: AttentionKind) -> tuple[int, int, int]:
    """Features of all q heads, k heads and v heads of a layer."""
    return config.num_heads * own.head_dim, kind.num_kv_heads * own.head_dim, kind.num_kv_heads * own.v_head_dim


def kind_tables(kind: AttentionKind, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``rope_tables`` of the features that rotate, Float32[T, 1, rotary_dim / 2] each."""
    return rope_tables(positions, rope_inverse_frequencies(kind.rotary_dim, kind.rope_theta, None))


def _widened(heads: jax.Array, head_dim: int) -> jax.Array:
    missing = head_dim - heads.shape[-1]
    return jnp.pad(heads, ((0, 0), (0, 0), (0, missing))) if missing else heads


def mimo_v2_weight_map(config: ModelConfig, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    """Parameters of ``MiMoV2FlashForCausalLM`` from tensors with the published names, or those of transformers."""
    own, hidden = MiMoV2Config.from_hf(config.extra), config.hidden_size
    norm_names: list[str] = []
    yield "embed_tokens", take(tensors, "model.embed_tokens.weight", (config.vocab_size, hidden))
    for index, (kind, is_sparse) in enumerate(zip(own.layers, own.is_sparse, strict=True)):
        source, target = f"model.layers.{index}", f"layers.{index}."
        for name, value in attention_weights(config, own, kind, f"{source}.self_attn", tensors):
            yield target + name, value
        if is_sparse:
            mlp = expert_weights(config, own, f"{source}.mlp", tensors)
        else:
            mlp = dense_weights(f"{source}.mlp", hidden, config.intermediate_size, tensors)
        for name, value in mlp:
            yield target + name, value
        norm_names += [f"{source}.input_layernorm.weight", f"{source}.post_attention_layernorm.weight"]
    norm_names.append("model.norm.weight")
    yield "norms", np.stack([take(tensors, name, (hidden,)) for name in norm_names])
    if not config.tie_word_embeddings:
        yield "lm_head", take(tensors, "lm_head.weight", (config.vocab_size, hidden))


def attention_weights(
    config: ModelConfig, own: MiMoV2Config, kind: AttentionKind, source: str, tensors: Tensors
) -> Iterator[tuple[str, np.ndarray]]:
    """Parameters of a layer's attention; ``source`` is what its tensors' names begin with."""
    sizes = dict(zip("qkv", qkv_sizes(config, own, kind), strict=True))
    rows = {f"{source}.{name}_proj.weight": size for name, size in sizes.items()}
    yield "qkv_proj", take_rows(tensors, rows, config.hidden_size)
    if config.attention_bias:
        biases = [take(tensors, f"{source}.{name}_proj.bias", (size,)) for name, size in sizes.items()]
        yield "qkv_bias", np.concatenate(biases)
    yield "o_proj", take(tensors, f"{source}.o_proj.weight", (config.hidden_size, config.num_heads * own.v_head_dim))
    if kind.has_sinks:
        name = f"{source}.sinks" if f"{source}.sinks" in tensors else f"{source}.attention_sink_bias"
        yield "sinks", take(tensors, name, (config.num_heads,))


def dense_weights(source: str, hidden: int, inner: int, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    """Parameters of an MLP, or of one expert."""
    halves = {f"{source}.gate_proj.weight": inner, f"{source}.up_proj.weight": inner}
    yield "gate_up_proj", take_rows(tensors, halves, hidden)
    yield "down_proj", take(tensors, f"{source}.down_proj.weight", (hidden, inner))


def attention_tensors(config: ModelConfig, layer: MiMoV2Layer, source: str) -> Iterator[tuple[str, jax.Array]]:
    """The inverse of ``attention_weights``, under the published names."""
    sizes = qkv_sizes(config, layer.own, layer.kind)
    cuts = [sizes[0], sizes[0] + sizes[1]]
    names = [f"{source}.{name}_proj" for name in "qkv"]
    yield from zip((f"{name}.weight" for name in names), jnp.split(layer.qkv_proj[...], cuts), strict=True)
    if layer.qkv_bias is not None:
        yield from zip((f"{name}.bias" for name in names), jnp.split(layer.qkv_bias[...], cuts), strict=True)
    yield f"{source}.o_proj.weight", layer.o_proj[...]
    if layer.sinks is not None:
        yield f"{source}.attention_sink_bias", layer.sinks[...]


def dense_tensors(layer: MiMoV2Layer, source: str) -> Iterator[tuple[str, jax.Array]]:
    """The inverse of ``dense_weights``."""
    names = (f"{source}.gate_proj.weight", f"{source}.up_proj.weight")
    yield from zip(names, jnp.split(layer.gate_up_proj[...], 2), strict=True)
    yield f"{source}.down_proj.weight", layer.down_proj[...]


def expert_weights(
    config: ModelConfig, own: MiMoV2Config, source: str, tensors: Tensors
) -> Iterator[tuple[str, np.ndarray]]:
    """Parameters of a layer's experts and router."""
    hidden, inner, num_experts = config.hidden_size, own.expert_size, own.routing.num_experts
    experts = f"{source}.experts"
    yield "router", take(tensors, f"{source}.gate.weight", (num_experts, hidden))
    yield "router_bias", take(tensors, f"{source}.gate.e_score_correction_bias", (num_experts,))
    if f"{experts}.gate_up_proj" in tensors:  # all experts in one tensor, as transformers holds them
        yield "gate_up_proj", take(tensors, f"{experts}.gate_up_proj", (num_experts, 2 * inner, hidden))
        yield "down_proj", take(tensors, f"{experts}.down_proj", (num_experts, hidden, inner))
        return
    each = [dict(dense_weights(f"{experts}.{i}", hidden, inner, tensors)) for i in range(num_experts)]
    for name in ("gate_up_proj", "down_proj"):
        yield name, np.stack([expert[name] for expert in each])

"""What a model gives for its decode steps to be captured into CUDA graphs; ``csrc/cuda/decoder`` computes them then."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax


class LayerWeights(NamedTuple):
    """Weights of one layer, ``[out, in]``; biases may be None.

    Attributes:
        qkv: [(H + 2 KV) * D, hidden]: rows of query heads, key heads, value heads.
        o: [hidden, H * D].
        gate_up: [2 * inner, hidden]: gate, up.
        down: [hidden, inner].
        qkv_bias, o_bias, gate_up_bias, down_bias: of these products.
    """

    qkv: jax.Array
    o: jax.Array
    gate_up: jax.Array
    down: jax.Array
    qkv_bias: jax.Array | None
    o_bias: jax.Array | None
    gate_up_bias: jax.Array | None
    down_bias: jax.Array | None


class DecoderParts(NamedTuple):
    """A Llama-like decoder taken apart. Everything but cosines and sines is bfloat16.

    Attributes:
        cosines, sines: Float32[T, D / 2], of each row's rotary angles.
        embedding, lm_head: [vocab, hidden]; the same array where they are tied.
        norms: [2 * layers + 1, hidden]: before attention and before the MLP of each layer, and the final one.
        head_norms: [2 * layers, D]: of the query heads and the key heads of each layer, ahead of rotation; or None.
        layers: one for each.
    """

    cosines: jax.Array
    sines: jax.Array
    embedding: jax.Array
    lm_head: jax.Array
    norms: jax.Array
    head_norms: jax.Array | None
    layers: list[LayerWeights]


def can_be_captured(model_class: Any) -> bool:
    """Whether a model class itself has ``decoder_parts``.

    One that inherits it does not count: what it changes of its parent would be left out without a word.
    """
    return "decoder_parts" in vars(model_class)

"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): guesses tokens from hidden states of several layers of the target."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.models.draft import DraftConfig, DraftLayer, DraftModel, value_of
from jaxserve.models.draft_weights import layer_tensors, layer_weights
from jaxserve.models.layers import linear, rms_norm, rope_inverse_frequencies, rope_tables
from jaxserve.models.llama import Attend
from jaxserve.models.weight_map import Tensors, take


def default_feature_points(num_layers: int) -> tuple[int, int, int]:
    """A low, a middle and a high layer of the target, where the checkpoint names none: what EAGLE-3 is trained on."""
    return (min(2, num_layers), num_layers // 2, max(num_layers - 3, 0))


class Eagle3Model(DraftModel):
    """Features and token embedding side by side, each with a norm of its own, into the attention of the first layer.

    Attributes:
        fc: merges the target's states into features of the draft's width.
        layers: one ``DraftLayer`` each; the first reads 2 * hidden inputs, embedding first.
        norms: Float[2 * num_layers + 2, hidden]: of the embedding, of the features, before the MLP of layer 0; before
            attention and MLP of the other layers; the final one.
    """

    def __init__(self, draft: DraftConfig, dtype: Any, rngs: nnx.Rngs):
        super().__init__(draft, draft.captured_size, dtype, rngs)
        hidden, num_layers = self.config.hidden_size, self.config.num_layers
        self.layers = nnx.List(
            [DraftLayer(self.config, hidden if i else 2 * hidden, dtype, rngs) for i in range(num_layers)]
        )
        self.norms = nnx.Param(jnp.ones((2 * num_layers + 2, hidden), dtype))

    def features(self, captured: jax.Array) -> jax.Array:
        """Float[T, points * target hidden] -> Float[T, hidden]."""
        return linear(captured, self.fc[...], value_of(self.fc_bias))

    def __call__(self, token_ids: jax.Array, positions: jax.Array, features: jax.Array, attend: Attend) -> jax.Array:
        """The residual stream behind the last layer, before the final norm: the features of the next guess.

        Args:
            token_ids: Int32[T], the token behind each row's features.
            positions: Int32[T], positions of the features.
            features: Float[T, hidden], from ``features`` or outputs of this.
            attend: as for a target model, with the draft's own KV.
        """
        config, eps, norms = self.config, self.config.rms_norm_eps, self.norms[...]
        rope = rope_tables(positions, rope_inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling))
        normed = rms_norm(features, norms[1], eps)
        x = normed if self.draft.norm_before_residual else features
        h = jnp.concatenate([rms_norm(self.embed_tokens[...][token_ids], norms[0], eps), normed], axis=1)
        for index, layer in enumerate(self.layers):
            if index:
                h = rms_norm(x, norms[2 * index + 1], eps)
            x = x + layer.attention(index, config, h, rope, attend)
            x = x + layer.feed_forward(rms_norm(x, norms[2 * index + 2], eps))
        return x

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Scores of the token behind: Float[R, hidden] -> Float32[R, draft_vocab]."""
        return self.head(rms_norm(hidden, self.norms[...][-1], self.config.rms_norm_eps))


def _norm_names(num_layers: int) -> list[str]:
    names = [f"layers.0.{name}.weight" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
    for index in range(1, num_layers):
        names += [f"layers.{index}.input_layernorm.weight", f"layers.{index}.post_attention_layernorm.weight"]
    return [*names, "norm.weight"]


def eagle3_weight_map(draft: DraftConfig, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    """Parameters of ``Eagle3Model`` from a published checkpoint, without those shared with the target."""
    hidden = draft.decoder.hidden_size
    yield "fc", take(tensors, "fc.weight", (hidden, draft.captured_size))
    if draft.fc_bias:
        yield "fc_bias", take(tensors, "fc.bias", (hidden,))
    for index in range(draft.decoder.num_layers):
        yield from layer_weights(draft.decoder, tensors, index, hidden if index else 2 * hidden)
    yield "norms", np.stack([take(tensors, name, (hidden,)) for name in _norm_names(draft.decoder.num_layers)])


def eagle3_tensors(model: Eagle3Model) -> Iterator[tuple[str, jax.Array]]:
    """The inverse of ``eagle3_weight_map``; the first layer is called ``midlayer``, as the authors' checkpoints do."""
    yield "fc.weight", model.fc[...]
    if model.fc_bias is not None:
        yield "fc.bias", model.fc_bias[...]
    named = [pair for index, layer in enumerate(model.layers) for pair in layer_tensors(model.config, layer, index)]
    named += zip(_norm_names(model.config.num_layers), model.norms[...], strict=True)
    for name, tensor in named:
        yield ("midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name), tensor

"""EAGLE (Li et al. 2024, arXiv 2401.15077; also EAGLE-2's model): guesses the target's next final hidden state."""

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


class EagleModel(DraftModel):
    """Token embedding and the target's final hidden state, merged by ``fc``, through Llama layers.

    The first layer has no input norm. The output stands for the target's next final hidden state: the target's head
    turns it into logits, and it is the feature of the next guess.

    Attributes:
        layers: one ``DraftLayer`` each.
        norms: Float[2 * num_layers - 1, hidden]: before the MLP of layer 0, then before attention and MLP of the
            others.
    """

    def __init__(self, draft: DraftConfig, dtype: Any, rngs: nnx.Rngs):
        hidden = draft.decoder.hidden_size
        super().__init__(draft, hidden + draft.captured_size, dtype, rngs)
        self.layers = nnx.List([DraftLayer(self.config, hidden, dtype, rngs) for _ in range(self.config.num_layers)])
        self.norms = nnx.Param(jnp.ones((2 * self.config.num_layers - 1, hidden), dtype))

    def features(self, captured: jax.Array) -> jax.Array:
        """The target's final hidden states, as they are: Float[T, hidden]."""
        return captured

    def __call__(self, token_ids: jax.Array, positions: jax.Array, features: jax.Array, attend: Attend) -> jax.Array:
        """Guessed final hidden states of the target, each one position further than ``features``.

        Args:
            token_ids: Int32[T], the token behind each row's features.
            positions: Int32[T], positions of the features.
            features: Float[T, hidden], final hidden states of the target, or outputs of this.
            attend: as for a target model, with the draft's own KV.
        """
        config, eps, norms = self.config, self.config.rms_norm_eps, self.norms[...]
        rope = rope_tables(positions, rope_inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling))
        merged = jnp.concatenate([self.embed_tokens[...][token_ids], features], axis=1)
        x = linear(merged, self.fc[...], value_of(self.fc_bias))
        for index, layer in enumerate(self.layers):
            h = rms_norm(x, norms[2 * index - 1], eps) if index else x
            x = x + layer.attention(index, config, h, rope, attend)
            x = x + layer.feed_forward(rms_norm(x, norms[2 * index], eps))
        return x

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Scores of the token behind: Float[R, hidden] -> Float32[R, vocab]."""
        return self.head(hidden)


def _norm_names(num_layers: int) -> list[str]:
    names = ["layers.0.post_attention_layernorm.weight"]
    for index in range(1, num_layers):
        names += [f"layers.{index}.input_layernorm.weight", f"layers.{index}.post_attention_layernorm.weight"]
    return names


def eagle_weight_map(draft: DraftConfig, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    """Parameters of ``EagleModel`` from a published checkpoint, without those shared with the target."""
    hidden = draft.decoder.hidden_size
    yield "fc", take(tensors, "fc.weight", (hidden, hidden + draft.captured_size))
    if draft.fc_bias:
        yield "fc_bias", take(tensors, "fc.bias", (hidden,))
    for index in range(draft.decoder.num_layers):
        yield from layer_weights(draft.decoder, tensors, index, hidden)
    yield "norms", np.stack([take(tensors, name, (hidden,)) for name in _norm_names(draft.decoder.num_layers)])


def eagle_tensors(model: EagleModel) -> Iterator[tuple[str, jax.Array]]:
    """The inverse of ``eagle_weight_map``."""
    yield "fc.weight", model.fc[...]
    if model.fc_bias is not None:
        yield "fc.bias", model.fc_bias[...]
    for index, layer in enumerate(model.layers):
        yield from layer_tensors(model.config, layer, index)
    yield from zip(_norm_names(model.config.num_layers), model.norms[...], strict=True)

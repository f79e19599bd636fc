"""DFLASH (Z Lab 2026, arXiv 2602.06036): guesses a whole block of tokens in one pass.

The block is the newest known token followed by mask tokens; its rows see each other in both directions, and the KV of
what came before. That KV is not made from tokens but from the target's hidden states: every position the target has
computed is written to the draft's pool by ``context``. So for a sequence whose newest token stands at position n:

- the pool holds ``context`` of positions 0 .. n - 1,
- the block stands at positions n .. n + block_size - 1,
- row j of the output predicts the token at n + j, so row 0, whose token is known, is of no use.
"""

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


def default_target_layers(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """Layers of the target whose outputs are used where the checkpoint names none: evenly spread, the ends left out."""
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    first, last = 1, num_target_layers - 3
    return [round(first + i * (last - first) / (num_draft_layers - 1)) for i in range(num_draft_layers)]


class DflashModel(DraftModel):
    """Qwen3-like layers (a norm on every q and k head) over a block of mask tokens.

    Attributes:
        fc: merges the target's states.
        layers: one ``DraftLayer`` each, with ``head_norms``.
        norms: Float[2 * num_layers + 2, hidden]: of the merged target states; before attention and MLP of each layer;
            the final one.
    """

    def __init__(self, draft: DraftConfig, dtype: Any, rngs: nnx.Rngs):
        super().__init__(draft, draft.captured_size, dtype, rngs)
        hidden, num_layers = self.config.hidden_size, self.config.num_layers
        self.layers = nnx.List(
            [DraftLayer(self.config, hidden, dtype, rngs, head_norms=True) for _ in range(num_layers)]
        )
        self.norms = nnx.Param(jnp.ones((2 * num_layers + 2, hidden), dtype))

    @property
    def block_size(self) -> int:
        """Rows of a block, the newest known token included."""
        return self.draft.block_size

    @property
    def mask_token_id(self) -> int:
        """The token that stands for one to be guessed."""
        assert self.draft.mask_token_id is not None
        return self.draft.mask_token_id

    @property
    def window(self) -> int | None:
        """Positions a block row sees to its left, where the layers agree on one; None: all."""
        windows = set(self.config.attention_windows)
        return windows.pop() if len(windows) == 1 else None

    def features(self, captured: jax.Array) -> jax.Array:
        """The target's states, as they are; ``context`` merges them."""
        return captured

    def context(self, features: jax.Array, positions: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        """KV of positions the target has computed, for the draft's pool.

        Args:
            features: Float[T, points * target hidden].
            positions: Int32[T].

        Returns:
            Per layer, keys (after norm and rotation) and values, each Float[T, KV, D].
        """
        config = self.config
        rope = self._rope(positions)
        merged = linear(features, self.fc[...], value_of(self.fc_bias))
        merged = rms_norm(merged, self.norms[...][0], config.rms_norm_eps)
        q_size = config.num_heads * config.head_dim
        pairs = []
        for layer in self.layers:
            bias = None if layer.qkv_bias is None else layer.qkv_bias[...][q_size:]
            pairs.append(layer.keys_values(config, linear(merged, layer.qkv_proj[...][q_size:], bias), rope))
        return pairs

    def __call__(self, token_ids: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        """Hidden states of blocks, after the final norm.

        Args:
            token_ids: Int32[T], per block the newest token and ``block_size - 1`` mask tokens.
            positions: Int32[T].
            attend: called once per layer; lets a row see its sequence's pool and its whole block, both directions.

        Returns:
            Float[T, hidden].
        """
        config, eps, norms = self.config, self.config.rms_norm_eps, self.norms[...]
        rope = self._rope(positions)
        x = self.embed_tokens[...][token_ids]
        for index, layer in enumerate(self.layers):
            x = x + layer.attention(index, config, rms_norm(x, norms[2 * index + 1], eps), rope, attend)
            x = x + layer.feed_forward(rms_norm(x, norms[2 * index + 2], eps))
        return rms_norm(x, norms[-1], eps)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Scores of the tokens at the rows' own positions: Float[R, hidden] -> Float32[R, draft_vocab]."""
        return self.head(hidden)

    def _rope(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        config = self.config
        return rope_tables(positions, rope_inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling))


def _norm_names(num_layers: int) -> list[str]:
    names = ["hidden_norm.weight"]
    for index in range(num_layers):
        names += [f"layers.{index}.input_layernorm.weight", f"layers.{index}.post_attention_layernorm.weight"]
    return [*names, "norm.weight"]


def dflash_weight_map(draft: DraftConfig, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    """Parameters of ``DflashModel`` from a published checkpoint, without those shared with the target."""
    hidden = draft.decoder.hidden_size
    yield "fc", take(tensors, "fc.weight", (hidden, draft.captured_size))
    for index in range(draft.decoder.num_layers):
        yield from layer_weights(draft.decoder, tensors, index, hidden, head_norms=True)
    yield "norms", np.stack([take(tensors, name, (hidden,)) for name in _norm_names(draft.decoder.num_layers)])


def dflash_tensors(model: DflashModel) -> Iterator[tuple[str, jax.Array]]:
    """The inverse of ``dflash_weight_map``."""
    yield "fc.weight", model.fc[...]
    for index, layer in enumerate(model.layers):
        yield from layer_tensors(model.config, layer, index)
    yield from zip(_norm_names(model.config.num_layers), model.norms[...], strict=True)

"""What draft models have in common: small decoders that guess the next tokens from a target model's hidden states.

A draft model is an ``nnx.Module`` with

- ``config``: the ``ModelConfig`` of its own decoder (layers, KV heads and head size of its own KV pool; ``vocab_size``
  is the target's);
- ``feature_points``: what it wants to see of the target, as indices ``observe`` is called with: i is the residual
  stream before layer i, the number of layers is the stream behind the last one, ``FINAL`` the output of the target's
  final norm;
- ``features(captured)``: the captured states of a row, concatenated in the order of ``feature_points``, as the draft
  wants them;
- ``logits(hidden)``: scores over the draft vocabulary, and ``target_ids``: which target id each draft id stands for
  (None when they are the same ids).

EAGLE and EAGLE-3 are called with ``(token_ids, positions, features, attend)``. Row i of a sequence holds the target's
features of position i together with the token at position i + 1, at rotary position i, and predicts the token at
position i + 2. What comes out are the features of the next row, so that a chain of guesses feeds on itself. MTP layers
are called the same way, but every one of them takes the target's features; see ``models.mimo_v2_mtp``. DFLASH is
different; see ``models.dflash``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.core.errors import ModelLoadError
from jaxserve.models.config import ModelConfig
from jaxserve.models.layers import apply_rope, linear, rms_norm
from jaxserve.models.llama import Attend

FINAL = -1


@dataclass(frozen=True)
class DraftConfig:
    """Shape of a draft model.

    Attributes:
        algorithm: ``"EAGLE"``, ``"EAGLE3"`` or ``"DFLASH"``.
        decoder: the draft's own decoder; its ``vocab_size`` is the target's.
        target_hidden_size: width of the target's residual stream.
        feature_points: see the module's docstring.
        draft_vocab_size: rows of the draft's logits.
        tied_head: the logits use ``embed_tokens``; otherwise ``lm_head`` is an array, the draft's own or the target's.
        fc_bias: whether ``fc`` has a bias.
        norm_before_residual: EAGLE-3: the residual stream starts with the normed features (as *speculators* trains
            them) instead of the features themselves.
        block_size: DFLASH: tokens of a block, the newest known one included; 0 for others.
        mask_token_id: DFLASH: the token that stands for one to be guessed.
        own: names of shared arrays the draft has a copy of its own of: ``"embed_tokens"``, ``"lm_head"``.
    """

    algorithm: str
    decoder: ModelConfig
    target_hidden_size: int
    feature_points: tuple[int, ...]
    draft_vocab_size: int
    tied_head: bool = False
    fc_bias: bool = False
    norm_before_residual: bool = False
    block_size: int = 0
    mask_token_id: int | None = None
    own: tuple[str, ...] = ()

    @property
    def captured_size(self) -> int:
        """Width of the captured states of a row."""
        return len(self.feature_points) * self.target_hidden_size


class DraftLayer(nnx.Module):
    """Weights of one decoder layer; the norms live in the model.

    Attributes:
        qkv_proj: Float[(heads + 2 * KV heads) * head_dim, inputs]; rows: q heads, k heads, v heads.
        o_proj: Float[hidden, heads * head_dim].
        gate_up_proj: Float[2 * intermediate, hidden]; rows: gate, up.
        down_proj: Float[hidden, intermediate].
        qkv_bias, o_bias: None without ``attention_bias``.
        head_norms: Float[2, head_dim], norms of each q head and k head; None for models without.
    """

    def __init__(self, config: ModelConfig, num_inputs: int, dtype: Any, rngs: nnx.Rngs, head_norms: bool = False):
        hidden, inner = config.hidden_size, config.intermediate_size
        q_size = config.num_heads * config.head_dim
        qkv_size = q_size + 2 * config.num_kv_heads * config.head_dim
        self.qkv_proj = normal(rngs, (qkv_size, num_inputs), dtype)
        self.o_proj = normal(rngs, (hidden, q_size), dtype)
        self.gate_up_proj = normal(rngs, (2 * inner, hidden), dtype)
        self.down_proj = normal(rngs, (hidden, inner), dtype)
        self.qkv_bias = nnx.Param(jnp.zeros((qkv_size,), dtype)) if config.attention_bias else None
        self.o_bias = nnx.Param(jnp.zeros((hidden,), dtype)) if config.attention_bias else None
        self.head_norms = nnx.Param(jnp.ones((2, config.head_dim), dtype)) if head_norms else None

    def attention(self, index: int, config: ModelConfig, h: jax.Array, rope: tuple[jax.Array, jax.Array],
                  attend: Attend) -> jax.Array:  # fmt: skip
        """Float[T, inputs] -> Float[T, hidden], to be added to the residual stream."""
        q_size = config.num_heads * config.head_dim
        qkv = linear(h, self.qkv_proj[...], value_of(self.qkv_bias))
        q = qkv[:, :q_size].reshape(-1, config.num_heads, config.head_dim)
        if self.head_norms is not None:
            q = rms_norm(q, self.head_norms[...][0], config.rms_norm_eps)
        k, v = self.keys_values(config, qkv[:, q_size:], rope)
        attended = attend(index, apply_rope(q, *rope), k, v).reshape(-1, q_size)
        return linear(attended, self.o_proj[...], value_of(self.o_bias))

    def keys_values(
        self, config: ModelConfig, kv: jax.Array, rope: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Projected rows Float[T, 2 * KV heads * head_dim] -> keys, after norm and rotation, and values [T, KV, D]."""
        k, v = jnp.split(kv, 2, axis=1)
        k = k.reshape(-1, config.num_kv_heads, config.head_dim)
        if self.head_norms is not None:
            k = rms_norm(k, self.head_norms[...][1], config.rms_norm_eps)
        return apply_rope(k, *rope), v.reshape(-1, config.num_kv_heads, config.head_dim)

    def feed_forward(self, h: jax.Array) -> jax.Array:
        """Float[T, hidden] -> Float[T, hidden], to be added to the residual stream."""
        gate, up = jnp.split(linear(h, self.gate_up_proj[...]), 2, axis=1)
        return linear(jax.nn.silu(gate) * up, self.down_proj[...])


class DraftModel(nnx.Module):
    """Base of draft models: embedding, head, vocabulary and the projection ``fc``; layers and norms are the subclass's.

    Attributes:
        draft: its ``DraftConfig``; config: the decoder's part of it.
        embed_tokens: Float[vocab, hidden].
        lm_head: Float[draft_vocab, hidden], or None when the embedding serves for the logits.
        target_ids: Int32[draft_vocab], the target id of each draft id, or None when they are the same.
        fc: Float[hidden, inputs]; fc_bias: Float[hidden] or None.
    """

    def __init__(self, draft: DraftConfig, num_fc_inputs: int, dtype: Any, rngs: nnx.Rngs):
        decoder = draft.decoder
        self.draft = draft
        self.config = decoder
        self.embed_tokens = normal(rngs, (decoder.vocab_size, decoder.hidden_size), dtype)
        head_shape = (draft.draft_vocab_size, decoder.hidden_size)
        self.lm_head = None if draft.tied_head else normal(rngs, head_shape, dtype)
        reduced = draft.draft_vocab_size != decoder.vocab_size
        self.target_ids = nnx.Variable(jnp.arange(draft.draft_vocab_size, dtype=jnp.int32)) if reduced else None
        self.fc = normal(rngs, (decoder.hidden_size, num_fc_inputs), dtype)
        self.fc_bias = nnx.Param(jnp.zeros((decoder.hidden_size,), dtype)) if draft.fc_bias else None

    @property
    def feature_points(self) -> tuple[int, ...]:
        """Which states of the target it is given; see the module's docstring."""
        return self.draft.feature_points

    @property
    def draft_vocab_size(self) -> int:
        """Columns of ``logits``."""
        return self.draft.draft_vocab_size

    def head(self, normed: jax.Array) -> jax.Array:
        """Float[R, hidden] -> Float32[R, draft_vocab]."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return linear(normed, head[...], out_dtype=jnp.float32)


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: Any) -> nnx.Param[Any]:
    """A parameter drawn from N(0, 0.02^2)."""
    return nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * jnp.asarray(0.02, dtype))


def value_of(param: nnx.Param[Any] | None) -> jax.Array | None:
    """The array of a parameter that may be absent."""
    return None if param is None else param[...]


# -- vocabulary --------------------------------------------------------------------------------------------------------


def target_ids_of(d2t: np.ndarray | None, t2d: np.ndarray | None, draft_vocab: int, vocab: int) -> np.ndarray | None:
    """The target id of each draft id, from the maps of a checkpoint; None when both vocabularies are the same.

    Args:
        d2t: Int[draft_vocab] offsets, target id = draft id + offset; or None when the checkpoint has none.
        t2d: Bool[vocab], which target ids the draft knows; or None.

    Returns:
        Int32[draft_vocab], strictly increasing.

    Raises:
        ModelLoadError: a map that is missing, of the wrong length, or that contradicts itself, the other map or the
            vocabularies: such a draft would propose unrelated tokens, and nobody would notice.
    """
    remedy = "the draft checkpoint is damaged or belongs to another model; get it again, or train one with train-draft"
    if not 1 <= draft_vocab <= vocab:
        raise ModelLoadError(f"draft vocabulary: wanted 1 .. {vocab} ids (the target's), got {draft_vocab}; {remedy}")
    if d2t is None:
        if draft_vocab == vocab:
            return None
        raise ModelLoadError(
            f"tensor d2t is missing: the draft knows {draft_vocab} of the target's {vocab} ids, and "
            f"d2t says which; {remedy}"
        )
    if d2t.shape != (draft_vocab,) or not np.issubdtype(d2t.dtype, np.integer):
        raise ModelLoadError(
            f"tensor d2t: wanted {draft_vocab} integers (draft_vocab_size), got {d2t.dtype} of shape "
            f"{list(d2t.shape)}; "
            f"{remedy}"
        )
    if t2d is not None and d2t.any() and draft_vocab > 1 and np.array_equal(np.flatnonzero(t2d), d2t):
        raise ModelLoadError(
            "tensor d2t holds target ids, wanted offsets (target id - draft id); subtract 0, 1, 2, ..."
        )
    targets = np.arange(draft_vocab, dtype=np.int64) + d2t.astype(np.int64)
    _check_targets(targets, d2t, vocab, remedy)
    if t2d is not None:
        _check_inverse(targets, d2t, t2d, vocab, remedy)
    elif draft_vocab < vocab and not d2t.any():
        raise ModelLoadError(
            f"tensor d2t is all zeros: the draft would know just the ids 0 .. {draft_vocab - 1} of "
            f"{vocab}, and there is no "
            f"t2d that confirms it; {remedy}"
        )
    return None if draft_vocab == vocab else targets.astype(np.int32)


def _check_targets(targets: np.ndarray, d2t: np.ndarray, vocab: int, remedy: str) -> None:
    outside = np.flatnonzero((targets < 0) | (targets >= vocab))
    if outside.size:
        i = int(outside[0])
        raise ModelLoadError(
            f"tensor d2t: draft id {i} + offset {d2t[i]} = {targets[i]} is outside the target's 0 .. "
            f"{vocab - 1}; {remedy}"
        )
    falling = np.flatnonzero(np.diff(targets) <= 0)
    if falling.size:
        i = int(falling[0])
        raise ModelLoadError(
            f"tensor d2t: target ids must rise strictly, but draft ids {i} and {i + 1} stand for {targets[i]} and "
            f"{targets[i + 1]}; {remedy}"
        )


def _check_inverse(targets: np.ndarray, d2t: np.ndarray, t2d: np.ndarray, vocab: int, remedy: str) -> None:
    if t2d.shape != (vocab,):
        raise ModelLoadError(
            f"tensor t2d: wanted {vocab} entries (the target's vocabulary), got {list(t2d.shape)}; {remedy}"
        )
    known = np.flatnonzero(t2d)
    if np.array_equal(known, targets):
        return
    if known.size != targets.size:
        raise ModelLoadError(
            f"tensor t2d marks {known.size} target ids as known to the draft, d2t has {targets.size}; {remedy}"
        )
    i = int(np.flatnonzero(known != targets)[0])
    raise ModelLoadError(
        f"tensors d2t and t2d contradict each other: draft id {i} stands for {targets[i]} by d2t, "
        f"{known[i]} by t2d; {remedy}"
    )

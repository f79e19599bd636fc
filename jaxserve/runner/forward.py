"""The model's part of a step program, from token ids to what is sampled from: by XLA, or as one captured step."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.attention.base import AttentionBackend, AttentionStep, attend_layer
from jaxserve.attention.native import tree_operands
from jaxserve.attention.paged_cuda import num_splits
from jaxserve.runner.captured_steps import CapturedSteps
from jaxserve.runner.handover import observed_call


class Forward(NamedTuple):
    """What a model computes of B rows of Q tokens.

    Attributes:
        hidden: [B * Q, hidden], final hidden states; None in a captured step.
        logits: Float32[B * Q, vocab] of a captured step; None otherwise: the caller picks rows first.
        features: [B * Q, F], what was observed at ``feature_points``, side by side; None if there are none.
        keys, values: per layer [B, Q, KV, D], for the pool.
    """

    hidden: jax.Array | None
    logits: jax.Array | None
    features: jax.Array | None
    keys: list[jax.Array]
    values: list[jax.Array]

    def scores(self, model: Any, rows: jax.Array | None = None) -> jax.Array:
        """Logits Float32[R, vocab] of these of the B * Q rows, or of all."""
        if self.logits is not None:
            return self.logits if rows is None else self.logits[rows]
        assert self.hidden is not None
        return model.logits(self.hidden if rows is None else self.hidden[rows])


def forward(
    model: Any, backend: AttentionBackend, step: AttentionStep, tokens: jax.Array, positions: jax.Array,
    feature_points: tuple[int, ...],
) -> Forward:  # fmt: skip
    """Computed by the model's own code, whose attention calls come back to the backend.

    Args:
        tokens, positions: int32[B, Q].
        feature_points: see ``models.draft``.
    """
    shape = step.shape
    keys: list[jax.Array] = []
    values: list[jax.Array] = []

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
        q, k, v = [x.reshape(shape.batch, shape.queries, *x.shape[1:]) for x in (q, k, v)]
        keys.append(k)
        values.append(v)
        return attend_layer(backend, step, layer, q, k, v, sinks).reshape(-1, *q.shape[2:])

    hidden, features = observed_call(model, tokens.reshape(-1), positions.reshape(-1), attend, feature_points)
    return Forward(hidden, None, features, keys, values)


def captured_forward(
    captured: CapturedSteps, model: Any, step: AttentionStep, tokens: jax.Array, positions: jax.Array,
    feature_points: tuple[int, ...],
) -> Forward:  # fmt: skip
    """The same, as one launch of a CUDA graph that our extension captures (``csrc/cuda/decoder``).

    Makes room for the step while it is traced. Arguments as ``forward``.
    """
    shape, pool = step.shape, step.pool.data
    num_layers, _, kv_heads, _, page_size, dim = pool.shape
    parts = model.decoder_parts(positions.reshape(-1))
    heads, inner = parts.layers[0].o.shape[1] // dim, parts.layers[0].down.shape[1]
    vocab, hidden = parts.embedding.shape
    splits = num_splits(shape.batch, kv_heads, shape.queries * heads // kv_heads, shape.table_width * page_size)
    captured.reserve(
        batch=shape.batch, queries=shape.queries, vocab=vocab, hidden=hidden, inner=inner, heads=heads,
        kv_heads=kv_heads, dim=dim, table_width=shape.table_width, splits=splits, is_tree=step.tree is not None,
        num_layers=num_layers, num_points=len(feature_points),
    )  # fmt: skip
    new = jax.ShapeDtypeStruct((num_layers, shape.batch, shape.queries, kv_heads, dim), jnp.bfloat16)
    results = [jax.ShapeDtypeStruct((tokens.size, vocab), jnp.float32), new, new]
    if feature_points:
        results.append(jax.ShapeDtypeStruct((tokens.size, len(feature_points) * hidden), jnp.bfloat16))
    none = jnp.zeros(0, jnp.bfloat16)
    weights = [none if x is None else x for layer in parts.layers for x in layer]
    windows = [window or 0 for window in step.windows]
    call = jax.ffi.ffi_call(captured.target, results)
    logits, keys, values, *features = call(
        tokens, parts.cosines, parts.sines, step.metadata.block_tables, step.metadata.lengths,
        *tree_operands(step, window=0), pool, parts.embedding, parts.norms,
        none if parts.head_norms is None else parts.head_norms, parts.lm_head, *weights,
        steps=np.int64(captured.number), kv_heads=np.int64(kv_heads), dim=np.int64(dim), splits=np.int64(splits),
        eps=np.float32(model.config.rms_norm_eps), windows=np.array(windows, np.int64),
        points=np.array(feature_points, np.int64),
    )  # fmt: skip
    return Forward(None, logits, features[0] if features else None, list(keys), list(values))

"""The pieces decoder models are made of: linear maps, norms and rotary embeddings.

Weights are stored as in checkpoints, ``[out, in]``. Activations are ``[T, features]`` for T token rows.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.skinny_matmul import runs_skinny, skinny_matmul

# Row counts for which XLA on a CPU multiplies faster with features as rows. Measured with 40 distinct float32 weights
# of [1152, 1536] in one program, jax 0.10.2 and 0.12: 1.2 to 1.8 times faster from 2 to 32 rows, equal from 48 on. In
# float32 the fewest of these rows are the own kernel's, which is faster still.
FEATURE_MAJOR_ROWS = range(2, 33)


def linear(x: jax.Array, w: jax.Array, bias: jax.Array | None = None, out_dtype: Any = None) -> jax.Array:
    """``x @ w.T + bias``, by the kernel or in the memory layout that suits the number of rows and the backend.

    Args:
        x: Float[T, in].
        w: Float[out, in].
        bias: Float[out] or None.
        out_dtype: dtype of the result; by default that of ``x``.

    Returns:
        Float[T, out].
    """
    out_dtype = x.dtype if out_dtype is None else out_dtype
    contract_last = (((1,), (1,)), ((), ()))
    if runs_skinny(x, w, out_dtype):
        y = skinny_matmul(x, w)
    elif x.shape[0] in FEATURE_MAJOR_ROWS and jax.default_backend() == "cpu":
        # Without the barrier XLA turns this back into the row-major form. One on x.T too would make XLA copy it, which
        # costs more than the layout gains.
        y = jax.lax.optimization_barrier(jnp.matmul(w, x.T, preferred_element_type=out_dtype)).T
    else:
        y = jax.lax.dot_general(x, w, contract_last, preferred_element_type=out_dtype)
    return y if bias is None else y + bias.astype(out_dtype)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm (Zhang and Sennrich 2019), computed in float32.

    Args:
        x: Float[T, features].
        weight: Float[features].

    Returns:
        Float[T, features] in the dtype of ``x``.
    """
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return weight.astype(x.dtype) * wide.astype(x.dtype)


def rope_inverse_frequencies(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> np.ndarray:
    """Rotations per position and radian, ``theta ** (-2 i / head_dim)``, scaled as the model asks.

    ``llama3`` (Meta's Llama 3.1 reference code) divides long wavelengths by ``factor``, keeps short ones and blends in
    between. ``linear`` divides all by ``factor``; ``frequency_factors`` (in GGUF files) divides each by its own.

    Returns:
        Float32[head_dim / 2].
    """
    inverse = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    kind = "default" if scaling is None else scaling["rope_type"]
    if scaling is None or kind == "default":
        pass
    elif kind == "linear":
        inverse = inverse / scaling["factor"]
    elif kind == "frequency_factors":
        factors = np.asarray(scaling["factors"], dtype=np.float64)
        if factors.shape != inverse.shape:
            raise ValueError(f"frequency factors: wanted {inverse.size} of them, got shape {factors.shape}")
        inverse = inverse / factors
    elif kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * inverse / (2 * math.pi)
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        inverse = inverse * (kept + (1 - kept) / scaling["factor"])
    else:
        raise ValueError(f"rope type {kind!r} is not supported")
    return inverse.astype(np.float32)


def rope_tables(positions: jax.Array, inverse_frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of each row's angles.

    Args:
        positions: Int32[T].
        inverse_frequencies: Float32[head_dim / 2].

    Returns:
        Two of Float32[T, 1, head_dim / 2].
    """
    # On a CPU, XLA would compute them anew in every layer, for q and for k: 0.2 ms at 4 rows and 30 layers, ten times
    # what they cost once. It fuses nothing across a conditional (but does across a barrier), and can't know that
    # positions are never negative.
    shape = (positions.shape[0], 1, len(inverse_frequencies))

    def once(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.cond(
            positions[0] >= 0,
            lambda: _rope_tables(positions, inverse_frequencies),
            lambda: (jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32)),
        )

    return jax.lax.platform_dependent(
        positions, cpu=once, default=lambda positions: _rope_tables(positions, inverse_frequencies)
    )


def _rope_tables(positions: jax.Array, inverse_frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    angles = positions.astype(jnp.float32)[:, None, None] * jnp.asarray(inverse_frequencies)
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates each pair (i, i + rotary_dim / 2), the pairing of Hugging Face checkpoints.

    Args:
        x: Float[T, heads, head_dim].
        cos, sin: Float32[T, 1, rotary_dim / 2]. Features from ``rotary_dim`` on, if any, stay as they are.

    Returns:
        Float[T, heads, head_dim] in the dtype of ``x``.
    """
    rotary_dim = 2 * cos.shape[-1]
    first, second = jnp.split(x[..., :rotary_dim].astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return rotated if rotary_dim == x.shape[-1] else jnp.concatenate([rotated, x[..., rotary_dim:]], axis=-1)

"""The two memory layouts of a linear map give the same numbers, and XLA keeps the one that was asked for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.layers import FEATURE_MAJOR_ROWS, linear, rms_norm


@pytest.mark.parametrize("num_rows", [1, 2, 5, 8, 32, 33])
def test_linear_is_the_same_in_every_layout(num_rows: int) -> None:
    random = np.random.default_rng(num_rows)
    x, w, bias = (random.standard_normal(s).astype(np.float32) for s in ((num_rows, 24), (10, 24), (10,)))
    np.testing.assert_allclose(jax.jit(linear)(x, w, bias), x @ w.T + bias, atol=1e-5)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the layout is chosen on CPU only")
def test_barrier_keeps_features_as_rows() -> None:
    num_rows = FEATURE_MAJOR_ROWS[-1]
    compiled = jax.jit(lambda x, w: linear(x, w) * 2).lower(jnp.ones((num_rows, 24)), jnp.ones((10, 24))).compile()
    dots = [line for line in compiled.as_text().splitlines() if " dot(" in line or "matmul" in line]
    assert dots
    assert all(f"f32[10,{num_rows}]" in line for line in dots), dots


def test_output_dtype() -> None:
    x, w = jnp.ones((3, 4), jnp.bfloat16), jnp.ones((2, 4), jnp.bfloat16)
    assert linear(x, w).dtype == jnp.bfloat16
    assert linear(x, w, out_dtype=jnp.float32).dtype == jnp.float32


def test_norm_is_computed_in_float32() -> None:
    x = jnp.full((1, 4), 300.0, jnp.float16)  # its square overflows float16
    np.testing.assert_allclose(rms_norm(x, jnp.full(4, 2.0, jnp.float16), 1e-6), np.full((1, 4), 2.0))

"""The kernel for products with few rows: its numbers, their independence of neighbours, and where it is used."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxserve.models.skinny_matmul as skinny
from jaxserve.barrier.native import native_module
from jaxserve.core.errors import ConfigError
from jaxserve.models.layers import linear

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the kernel is the CPU's")
MOST = skinny.SKINNY_ROWS[-1]
# (in, out): nothing divides by the 16 lanes, the 4 rows of a block or the rows of a task; one lane; several tasks
SHAPES = [(1, 1), (15, 3), (16, 4), (17, 5), (64, 64), (129, 31), (576, 577), (1536, 131), (4100, 67), (70_000, 9)]


def operands(rows: int, size: int, out: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng([rows, size, out])
    return random.standard_normal((rows, size), np.float32), random.standard_normal((out, size), np.float32)


def is_kernel(fn, *arguments) -> bool:
    return skinny.TARGET in jax.jit(fn).lower(*arguments).compile().as_text()


@pytest.mark.parametrize(("size", "out"), SHAPES)
def test_values_equal_float64(size: int, out: int) -> None:
    for rows in (1, 2, 3, 4, 7, 8, 9, 13, MOST):
        x, w = operands(rows, size, out)
        exact = x.astype(np.float64) @ w.astype(np.float64).T
        # Each product is summed up at most size / 16 + 20 times; rounding grows with the sum of magnitudes.
        bound = (size / 16 + 20) * np.finfo(np.float32).eps * (np.abs(x).astype(np.float64) @ np.abs(w).T)
        assert (np.abs(np.asarray(linear(x, w)) - exact) <= bound).all(), rows


@pytest.mark.parametrize(("size", "out"), [(576, 960), (1536, 577), (129, 31)])
def test_a_row_is_the_same_whatever_is_beside_it(size: int, out: int) -> None:
    """Bit for bit, from one row to sixteen, on one thread or several."""
    x, w = operands(MOST, size, out)
    alone = np.concatenate([np.asarray(linear(x[i : i + 1], w)) for i in range(MOST)])
    for rows in range(2, MOST + 1):
        np.testing.assert_array_equal(linear(x[:rows], w), alone[:rows], err_msg=str(rows))
        np.testing.assert_array_equal(linear(x[MOST - rows :], w), alone[MOST - rows :], err_msg=str(rows))


def test_not_a_number_stays_in_its_row_and_column() -> None:
    x, w = operands(5, 33, 7)
    x[1, 32] = np.nan
    w[4, 0] = np.inf
    found = np.isfinite(linear(x, w))
    expected = np.ones((5, 7), bool)
    expected[1] = expected[:, 4] = False
    np.testing.assert_array_equal(found, expected)


def test_few_float32_rows_are_the_kernels_and_others_are_not() -> None:
    for rows in (1, 2, MOST):
        assert is_kernel(linear, *operands(rows, 64, 32))
    assert not is_kernel(linear, *operands(MOST + 1, 64, 32))
    x, w = operands(4, 64, 32)
    assert not is_kernel(linear, x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))
    assert not is_kernel(lambda x, w: linear(x, w, out_dtype=jnp.bfloat16), x, w)


def test_a_program_for_a_gpu_has_a_plain_product() -> None:
    traced = jax.jit(linear).trace(*operands(4, 64, 32))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.dot_general" in text and skinny.TARGET not in text


def test_derivatives_and_vmap_are_those_of_a_product() -> None:
    x, w = operands(3, 20, 6)

    def loss(product):
        return jax.grad(lambda x, w: jnp.sum(jnp.sin(product(x, w))), (0, 1))

    for found, expected in zip(loss(linear)(x, w), loss(lambda x, w: x @ w.T)(x, w), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4)
    stacked = np.stack([x, 2 * x])
    np.testing.assert_allclose(jax.vmap(linear, (0, None))(stacked, w), stacked @ w.T, atol=1e-4)
    weights = np.stack([w, -w])
    np.testing.assert_allclose(jax.vmap(linear, (None, 0))(x, weights), np.stack([x @ w.T, -x @ w.T]), atol=1e-4)


def test_shapes_that_do_not_match_are_refused() -> None:
    native_module("cpu")
    call = jax.ffi.ffi_call(skinny.TARGET, jax.ShapeDtypeStruct((2, 5), jnp.float32))
    with pytest.raises(Exception, match=r"x \[rows, in\], w \[out, in\] and y do not match"):
        jax.block_until_ready(call(np.zeros((2, 8), np.float32), np.zeros((4, 8), np.float32)))


class _Without:
    """An extension that was built before the kernel was written."""

    def handlers(self) -> dict:
        return {"jaxserve_snapshot": None}


@pytest.fixture
def forgotten() -> Iterator[None]:
    skinny.skinny_unavailable.cache_clear()
    yield
    skinny.skinny_unavailable.cache_clear()


@pytest.mark.parametrize("reason", ["older", "not built"])
def test_without_the_kernel_xla_multiplies_and_the_log_says_so_once(
    reason: str, forgotten: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def found(platform: str) -> _Without:
        if reason == "not built":
            raise ConfigError("jaxserve._cpu is not built")
        return _Without()

    monkeypatch.setattr(skinny, "native_module", found)
    x, w = operands(4, 64, 32)
    with caplog.at_level(logging.WARNING):
        assert not is_kernel(lambda x, w: linear(x, w), x, w)
        np.testing.assert_allclose(linear(x, w), x @ w.T, atol=1e-4)
    assert [reason in record.message for record in caplog.records] == [True]

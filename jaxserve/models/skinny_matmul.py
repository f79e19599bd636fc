"""Products with few rows by the kernel in ``csrc/``: what decode and verify steps on the CPU are made of.

Reading the weights is what costs there, and the kernel reads them once for up to sixteen rows. A result is summed in an
order that depends on the length of the sum alone: a token's row is bit for bit the same whatever rows are beside it.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jaxserve.barrier.native import native_module
from jaxserve.core.errors import ConfigError

log = logging.getLogger(__name__)

TARGET = "jaxserve_skinny_matmul"
SKINNY_ROWS = range(1, 17)  # beyond it computing costs more than reading, and XLA computes better

_skinny_p = Primitive("jaxserve_skinny_matmul")


@functools.cache
def skinny_unavailable() -> str:
    """Why the kernel cannot be used in this process; empty if it can. Says it in the log, too, once."""
    try:
        has_target = TARGET in native_module("cpu").handlers()
        reason = "" if has_target else "jaxserve._cpu is older than this package; rebuild it (see BUILD.md)"
    except ConfigError as error:
        reason = str(error)
    if reason:
        log.warning("XLA multiplies few rows, which takes up to 1.7 times as long: %s", reason)
    return reason


def runs_skinny(x: jax.Array, w: jax.Array, out_dtype: Any) -> bool:
    """Whether ``skinny_matmul`` serves this product."""
    shapes = x.ndim == 2 and x.shape[0] in SKINNY_ROWS
    dtypes = all(jnp.dtype(dtype) == jnp.float32 for dtype in (x.dtype, w.dtype, out_dtype))
    return shapes and dtypes and jax.default_backend() == "cpu" and not skinny_unavailable()


@jax.custom_jvp
def skinny_matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """``x @ w.T``: Float32[T, in] and Float32[out, in] give Float32[T, out]. Derivatives and ``vmap`` are XLA's."""
    return _bind(x, w)


@skinny_matmul.defjvp
def _derivative(primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    (x, w), (dx, dw) = primals, tangents
    return skinny_matmul(x, w), _by_xla(dx, w) + _by_xla(x, dw)


@functools.partial(jax.jit, inline=True)
def _bind(x: jax.Array, w: jax.Array) -> jax.Array:
    return _skinny_p.bind(x, w)


def _by_xla(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))


@_skinny_p.def_abstract_eval
def _abstract_eval(x: Any, w: Any) -> jax.core.ShapedArray:
    return jax.core.ShapedArray((x.shape[0], w.shape[0]), jnp.float32)


def _batched(operands: tuple[jax.Array, ...], axes: tuple[int | None, ...]) -> tuple[jax.Array, int]:
    return jax.vmap(_by_xla, axes)(*operands), 0


batching.primitive_batchers[_skinny_p] = _batched
mlir.register_lowering(_skinny_p, jax.ffi.ffi_lowering(TARGET), platform="cpu")
# A program traced here may be compiled for another platform.
mlir.register_lowering(_skinny_p, mlir.lower_fun(_by_xla, multiple_results=False))

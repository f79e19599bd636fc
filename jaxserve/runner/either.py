"""A choice that the device makes, without making the host wait for it."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

# Which of the two is being traced. Without it a choice within a choice would be traced for both at every level.
_traced: contextvars.ContextVar[str | None] = contextvars.ContextVar("traced", default=None)


def either(predicate: jax.Array, changed: Callable[..., Any], unchanged: Callable[..., Any], *operands: Any) -> Any:
    """``changed(*operands)`` if ``predicate`` bool[] holds, else ``unchanged(*operands)``; trees of equal shapes.

    On a CPU a conditional, so what is not chosen costs nothing. On a GPU XLA's conditional copies its predicate to the
    host and waits for it inside the dispatch, and so for every step in flight: there both are computed, one is taken.
    """

    def by_conditional(predicate: jax.Array, *operands: Any) -> Any:
        with _tracing("conditional"):
            return jax.lax.cond(predicate, changed, unchanged, *operands)

    def by_selection(predicate: jax.Array, *operands: Any) -> Any:
        with _tracing("selection"):
            return jax.tree.map(lambda a, b: jnp.where(predicate, a, b), changed(*operands), unchanged(*operands))

    outer = _traced.get()
    if outer is not None:
        return {"conditional": by_conditional, "selection": by_selection}[outer](predicate, *operands)
    return jax.lax.platform_dependent(predicate, *operands, cpu=by_conditional, default=by_selection)


@contextlib.contextmanager
def _tracing(way: str) -> Iterator[None]:
    token = _traced.set(way)
    try:
        yield
    finally:
        _traced.reset(token)

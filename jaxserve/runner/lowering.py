"""Lowering of functions whose arguments all stay arguments of the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax._src.interpreters import pxla


def lower_with_all_arguments(function: Callable, arguments: tuple, donate: tuple[int, ...]) -> Any:
    """``function`` for these abstract arguments, unused ones included, as ``jax.stages.Lowered``.

    Every program of a kind then takes the same list, and parameter numbers mean the same.

    Args:
        donate: positions of donated arguments.
    """
    traced = jax.jit(function, donate_argnums=donate, keep_unused=True).trace(*arguments)
    lowered = traced.lower()
    _forget(traced.jaxpr)
    return lowered


def _forget(jaxpr: Any) -> None:
    """Lets programs be freed when nobody holds them any more.

    jax 0.12 keeps, for as long as a traced function lives, what is left of it without unused arguments. Where these
    stay that is the function itself, so it lived for ever and its executable with it: a hundred memory mappings of the
    65530 that a process may have, and with none left loading another program ends the process.
    """
    evict = getattr(getattr(pxla, "_dce_jaxpr", None), "evict_weakref", None)
    if evict is not None:
        evict(jaxpr)

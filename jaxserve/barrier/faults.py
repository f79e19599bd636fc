"""Fault injection: places in Python where a test can make an operation fail (``csrc/common/faults.h`` has the rest)."""

from __future__ import annotations

import jax

from jaxserve.barrier.native import native_module


def pass_fault(kind: str, place: str) -> None:
    """Called where an operation of ``kind`` begins: "launch", "dispatched" or "collect".

    Raises:
        RuntimeError: a test told this one to fail (native ``InjectedFault``).
    """
    native_module(jax.default_backend()).faults.pass_through(kind, place)

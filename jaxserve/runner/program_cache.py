"""Compiled programs by key: everything is compiled at start, nothing afterwards."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax

from jaxserve.core.errors import JaxserveError
from jaxserve.runner.graph_mode import GraphMode
from jaxserve.runner.lowering import lower_with_all_arguments
from jaxserve.runner.step_program import ProgramKey

log = logging.getLogger(__name__)


class RetraceError(JaxserveError):
    """A launch whose arguments do not fit the compiled program; the message names the argument."""


def _describe(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if hasattr(value, "dtype") else repr(value)


class ProgramCache:
    """Programs of one kind (step or prep), compiled ahead of time.

    Args:
        kind: name used in messages.
        make: key -> traceable function.
        arguments: key -> the abstract arguments it is compiled for.
        names: what messages call the arguments.
        donate: positions of donated arguments.
        late: called with a label when a program is compiled after warm-up (to count and log it).
        graph: what programs are compiled with; None: XLA's defaults.

    Attributes:
        num_compiled, compile_seconds: programs compiled, or fetched from the persistent cache, and the time that took.
        num_late: those of them that were compiled after warm-up.
        num_retraces: launches refused because an argument did not fit.
    """

    def __init__(self, kind: str, make: Callable[[ProgramKey], Callable], arguments: Callable[[ProgramKey], tuple],
                 names: tuple[str, ...], donate: tuple[int, ...], late: Callable[[str], None],
                 graph: GraphMode | None = None):  # fmt: skip
        self.kind = kind
        self._make = make
        self._arguments = arguments
        self._names = names
        self.donate = donate
        self._late = late
        self.graph = graph or GraphMode()
        self._compiled: dict[ProgramKey, Any] = {}
        self.warm = False
        self.num_compiled = 0
        self.compile_seconds = 0.0
        self.num_late = 0
        self.num_retraces = 0

    def get(self, key: ProgramKey) -> Any:
        """The compiled program of ``key``; compiles it if it is new, and says so once warm."""
        program = self._compiled.get(key)
        if program is None:
            if self.warm:
                self.num_late += 1
                self._late(f"{self.kind} {key.label}")
            start = time.monotonic()
            program = self._compiled[key] = self.lower(key).compile(compiler_options=dict(self.graph.options) or None)
            self.num_compiled += 1
            self.compile_seconds += time.monotonic() - start
        return program

    def lower(self, key: ProgramKey) -> Any:
        """The lowered program of ``key`` (``jax.stages.Lowered``), for compilation or inspection."""
        function, arguments = self.traceable(key)
        with self.graph.tracing(key.shape.mode):
            return lower_with_all_arguments(function, arguments, self.donate)

    def traceable(self, key: ProgramKey) -> tuple[Callable, tuple]:
        """The function of ``key`` and its abstract arguments, for whoever compiles it for another machine."""
        function = self._make(key)
        function.__name__ = f"{self.kind}_{key.shape.mode.name.lower()}_{key.shape.batch}x{key.shape.queries}"
        return function, self._arguments(key)

    def call(self, key: ProgramKey, *arguments: Any) -> Any:
        """Launches the program of ``key``.

        Raises:
            RetraceError: an argument's shape or dtype differs from what was compiled.
        """
        program = self.get(key)
        try:
            return program(*arguments)
        except TypeError as error:
            message = self._explain(key, arguments) or f"{self.kind} {key.label}: {error}"
            self.num_retraces += 1
            log.error("%s; the step was not launched", message)
            raise RetraceError(message) from error

    def _explain(self, key: ProgramKey, arguments: tuple) -> str:
        wanted, _ = jax.tree_util.tree_flatten_with_path(self._arguments(key))
        found, _ = jax.tree_util.tree_flatten_with_path(arguments)
        for (path, want), (_, got) in zip(wanted, found, strict=False):
            if want.shape != got.shape or want.dtype != got.dtype:
                name = self._names[path[0].idx] + jax.tree_util.keystr(path[1:])
                return f"{self.kind} {key.label} retraced: {name} {_describe(got)}, was {_describe(want)}"
        return ""

    def warm_up(self, keys: Iterable[ProgramKey], progress: Callable[[str, float], None]) -> None:
        """Compiles every key, reporting (label, seconds) after each."""
        for key in keys:
            start = time.monotonic()
            self.get(key)
            progress(f"{self.kind} {key.label}", time.monotonic() - start)

    def keys(self) -> list[ProgramKey]:
        """The keys compiled so far."""
        return list(self._compiled)

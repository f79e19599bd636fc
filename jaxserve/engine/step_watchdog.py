"""Notices a step that does not come back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StepWatchdog:
    """Calls ``on_stall`` once, with a message and from a thread of its own, when a watched step takes too long.

    Compiling counts: a program that is compiled while serving must be ready within the time.
    """

    def __init__(self, timeout_s: float, on_stall: Callable[[str], None]):
        self._timeout_s = timeout_s
        self._on_stall = on_stall
        self._since: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="jaxserve-watchdog", daemon=True)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around a step."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    def close(self) -> None:
        """Ends the thread soon. Idempotent."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self._timeout_s / 4)):
            since = self._since
            if since is not None and time.monotonic() - since > self._timeout_s:
                self._on_stall(f"a step has not come back within {self._timeout_s:g} s (--watchdog-timeout)")
                return

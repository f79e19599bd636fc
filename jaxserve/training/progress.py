"""A line that says how far something is, how fast it goes and when it will be done."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_WIDTH = 24


class Progress:
    """Counts tokens towards a total. On a terminal the line is rewritten in place, elsewhere printed now and then.

    Args:
        what: what is being done.
        total: tokens to do in all.
        done: tokens already there, which do not count for the speed.
    """

    def __init__(self, what: str, total: int, done: int = 0, output: TextIO | None = None):
        self._what, self._total, self._done, self._begun_at = what, max(total, 1), done, done
        self._output = sys.stderr if output is None else output
        self._live = self._output.isatty()
        self._start = time.monotonic()
        self._shown = -float("inf")

    @property
    def tokens_per_s(self) -> float:
        """Mean speed so far."""
        return (self._done - self._begun_at) / max(time.monotonic() - self._start, 1e-9)

    def add(self, tokens: int, note: str = "") -> None:
        """Counts tokens and shows the line if it is time to."""
        self._done += tokens
        now = time.monotonic()
        if now - self._shown >= (0.2 if self._live else 15.0):
            self._shown = now
            self._show(note)

    def close(self, note: str = "") -> None:
        """Shows the last state and ends the line."""
        self._show(note)
        if self._live:
            self._output.write("\n")

    def _show(self, note: str) -> None:
        part = min(self._done / self._total, 1.0)
        bar = "#" * int(part * _WIDTH)
        speed = self.tokens_per_s
        left = max(self._total - self._done, 0) / speed if speed > 0 else 0.0
        text = (
            f"{self._what} [{bar:<{_WIDTH}}] {part:4.0%} {self._done}/{self._total} tokens {speed:.0f} tok/s "
            f"ETA {int(left) // 60}:{int(left) % 60:02}{' ' * bool(note)}{note}"
        )
        self._output.write(f"\r\x1b[K{text}" if self._live else text + "\n")
        self._output.flush()

"""The flag ``--trace``, and signals that end a command so that its trace is still written."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn


def add_trace_flag(parser: argparse.ArgumentParser) -> None:
    """Adds ``--trace``."""
    text = "write a timeline for Perfetto when the command ends, as .json or .json.gz (see docs/timeline.md)"
    parser.add_argument("--trace", metavar="PATH", help=text)


def trace_path(arguments: argparse.Namespace) -> Path | None:
    """The checked path, or None without the flag.

    Raises:
        ConfigError: nothing can be written there.
    """
    if arguments.trace is None:
        return None
    from jaxserve.timeline.trace import check_trace_path  # imports jax

    return check_trace_path(arguments.trace)


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP inside leave as Ctrl-C does, with exit code 128 + signal, instead of ending the process."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL]
    before = {}
    with contextlib.suppress(ValueError):  # not the main thread: whoever runs us has the signals
        before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""A sign of life while a model loads."""

from __future__ import annotations

import sys

from jaxserve.core.config import EngineConfig


def say_loading(config: EngineConfig) -> None:
    """One line for whoever watches; nothing when stderr is a file."""
    if sys.stderr.isatty():
        print(f"loading {config.model!r} ...", file=sys.stderr, flush=True)

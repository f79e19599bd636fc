"""Files a bench is asked to write: refused before it runs, not after."""

from __future__ import annotations

import argparse
import importlib.util

from jaxserve.core.errors import ConfigError

PLOTS = (".png", ".svg", ".pdf")


def check_files(arguments: argparse.Namespace) -> None:
    """Raises ConfigError if a file that is asked for could not be written later."""
    plot = getattr(arguments, "plot", None)
    for flag, path in (
        ("--json", arguments.json),
        ("--table", getattr(arguments, "table", None)),
        ("--plot", plot),
    ):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{flag} {path}: there is no folder {path.parent}; make it first")
    if plot is None:
        return
    if plot.suffix not in PLOTS:
        raise ConfigError(f"--plot {plot}: the name must end in {', '.join(PLOTS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; pip install 'jaxserve[plot]', or use --json and --table")

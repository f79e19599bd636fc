"""Reads what ``jaxserve check-programs --json`` wrote."""

from __future__ import annotations

import json
from pathlib import Path

from jaxserve.core.errors import ConfigError

HOW = "make it with: jaxserve check-programs MODEL --target h100 --json > FILE"


def graph_splits(path: Path) -> dict[str, int]:
    """Program -> places where its CUDA graph is interrupted.

    Raises:
        ConfigError: the file cannot be read, is something else, or is about the CPU, which has no such graphs.
    """
    try:
        reports = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        found = {report["name"]: len(report["graphs"]["splits"]) for report in reports if report["graphs"] is not None}
    except OSError as error:
        raise ConfigError(f"--program-report {path}: {error.strerror}; {HOW}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--program-report {path}: not the output of check-programs --json ({error}); {HOW}"
        ) from error
    if not found:
        raise ConfigError(f"--program-report {path}: names no program with CUDA graphs, as on the CPU; {HOW}")
    return found

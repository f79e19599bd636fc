"""The comparison bench's numbers as text."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxserve.bench.machine import sentence
from jaxserve.bench.table import median, table

HEAD = ("model", "batch", "way", "ms a step", "p99", "host ms", "tokens/s", "of bandwidth", "operations",
        "held up, fine", "coarse", "coarse ms a step", "graph MiB", "launches a step",
        "updates a step", "replay ms", "compile s")  # fmt: skip
ABSENT = "-"


def whole(found: dict[str, Any]) -> str:
    """A table per model, what it was measured on, and what was left out."""
    models = list(dict.fromkeys(cell["model"] for cell in found["cells"]))
    parts = [table(model, HEAD[1:], [_row(c)[1:] for c in found["cells"] if c["model"] == model]) for model in models]
    parts.append(_about(found))
    return "\n".join(parts)


def summary(found: dict[str, Any]) -> str:
    """A short table."""
    columns = [HEAD.index(name) for name in ("model", "batch", "way", "ms a step", "p99", "host ms", "tokens/s",
                                             "of bandwidth")]  # fmt: skip
    rows = [[_row(cell)[i] for i in columns] for cell in found["cells"]]
    return table("bench compare", [HEAD[i] for i in columns], rows) + "\n" + _about(found)


def _row(cell: dict[str, Any]) -> list[str]:
    way = cell["way"] if cell["mode"] in cell["way"] else f"{cell['way']} ({cell['mode']})"
    return [
        cell["model"], str(cell["batch"]), way, f"{median(cell['step_ms']):.2f}",
        f"{np.percentile(cell['step_ms'], 99):.2f}", _number(cell["host_ms"], 2), f"{cell['tokens_per_s']:.0f}",
        f"{100 * cell['roofline']:.0f} %", _number(cell["operations"], 0), _times(cell["held_up_fine_ms"]),
        _times(cell["held_up_coarse_ms"]), _number(cell["coarse_step_ms"], 2), _number(cell["graph_mib"], 0),
        *_calls(cell), _number(cell["replay_ms"], 2), _made_s(cell),
    ]  # fmt: skip


def _number(value: list[float] | float | None, digits: int) -> str:
    if value is None:
        return ABSENT
    return f"{median(value) if isinstance(value, list) else value:.{digits}f}"


def _calls(cell: dict[str, Any]) -> tuple[str, str]:
    """Launches and updates a step. Where no graph was seen to be launched, that none was updated says nothing."""
    calls, captured = cell["calls"], cell["captured"]
    launches = updates = ABSENT
    if calls is not None:
        launches, updated = (f"{calls[what] / calls['num_steps']:.1f}" for what in ("driver_launches", "updated"))
        updates = updated if calls["launched"] else ABSENT
    if captured is not None:  # these graphs are not XLA's
        updates = f"{captured['moved'] / max(1, captured['uncaptured'] + captured['replayed']):.1f}"
    return launches, updates


def _made_s(cell: dict[str, Any]) -> str:
    """Seconds that programs took to compile, and graphs of ours to capture."""
    captured = cell["captured"]
    return f"{cell['compile_s'] + (0 if captured is None else captured['capture_ns'] / 1e9):.1f}"


def _times(values: list[float] | None) -> str:
    return ABSENT if values is None else f"{median(values):.3f} ms"


def _about(found: dict[str, Any]) -> str:
    machine = found["machine"]
    lines = [
        f"{machine['device']} ({machine['platform']}), {found['bandwidth'] / 1e9:.0f} GB/s read in the same run. "
        + sentence(machine) + ".",
        ", ".join(f"{name} {version}" for name, version in found["versions"].items()) + ".",
    ]  # fmt: skip
    lines += [f"left out: {what}: {why}" for what, why in found["left_out"].items()]
    return "\n".join(lines)

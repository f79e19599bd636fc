"""The fence bench's numbers as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.bench.fence import WAYS
from jaxserve.bench.machine import sentence
from jaxserve.bench.table import median, spread, table

UNITS = ((1 << 20, "MB"), (1 << 10, "KB"))


def bytes_text(count: float) -> str:
    """``17 MB``, ``2.4 KB``, ``140 B``."""
    for unit, name in UNITS:
        if count >= unit:
            return f"{count / unit:.{0 if count >= 10 * unit else 1}f} {name}"
    return f"{count:.0f} B"


def headline(found: dict[str, Any]) -> str:
    """Four lines at the largest batch: quickest and slowest model, smallest and largest rows."""
    cells = [cell for cell in found["cells"] if cell["batch"] == max(found["settings"]["batches"])]
    models = list(dict.fromkeys(cell["model"] for cell in cells))
    sizes = sorted({cell["shared_bytes"] for cell in cells})
    rows = []
    for model in dict.fromkeys((models[0], models[-1])):
        for size in dict.fromkeys((sizes[0], sizes[-1])):
            for cell in cells:
                if (cell["model"], cell["shared_bytes"]) == (model, size):
                    rows.append(_compact(cell))
    return table("In short", _COMPACT, rows)


_COMPACT = ("model", "batch", "shared rows", "upload, ms a step", "functional", "in place, coarse", "in place, fine",
            "writes held up, coarse", "fine")  # fmt: skip


def _compact(cell: dict[str, Any]) -> list[str]:
    ways = cell["ways"]
    held = [ways[way]["held_up_ms"] for way in ("coarse", "fine")]
    return [
        cell["model"], str(cell["batch"]), bytes_text(cell["shared_bytes"]), f"{median(ways['upload']['step_ms']):.2f}",
        *(f"x {median(ways[way]['ratio']):.2f}" for way in ("functional", "coarse", "fine")),
        *("-" if each is None else f"{median(each):.2f} ms" for each in held),
    ]  # fmt: skip


def summary(found: dict[str, Any]) -> str:
    """A row per combination: step time as a multiple of upload's, and how long row writes stood behind the fence."""
    rows = [_compact(cell) for cell in found["cells"]]
    return "\n".join(
        [_above(found), table("Step time beside upload, and row writes held up", _COMPACT, rows), *_below(found)]
    )


def whole(found: dict[str, Any]) -> str:
    """A row per combination and way: medians (least-most) of the rounds."""
    head = ("model", "batch", "shared rows", "slots x pages", "way", "step ms", "host ms", "writes held up ms",
            "bytes a step", "times upload")  # fmt: skip
    rows = []
    for cell in found["cells"]:
        for way in WAYS:
            run = cell["ways"][way]
            rows.append([
                cell["model"], str(cell["batch"]), bytes_text(cell["shared_bytes"]),
                f"{cell['slots']}x{cell['table_width']}", way, spread(run["step_ms"], 2), spread(run["host_ms"], 2),
                "-" if run["held_up_ms"] is None else spread(run["held_up_ms"], 2),
                bytes_text(median(run["bytes"])), spread(run["ratio"], 2),
            ])  # fmt: skip
    return "\n".join(
        [
            _above(found),
            headline(found),
            table("Four ways to update control rows, per decode step", head, rows),
            *_below(found),
        ]
    )


def _above(found: dict[str, Any]) -> str:
    settings = found["settings"]
    return (
        f"{sentence(found['machine'])}\njax {found['machine']['jax']} on {found['machine']['platform']}, random "
        f"weights, pages of {settings['page_size']} tokens, {settings['max_tokens']} greedy tokens per sequence, "
        f"equal in all four ways; {settings['rounds']} rounds, the ways taking turns; {found['seconds']:.0f} s.\n"
    )


def _below(found: dict[str, Any]) -> Sequence[str]:
    if not found["left_out"]:
        return ()
    return (f"Left out, because {found['settings']['max_seconds']:.0f} s were over: {'; '.join(found['left_out'])}.",)

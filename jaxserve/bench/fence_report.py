"""The fence bench's numbers as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.bench.fence import WAYS
from jaxserve.bench.machine import sentence
from jaxserve.bench.table import median, spread, table

MOST_LOAD = 0.75  # runnable threads per core at the start, behind which times mean little
UNITS = ((1 << 20, "MB"), (1 << 10, "KB"))


def bytes_text(count: float) -> str:
    """``17 MB``, ``2.4 KB``, ``140 B``."""
    for unit, name in UNITS:
        if count >= unit:
            return f"{count / unit:.{0 if count >= 10 * unit else 1}f} {name}"
    return f"{count:.0f} B"


def at_largest_batch(found: dict[str, Any]) -> str:
    """A row per model and size, at the largest batch."""
    return _compact_table(_at_largest_batch(found))


def _at_largest_batch(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in found["cells"] if cell["batch"] == max(found["settings"]["batches"])]


def headline(found: dict[str, Any]) -> str:
    """Four lines at the largest batch: quickest and slowest model, smallest and largest rows."""
    cells = _at_largest_batch(found)
    models = list(dict.fromkeys(cell["model"] for cell in cells))
    sizes = sorted({cell["shared_bytes"] for cell in cells})
    ends = [
        cell
        for model in dict.fromkeys((models[0], models[-1]))
        for size in dict.fromkeys((sizes[0], sizes[-1]))
        for cell in cells
        if (cell["model"], cell["shared_bytes"]) == (model, size)
    ]
    return _compact_table(ends)


_COMPACT = ("model", "batch", "shared rows", "upload, ms a step", "functional", "in place, coarse", "in place, fine",
            "writes held up, coarse", "fine")  # fmt: skip


def _compact(cell: dict[str, Any]) -> list[str]:
    ways = cell["ways"]
    held = [ways[way]["held_up_ms"] for way in ("coarse", "fine")]
    return [
        cell["model"], str(cell["batch"]), bytes_text(cell["shared_bytes"]), f"{median(ways['upload']['step_ms']):.2f}",
        *(f"x {median(ways[way]['ratio']):.2f}" for way in ("functional", "coarse", "fine")),
        *("-" if each is None else _ms(median(each)) for each in held),
    ]  # fmt: skip


def _ms(value: float) -> str:
    return f"{value:.2f} ms" if value >= 0.1 else f"{value:.3f} ms"


def _compact_table(cells: Sequence[dict[str, Any]]) -> str:
    return table("Step time beside upload, and row writes held up", _COMPACT, [_compact(cell) for cell in cells])


def summary(found: dict[str, Any]) -> str:
    """A row per combination: step time as a multiple of upload's, and how long row writes stood behind the fence."""
    return busy_note(found) + "\n".join([above(found), _compact_table(found["cells"]), *_below(found)])


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
            above(found),
            headline(found),
            table("Four ways to update control rows, per decode step", head, rows),
            *_below(found),
        ]
    )


def above(found: dict[str, Any]) -> str:
    """What was measured, where and how."""
    settings = found["settings"]
    return (
        f"{sentence(found['machine'])}\njax {found['machine']['jax']} on {found['machine']['platform']}, random "
        f"weights, pages of {settings['page_size']} tokens, {settings['max_tokens']} greedy tokens per sequence, "
        f"equal in all four ways; {settings['rounds']} rounds, the ways taking turns; {found['seconds']:.0f} s.\n"
    )


def busy_note(found: dict[str, Any]) -> str:
    """A warning if others used the machine when the bench began, else nothing. Ends in an empty line."""
    load, cores = float(found["machine"]["load_at_start"]), found["machine"]["cores"]
    if load <= MOST_LOAD * cores:
        return ""
    return f"Provisional: others used the machine (load {load:.1f} on {cores} cores). Measure again when quiet.\n\n"


def _below(found: dict[str, Any]) -> Sequence[str]:
    if not found["left_out"]:
        return ()
    return (f"Left out, because {found['settings']['max_seconds']:.0f} s were over: {'; '.join(found['left_out'])}.",)

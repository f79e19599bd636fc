"""Numbers as text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float], digits: int = 1, scale: float = 1.0) -> str:
    """``median (least-most)``."""
    low, middle, high = (scale * f(values) for f in (min, median, max))
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that also reads well as plain text."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([f"**{title}**", "", line(head), rule, *(line(row) for row in rows), ""])

"""The course of a training as files: JSON, CSV and a picture."""

from __future__ import annotations

import csv
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

JSON_FILE = "training.json"
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#F0E442")  # Okabe and Ito
_INK, _GRID = "#333333", "#DDDDDD"
_SIZE, _LEFT, _TOP, _PANEL = (760, 300), 50, 30, (300, 220)


def write_report(folder: Path, report: dict[str, Any]) -> Path:
    """Writes ``training.json``, ``training.csv`` (a line per evaluation) and a picture; returns the picture's path.

    The picture is a PNG when matplotlib is installed, else an SVG.
    """
    (folder / JSON_FILE).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    history = report["history"]
    places = len(history[0]["accepted"])
    with (folder / "training.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        columns = ["step", "loss", "held_out_loss", "mean_length", "seconds"]
        writer.writerow([*columns, *(f"accepted_{place + 1}" for place in range(places))])
        writer.writerows([*(record[name] for name in columns), *record["accepted"]] for record in history)
    if importlib.util.find_spec("matplotlib") is not None:
        path = folder / "training.png"
        _draw_png(history, path)
    else:
        path = folder / "training.svg"
        path.write_text(_svg(history), encoding="utf-8")
    return path


def _series(history: list[dict[str, Any]]) -> list[tuple[str, list[tuple[str, list[float]]]]]:
    """Per panel its title and its lines: (label, values)."""
    losses = [("training", [r["loss"] for r in history]), ("held out", [r["held_out_loss"] for r in history])]
    places = range(len(history[0]["accepted"]))
    accepted = [(f"up to guess {place + 1}", [r["accepted"][place] for r in history]) for place in places]
    return [("Loss", losses), ("Accepted, held-out text", accepted)]


def _draw_png(history: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [record["step"] for record in history]
    with plt.rc_context({"font.size": 9, "axes.edgecolor": _INK, "text.color": _INK}):
        figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
        for panel, (title, lines) in zip(panels, _series(history), strict=True):
            for number, (label, values) in enumerate(lines):
                panel.plot(steps, values, color=_COLOURS[number % len(_COLOURS)], label=label)
            panel.set(title=title, xlabel="step")
            panel.grid(color=_GRID, linewidth=0.6)
            panel.set_axisbelow(True)
            panel.legend(frameon=False, fontsize=8)
        panels[1].set_ylim(0, 1)
        figure.savefig(path, dpi=160)
        plt.close(figure)


def _svg(history: list[dict[str, Any]]) -> str:
    width, height = _SIZE
    steps = [record["step"] for record in history]
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
             f'font-size="11" fill="{_INK}">', f'<rect width="{width}" height="{height}" fill="white"/>']  # fmt: skip
    for number, (title, lines) in enumerate(_series(history)):
        left = _LEFT + number * (_PANEL[0] + 70)
        top = 1.0 if number else max(value for _, values in lines for value in values) * 1.05 or 1.0
        parts.append(f'<text x="{left}" y="{_TOP - 12}" font-weight="bold">{title}</text>')
        for fraction in (0.0, 0.25, 0.5, 0.75, 1.0):
            y = _TOP + _PANEL[1] * (1 - fraction)
            parts.append(f'<line x1="{left}" x2="{left + _PANEL[0]}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_GRID}"/>')
            parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{top * fraction:.2g}</text>')
        parts.append(
            f'<text x="{left + _PANEL[0]}" y="{_TOP + _PANEL[1] + 16}" text-anchor="end">step {steps[-1]}</text>'
        )
        for line, (label, values) in enumerate(lines):
            colour = _COLOURS[line % len(_COLOURS)]
            points = _points(steps, values, left, top)
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
            place = f'x="{left + 8 + 100 * (line % 3)}" y="{_TOP + _PANEL[1] + 32 + 14 * (line // 3)}"'
            parts.append(f'<text {place} fill="{colour}">{label}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _points(steps: Sequence[int], values: Sequence[float], left: float, top: float) -> str:
    places = (
        (left + _PANEL[0] * step / steps[-1], _TOP + _PANEL[1] * (1 - min(value / top, 1)))
        for step, value in zip(steps, values, strict=True)
    )
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)

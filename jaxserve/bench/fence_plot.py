"""The fence bench's numbers as a picture: what each way costs beside upload, and what the fine fence changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

from jaxserve.bench.fence_report import bytes_text
from jaxserve.bench.machine import sentence
from jaxserve.bench.table import median

# The colours of Okabe and Ito, which colour-blind people can tell apart.
STYLE: dict[str, dict[str, Any]] = {
    "functional": {"color": "#E69F00", "marker": "s", "label": "functional update"},
    "coarse": {"color": "#56B4E9", "marker": "^", "label": "in place, coarse fence", "linestyle": "--"},
    "fine": {"color": "#0072B2", "marker": "o", "label": "in place, fine fence"},
}
INK, GRID = "#333333", "#DDDDDD"


def draw(found: dict[str, Any], path: Path) -> None:
    """Writes the picture; the format is that of the file's name.

    Top: step time as a multiple of upload's against the size of the shared rows, a panel per model, at the largest
    batch. Bottom: how long row writes stood behind either fence, and the step time of one over the other's, against
    step time, every batch.
    """
    cells = found["cells"]
    batch = max(cell["batch"] for cell in cells)
    models = list(dict.fromkeys(cell["model"] for cell in cells))
    with plt.rc_context({"font.size": 9, "axes.edgecolor": INK, "text.color": INK, "axes.labelcolor": INK,
                         "xtick.color": INK, "ytick.color": INK, "svg.fonttype": "none"}):  # fmt: skip
        figure = plt.figure(figsize=(max(8.4, 2.7 * len(models)), 7.0), layout="constrained")
        top, bottom = figure.subfigures(2, 1, squeeze=False, height_ratios=(1.05, 1))[:, 0]
        panels = top.subplots(1, len(models), sharey=True, squeeze=False)[0]
        for panel, model in zip(panels, models, strict=True):
            _ratios(panel, [cell for cell in cells if cell["model"] == model and cell["batch"] == batch])
        panels[0].set_ylabel("step time, times that of upload")
        # The bands may be cut off: one slow moment of the machine must not flatten the rest.
        shown = [median(_ratio(cell, way)) for cell in cells if cell["batch"] == batch for way in STYLE]
        panels[0].set_ylim(0, 1.1 * max(1.1, *shown))
        top.suptitle(_finding(cells, models, batch), weight="bold")
        handles, labels = panels[0].get_legend_handles_labels()
        top.legend(handles, labels, loc="outside lower center", ncols=len(STYLE) + 1, frameon=False)
        held_up, fences = bottom.subplots(1, 2)
        _held_up(held_up, cells)
        _fences(fences, cells)
        figure.text(0.995, 0.002, sentence(found["machine"]), ha="right", va="bottom", fontsize=6.5, color="#777777")
        figure.get_layout_engine().set(rect=(0, 0.02, 1, 0.98))  # type: ignore[union-attr, call-arg]
        figure.savefig(path, dpi=160)
        plt.close(figure)


def _ratio(cell: dict[str, Any], way: str) -> list[float]:
    return cell["ways"][way]["ratio"]


def _finding(cells: list[dict[str, Any]], models: list[str], batch: int) -> str:
    """What the top row shows, in this run's own numbers."""
    ratios = []
    for model in dict.fromkeys((models[0], models[-1])):
        cell = max(
            (c for c in cells if c["model"] == model and c["batch"] == batch), key=lambda cell: cell["shared_bytes"]
        )
        ratios.append(f"{median(_ratio(cell, 'fine')):.2f} ({model})")
    return (
        f"With {bytes_text(cell['shared_bytes'])} of control rows, a decode step that writes them in place takes\n"
        f"{' to '.join(ratios)} times as long as one that uploads them ({batch} sequences)"
    )


def _ratios(panel: Axes, cells: list[dict[str, Any]]) -> None:
    cells = sorted(cells, key=lambda cell: cell["shared_bytes"])
    sizes = [cell["shared_bytes"] for cell in cells]
    panel.axhline(1, color=INK, linewidth=1, label="upload")
    for way, style in STYLE.items():
        runs = [cell["ways"][way]["ratio"] for cell in cells]
        panel.plot(sizes, [median(run) for run in runs], markersize=5, linewidth=1.6, **style)
        panel.fill_between(
            sizes, [min(run) for run in runs], [max(run) for run in runs], color=style["color"], alpha=0.15, linewidth=0
        )
    base = cells[0]["ways"]["upload"]["step_ms"], cells[-1]["ways"]["upload"]["step_ms"]
    panel.set_title(
        f"{cells[0]['model']}\nupload: {median(base[0]):.2g} ms to {median(base[1]):.2g} ms a step", fontsize=9
    )
    panel.set_xscale("log")
    panel.xaxis.set_major_locator(FixedLocator(sizes))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: bytes_text(value)))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.tick_params(axis="x", which="minor", bottom=False)
    panel.margins(x=0.12)
    value = median(cells[-1]["ways"]["fine"]["ratio"])
    panel.annotate(
        f"{value:.2f}", (sizes[-1], value), (0, -15 if value > 0.3 else 15), textcoords="offset points",
        ha="center", va="center", color=STYLE["fine"]["color"], weight="bold",
    )  # fmt: skip
    panel.set_xlabel("control rows in all")
    _tidy(panel)


def _held_up(panel: Axes, cells: list[dict[str, Any]]) -> None:
    times = [median(cell["ways"]["fine"]["step_ms"]) for cell in cells]
    panel.plot([min(times), max(times)], [min(times), max(times)], color=INK, linewidth=1, label="a whole step")
    shares = []
    for way in ("coarse", "fine"):
        points = [
            (median(cell["ways"][way]["step_ms"]), median(cell["ways"][way]["held_up_ms"]))
            for cell in cells
            if cell["ways"][way]["held_up_ms"]
        ]
        if points:
            panel.plot(*zip(*points, strict=True), **(STYLE[way] | {"linestyle": "none"}), markersize=5, alpha=0.8)
            shares.append(f"{median([held / step for step, held in points]):.0%} ({way})")
    title = f"Row writes stand behind the fence\nfor {' and '.join(shares)} of a step" if shares else "Not known here"
    panel.set_title(title, weight="bold", fontsize=9)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("step, ms")
    panel.set_ylabel("row writes held up, ms")
    panel.legend(frameon=False, loc="upper left")
    _plain(panel)
    _tidy(panel)


def _fences(panel: Axes, cells: list[dict[str, Any]]) -> None:
    panel.axhline(1, color=INK, linewidth=1)
    middles = []
    for cell in cells:
        coarse, fine = (cell["ways"][way]["step_ms"] for way in ("coarse", "fine"))
        ratios = [one / other for one, other in zip(coarse, fine, strict=True)]
        middle, low, high = median(ratios), min(ratios), max(ratios)
        middles.append(middle)
        panel.errorbar(
            median(fine), middle, [[middle - low], [high - middle]], color=STYLE["fine"]["color"], marker="o",
            markersize=4, linewidth=0.8, alpha=0.7,
        )  # fmt: skip
    behind = f"A step behind the coarse fence takes\n{median(middles):.2f} times as long as behind the fine one"
    panel.set_title(behind, weight="bold", fontsize=9)
    panel.set_xscale("log")
    panel.set_xlabel("step, ms")
    panel.set_ylabel("coarse / fine")
    _plain(panel, "x")
    _tidy(panel)


def _plain(panel: Axes, axes: str = "xy") -> None:
    for name in axes:
        axis = panel.xaxis if name == "x" else panel.yaxis
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def _tidy(panel: Axes) -> None:
    panel.grid(True, which="major", color=GRID, linewidth=0.6)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)

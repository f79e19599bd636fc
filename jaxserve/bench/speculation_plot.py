"""The speculation bench's numbers as a picture: speed-up by kind of text, and what verifying costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from jaxserve.bench.machine import sentence
from jaxserve.bench.speculation import SERIAL
from jaxserve.bench.table import median

# The colours of Okabe and Ito, which colour-blind people can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
INK, GRID = "#333333", "#DDDDDD"


def draw(found: dict[str, Any], path: Path) -> None:
    """Writes the picture; the format is that of the file's name.

    Left: tokens a second over plain decoding's, per kind of text, a bar per way and batch with least and most of the
    rounds. Right: step time over that of one decode step, against the tokens a step verifies per sequence.
    """
    with plt.rc_context({"font.size": 9, "axes.edgecolor": INK, "text.color": INK, "axes.labelcolor": INK,
                         "xtick.color": INK, "ytick.color": INK, "svg.fonttype": "none"}):  # fmt: skip
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4), width_ratios=(1.9, 1), layout="constrained")
        _speed_ups(left, found)
        _costs(right, found)
        figure.text(0.995, 0.002, sentence(found["machine"]), ha="right", va="bottom", fontsize=6.5, color="#777777")
        figure.get_layout_engine().set(rect=(0, 0.03, 1, 0.97))  # type: ignore[union-attr, call-arg]
        figure.savefig(path, dpi=160)
        plt.close(figure)


def _speed_ups(panel: Axes, found: dict[str, Any]) -> None:
    cells = {(cell["kind"], cell["batch"]): cell for cell in found["cells"]}
    kinds = list(dict.fromkeys(kind for kind, _ in cells))
    batches = list(dict.fromkeys(batch for _, batch in cells))
    series = [(way, batch) for way in found["settings"]["ways"] if way != "plain" for batch in batches]
    width = 0.8 / len(series)
    for number, (way, batch) in enumerate(series):
        places, middles, lows, highs = [], [], [], []
        for column, kind in enumerate(kinds):
            if (kind, batch) in cells:
                ratios = cells[kind, batch]["ways"][way]["ratio"]
                places.append(column + (number - (len(series) - 1) / 2) * width)
                middles.append(median(ratios))
                lows.append(median(ratios) - min(ratios))
                highs.append(max(ratios) - median(ratios))
        colour = COLOURS[number % len(COLOURS)]
        panel.bar(places, middles, width * 0.92, color=colour, label=f"{way}, batch {batch}")
        panel.errorbar(places, middles, [lows, highs], fmt="none", ecolor=INK, elinewidth=0.8, capsize=2)
        for place, middle in zip(places, middles, strict=True):
            panel.annotate(f"{middle:.2f}", (place, 0.03), ha="center", va="bottom", color="white", fontsize=7.5)
    panel.axhline(1, color=INK, linewidth=1)
    panel.set_xticks(range(len(kinds)), kinds)
    panel.set_ylabel("tokens a second, times plain decoding")
    panel.set_title(_finding(found), weight="bold", fontsize=9.5)
    panel.legend(frameon=False, fontsize=8)
    _tidy(panel)


def _finding(found: dict[str, Any]) -> str:
    way = next(way for way in found["settings"]["ways"] if way != "plain")
    parts = []
    for repeats, text in ((True, "on text that repeats itself"), (False, "on text that does not")):
        ratios = [median(cell["ways"][way]["ratio"]) for cell in found["cells"] if cell["repeats"] is repeats]
        if ratios:
            parts.append(f"{min(ratios):.2f} to {max(ratios):.2f} {text}")
    return f"{way} decodes {', '.join(parts)}\n(times plain decoding; the same tokens)"


def _costs(panel: Axes, found: dict[str, Any]) -> None:
    batches = list(dict.fromkeys(each["batch"] for each in found["verify"]))
    for number, batch in enumerate(batches):
        steps = [each for each in found["verify"] if each["batch"] == batch and each["tokens"] >= SERIAL]
        tokens = [each["tokens"] for each in steps]
        colour = COLOURS[number % len(COLOURS)]
        middles = [median(each["ratio"]) for each in steps]
        panel.plot(tokens, middles, marker="o", markersize=5, color=colour, label=f"batch {batch}")
        panel.fill_between(
            tokens, [min(each["ratio"]) for each in steps], [max(each["ratio"]) for each in steps],
            color=colour, alpha=0.15, linewidth=0,
        )  # fmt: skip
    sizes = sorted({each["tokens"] for each in found["verify"] if each["tokens"] >= SERIAL})
    panel.plot(sizes, sizes, color=INK, linewidth=1, linestyle=":", label="one by one")
    panel.axhline(1, color=INK, linewidth=1)
    panel.set_xticks(sizes)
    panel.set_ylim(0, 1.15 * max(2.0, *(median(each["ratio"]) for each in found["verify"])))
    panel.set_xlabel("tokens verified per sequence (1: a step that is not overlapped)")
    panel.set_ylabel("step time, times an overlapped decode step")
    panel.set_title("What a verify step costs", weight="bold", fontsize=9.5)
    panel.legend(frameon=False, fontsize=8)
    _tidy(panel)


def _tidy(panel: Axes) -> None:
    panel.grid(True, axis="y", color=GRID, linewidth=0.6)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)

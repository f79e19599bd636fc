"""Renders a drawing with matplotlib: PNG, SVG or PDF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxserve.core.errors import ConfigError
from jaxserve.timeline.drawing import STYLES, TONES, Drawing, Line, Rect, Text

POINTS_PER_INCH = 72.0
DOTS_PER_INCH = 200


def check_matplotlib() -> None:
    """Raises ConfigError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            "plots need matplotlib: pip install jaxserve[plot]; or draw an .html, which does not"
        ) from None


def render_image(drawing: Drawing, path: Path) -> None:
    """Writes the drawing; the format follows the suffix."""
    check_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # without pyplot, which looks for a display
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(drawing.width / POINTS_PER_INCH, drawing.height / POINTS_PER_INCH))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, drawing.width)
    axes.set_ylim(drawing.height, 0)
    axes.axis("off")
    for order, shape in enumerate(drawing.shapes):
        if isinstance(shape, Rect):
            style = STYLES[shape.style]
            edge = style.edge if style.edge != "none" else style.fill
            axes.add_patch(
                Rectangle((shape.x, shape.y), shape.width, shape.height, facecolor=style.fill, edgecolor=edge,
                          linewidth=0.6, hatch="////" if style.hatched else None, zorder=order)
            )  # fmt: skip
        elif isinstance(shape, Line):
            colour = TONES[shape.tone][0]
            look: dict[str, Any] = {
                "color": colour,
                "linewidth": 1.1 if shape.arrow else 0.5,
                "linestyle": ":" if shape.dashed else "-",
            }
            if shape.arrow:
                axes.annotate(
                    "", (shape.x2, shape.y2), (shape.x1, shape.y1), zorder=order,
                    arrowprops={"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0, "mutation_scale": 7, **look},
                )  # fmt: skip
            else:
                axes.plot([shape.x1, shape.x2], [shape.y1, shape.y2], zorder=order, **look)
        else:
            _text(axes, shape, order)
    with rc_context({"hatch.linewidth": 0.6, "svg.fonttype": "none"}):
        figure.savefig(path, dpi=DOTS_PER_INCH, facecolor="white", metadata={"Title": drawing.title})


def _text(axes, shape: Text, order: int) -> None:
    from matplotlib.patheffects import withStroke

    sides = {"start": "left", "middle": "center", "end": "right"}
    halo = [withStroke(linewidth=2.2, foreground="white", alpha=0.8)] if shape.halo else None
    axes.text(
        shape.x, shape.y, shape.text.replace("$", r"\$"), fontsize=shape.size, ha=sides[shape.anchor], va="baseline",
        fontweight="bold" if shape.bold else "normal", color=TONES[shape.tone][0], zorder=order,
        path_effects=halo,
    )  # fmt: skip

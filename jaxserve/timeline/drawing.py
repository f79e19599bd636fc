"""A drawing as a list of shapes in points, origin at the top left. Renderers know shapes, not steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Anchor = Literal["start", "middle", "end"]
CHARACTER_EM, BOLD_EM = 0.56, 0.61  # mean width of a character of the fonts used, a little on the wide side


class Style(NamedTuple):
    """How a shape looks.

    Attributes:
        fill, edge: colours on a light ground.
        dark_fill, dark_edge: and on a dark one.
        hatched: striped with ``edge`` instead of filled plainly.
        legend: what it stands for; "" keeps it out of the legend.
    """

    fill: str
    edge: str
    dark_fill: str
    dark_edge: str
    hatched: bool = False
    legend: str = ""


# After Okabe and Ito, whose colours people with any common colour blindness tell apart; lightness differs as well.
STYLES = {
    "lane": Style("#f4f4f2", "none", "#26282b", "none"),
    "plan": Style("#56b4e9", "#2b7fb0", "#56b4e9", "#9bd4f5", legend="plan"),
    "launch": Style("#0072b2", "#004f7c", "#2f8fc9", "#9bd4f5", legend="launch, barrier"),
    "collect": Style("#e9e9e6", "#bcbcb8", "#3a3d41", "#5b5f64", legend="collect (host waits)"),
    "commit": Style("#cc79a7", "#98517a", "#cc79a7", "#e9b4d1", legend="commit"),
    "idle": Style("#ffffff", "#c9c9c4", "#1c1e20", "#55595e", hatched=True, legend="stream waits, nothing to write"),
    "held": Style("#fbe0cf", "#d55e00", "#4a2a14", "#f08a3c", hatched=True, legend="row writes held up"),
    "write": Style("#d55e00", "#8f3f00", "#f08a3c", "#ffc9a0", legend="row write"),
    "raw": Style("#ffffff", "#009e73", "#1c1e20", "#2cc79c", hatched=True, legend="program waits for rows"),
    "read": Style("#f0e442", "#8a8210", "#f0e442", "#fff9a8", legend="reads shared rows"),
    "compute": Style("#9fd8c6", "#009e73", "#1d6b55", "#2cc79c", legend="layers, sampling, KV write"),
    "plate": Style("#fbe0cf", "none", "#4a2a14", "none"),
    "other": Style("#dcefe9", "#9fd8c6", "#1f3a33", "#1d6b55", legend="the step before or after"),
}


@dataclass(frozen=True)
class Rect:
    """A bar."""

    x: float
    y: float
    width: float
    height: float
    style: str
    tip: str = ""


@dataclass(frozen=True)
class Line:
    """A straight line; ``tone`` is ``ink``, ``soft`` or ``war``."""

    x1: float
    y1: float
    x2: float
    y2: float
    tone: str = "soft"
    dashed: bool = False
    arrow: bool = False
    tip: str = ""


@dataclass(frozen=True)
class Text:
    """One line of text on its baseline; ``halo`` keeps lines below it away from its letters."""

    x: float
    y: float
    text: str
    size: float = 8.0
    anchor: Anchor = "start"
    bold: bool = False
    tone: str = "ink"
    halo: bool = False


@dataclass
class Drawing:
    """Shapes in the order in which they are painted."""

    width: float
    height: float
    title: str
    shapes: list[Rect | Line | Text] = field(default_factory=list)


# Tone -> colour on a light ground, on a dark one.
TONES = {"ink": ("#222222", "#e6e6e3"), "soft": ("#8d8d88", "#83878c"), "war": ("#a03c00", "#ff9d57")}


def text_width(text: str, size: float, bold: bool = False) -> float:
    """About how wide a text is, in points."""
    return len(text) * size * (BOLD_EM if bold else CHARACTER_EM)


def nice_step(span: float, wanted: int) -> float:
    """The 1, 2 or 5 times a power of ten that cuts ``span`` into about ``wanted`` pieces."""
    power = 1.0
    while power * 10 * wanted <= span:
        power *= 10
    while power * wanted > span:
        power /= 10
    return next((factor * power for factor in (1, 2, 5, 10) if factor * power * wanted >= span), 10 * power)

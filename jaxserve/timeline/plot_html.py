"""Renders a drawing as SVG of its own, in an HTML page that needs nothing else: values on hover, light and dark."""

from __future__ import annotations

from html import escape
from pathlib import Path

from jaxserve.timeline.drawing import STYLES, TONES, Drawing, Line, Rect, Text

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
body {{ margin: 0 auto; max-width: 1400px; padding: 12px; background: #ffffff; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #1c1e20; }} }}
</style>
</head>
<body>
{svg}
</body>
</html>
"""


def render_html(drawing: Drawing, path: Path) -> None:
    """Writes the page."""
    path.write_text(_PAGE.format(title=escape(drawing.title), svg=svg(drawing)), encoding="utf-8")


def svg(drawing: Drawing) -> str:
    """The drawing as one SVG element; colours follow the reader's light or dark setting, tips are ``<title>``."""
    shapes = "\n".join(_shape(shape) for shape in drawing.shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {drawing.width:g} {drawing.height:g}" role="img" '
        f'aria-label="{escape(drawing.title)}" font-family="Helvetica, Arial, \'Liberation Sans\', sans-serif">\n'
        f"<style>\n{_css()}\n</style>\n<defs>\n{_definitions()}\n</defs>\n{shapes}\n</svg>"
    )


def _css() -> str:
    light, dark = [], []
    for name, style in STYLES.items():
        fill = f"url(#hatch-{name})" if style.hatched else style.fill
        light.append(f".{name} {{ fill: {fill}; stroke: {style.edge}; }}")
        dark.append(f".{name} {{ stroke: {style.dark_edge}; }}" if style.hatched else
                    f".{name} {{ fill: {style.dark_fill}; stroke: {style.dark_edge}; }}")  # fmt: skip
        if style.hatched:
            for rules, ground, stripe in ((light, style.fill, style.edge), (dark, style.dark_fill, style.dark_edge)):
                rules.append(f".ground-{name} {{ fill: {ground}; }} .stripe-{name} {{ stroke: {stripe}; }}")
    for name, (on_light, on_dark) in TONES.items():
        for rules, colour, halo in ((light, on_light, "#ffffff"), (dark, on_dark, "#1c1e20")):
            rules.append(f"text.{name} {{ fill: {colour}; }} line.{name} {{ stroke: {colour}; }}")
            rules.append(f".halo {{ stroke: {halo}; }}")
            rules.append(f".head-{name} {{ fill: {colour}; }}")
    shared = (
        "rect { stroke-width: 0.6; } rect.bar:hover, line:hover { stroke: #000000; stroke-width: 1.6; }\n"
        ".halo { fill: none; stroke-width: 2.2; stroke-opacity: 0.8; stroke-linejoin: round; }\n"
        "text { pointer-events: none; }"
    )
    indented = "\n".join("  " + rule for rule in [*dark, "rect.bar:hover, line:hover { stroke: #ffffff; }"])
    return "\n".join([*light, shared]) + "\n@media (prefers-color-scheme: dark) {\n" + indented + "\n}"


def _definitions() -> str:
    parts = []
    for name, style in STYLES.items():
        if style.hatched:
            parts.append(
                f'<pattern id="hatch-{name}" width="5" height="5" patternUnits="userSpaceOnUse" '
                f'patternTransform="rotate(45)"><rect width="5" height="5" class="ground-{name}" stroke="none"/>'
                f'<line x1="0" y1="0" x2="0" y2="5" class="stripe-{name}" stroke-width="1.3"/></pattern>'
            )
    for name in TONES:
        parts.append(
            f'<marker id="head-{name}" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="6" markerHeight="6" '
            f'orient="auto"><path d="M0 0.8 8 4 0 7.2z" class="head-{name}"/></marker>'
        )
    return "\n".join(parts)


def _shape(shape: Rect | Line | Text) -> str:
    if isinstance(shape, Text):
        weight = ' font-weight="bold"' if shape.bold else ""
        rest = (
            f'font-size="{shape.size:g}" text-anchor="{shape.anchor}"{weight} x="{shape.x:.1f}" y="{shape.y:.1f}">'
            f"{escape(shape.text)}</text>"
        )
        halo = f'<text class="halo" {rest}' if shape.halo else ""
        return f'{halo}<text class="{shape.tone}" {rest}'
    tip = f"<title>{escape(shape.tip)}</title>" if shape.tip else ""
    if isinstance(shape, Rect):
        bar = " bar" if shape.tip else ""
        return (
            f'<rect x="{shape.x:.2f}" y="{shape.y:.1f}" width="{shape.width:.2f}" height="{shape.height:.1f}" '
            f'class="{shape.style}{bar}">{tip}</rect>'
        )
    dash = ' stroke-dasharray="1 2"' if shape.dashed else ""
    head = f' marker-end="url(#head-{shape.tone})"' if shape.arrow else ""
    width = 1.1 if shape.arrow else 0.5
    return (
        f'<line x1="{shape.x1:.2f}" y1="{shape.y1:.1f}" x2="{shape.x2:.2f}" y2="{shape.y2:.1f}" class="{shape.tone}" '
        f'stroke-width="{width}"{dash}{head}>{tip}</line>'
    )

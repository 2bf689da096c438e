"""SVG primitives: shapes, escaped text, axes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from xml.sax.saxutils import escape, quoteattr

from voxtune.marks import COMMENT
from voxtune.report import palette

# Light colours and their counterparts in a dark theme. INK differs from palette.ink: labels inside bars do not change.
INK, MUTED, LINE, HAIR, PAPER = "#1a1d21", "#5c636c", "#dfe3e8", "#edf0f3", "#fdfdfe"
DARK = {INK: "#e8ebef", MUTED: "#a3abb5", LINE: "#3a414a", HAIR: "#262c33", PAPER: "#14181d"}
MARGIN = 20.0
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', sans-serif"
CHARACTER = 7.4  # mean width at 12 px, rounded up
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Canvas:
    """A drawing of the given inner width, with margins, on a background that follows the theme of the reader."""

    def __init__(self, width: float = 760):
        self.width = width
        self.parts: list[str] = []

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        *,
        tip: str = "",
        edge: str = "",
        opacity: float = 1.0,
    ) -> None:
        inner = f"<title>{clean(tip)}</title>" if tip else ""
        stroke = f' stroke="{edge}"' if edge else ""
        stroke += f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
        shape = (
            f'x="{x:.2f}" y="{y:.2f}" width="{max(width, 0):.2f}" height="{max(height, 0):.2f}" fill="{fill}"{stroke}'
        )
        self.parts.append(f"<rect {shape}>{inner}</rect>" if inner else f"<rect {shape}/>")

    def circle(self, x: float, y: float, radius: float, fill: str, *, tip: str = "") -> None:
        shape = f'cx="{x:.2f}" cy="{y:.2f}" r="{radius:.2f}" fill="{fill}" fill-opacity="0.82"'
        self.parts.append(f'<circle {shape} stroke="{PAPER}"><title>{clean(tip)}</title></circle>')

    def line(
        self, x1: float, y1: float, x2: float, y2: float, *, stroke: str = LINE, width: float = 1, dash: str = ""
    ) -> None:
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        ends = f'x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}"'
        self.parts.append(f'<line {ends} stroke="{stroke}" stroke-width="{width}"{dashes}/>')

    def polygon(self, points: Iterable[tuple[float, float]], fill: str) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polygon points="{path}" fill="{fill}"/>')

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        anchor: str = "start",
        size: float = 12,
        fill: str = INK,
        bold: bool = False,
        rotate: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        rotation = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if rotate else ""
        style = f'text-anchor="{anchor}" font-size="{size}" fill="{fill}"{weight}{rotation}'
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" {style}>{clean(text)}</text>')

    def heading(self, title: str, items: Iterable[tuple[str, str]] = ()) -> float:
        """Draws the title and the legend; returns the y where the plot starts."""
        self.text(0, 16, title, size=14, bold=True)
        x, y = 0.0, 38.0
        legend = list(items)
        for name, colour in legend:
            item_width = 26 + len(name) * CHARACTER
            if x and x + item_width > self.width:
                x, y = 0.0, y + 18
            self.rect(x, y - 9, 10, 10, colour)
            self.text(x + 15, y, name, fill=MUTED)
            x += item_width
        return y + 12 if legend else 30.0

    def finish(self, height: float, title: str) -> str:
        width, height = self.width + 2 * MARGIN, height + 2 * MARGIN
        box = f'x="{-MARGIN:g}" y="{-MARGIN:g}" width="{width:.0f}" height="{height:.0f}"'
        background = f'<rect {box} rx="8" fill="{PAPER}"/>'
        body = "\n".join([_dark_style(self.parts), background, *self.parts])
        label = quoteattr(_FORBIDDEN.sub("�", title))
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="{-MARGIN:g} {-MARGIN:g} {width:.0f} {height:.0f}" role="img" aria-label={label} '
            f'font-family="{FONT}">\n{COMMENT}\n<title>{clean(title)}</title>\n{body}\n</svg>\n'
        )


def _dark_style(parts: Iterable[str]) -> str:
    """A style sheet for dark themes. Its rules override the presentation attributes fill and stroke."""
    rules = [f'[fill="{light}"] {{fill: {dark}}} [stroke="{light}"] {{stroke: {dark}}}' for light, dark in DARK.items()]
    shapes = (re.search(r'^<(?:rect|circle|polygon) .*?fill="(#[0-9a-f]{6})"', part) for part in parts)
    colours = sorted({shape.group(1) for shape in shapes if shape})
    rules += [f'[fill="{c}"]:not(text) {{fill: {palette.on_dark(c)}}}' for c in colours if c not in DARK]
    return f"<style>@media (prefers-color-scheme: dark) {{ {' '.join(rules)} }}</style>"


def clean(text: str) -> str:
    """Escapes markup and replaces characters that XML forbids."""
    return escape(_FORBIDDEN.sub("�", text))


def linear_ticks(top: float, count: int = 6) -> list[float]:
    """Round values from 0 to `top`."""
    if top <= 0:
        return [0.0]
    rough = top / count
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(s * size for s in (1, 2, 2.5, 5, 10) if s * size >= rough)
    return [i * step for i in range(int(top / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    return [10.0**e for e in range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)]


def x_axis(
    canvas: Canvas, ticks: list[float], place: Callable[[float], float], top: float, bottom: float, name: str
) -> None:
    for tick in ticks:
        canvas.line(place(tick), top, place(tick), bottom, stroke=HAIR)
        canvas.text(place(tick), bottom + 15, f"{tick:g}", anchor="middle", size=11, fill=MUTED)
    middle = (place(ticks[0]) + place(ticks[-1])) / 2
    canvas.text(middle, bottom + 32, name, anchor="middle", size=11, fill=MUTED)


def y_axis(
    canvas: Canvas, ticks: list[float], place: Callable[[float], float], left: float, right: float, name: str
) -> None:
    for tick in ticks:
        canvas.line(left, place(tick), right, place(tick), stroke=HAIR)
        canvas.text(left - 6, place(tick) + 4, f"{tick:g}", anchor="end", size=11, fill=MUTED)
    middle = (place(ticks[0]) + place(ticks[-1])) / 2
    canvas.text(12, middle, name, anchor="middle", size=11, fill=MUTED, rotate=True)

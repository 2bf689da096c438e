"""Draws figures as SVG files for documents."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from voxtune.files import check_outputs, locked_folder, slug, write_file
from voxtune.report import palette
from voxtune.report.canvas import CHARACTER, INK, MARGIN, MUTED, PAPER, Canvas, linear_ticks, log_ticks, x_axis, y_axis
from voxtune.report.document import Document
from voxtune.report.figure import Area, Bars, Figure, Scatter, Series, Timeline, Tree, Waterfall, WaterfallRow
from voxtune.report.numbers import MISSING, clip, number

# Timelines with more launches omit their names, to limit the file size.
NAMED_LAUNCHES = 1500


def write_svgs(document: Document, folder: str | Path, *, overwrite: bool = False) -> list[Path]:
    """One file per figure: SESSION-SECTION-FIGURE.svg, where the session of a figure of several is their mode."""
    folder, drawings = Path(folder), _drawings(document)
    paths = [folder / f"{name}.svg" for name in drawings]
    check_outputs(paths, overwrite=overwrite, folder=folder)
    with locked_folder(folder):
        for path, figure in zip(paths, drawings.values(), strict=True):
            write_file(path, render_svg(figure), overwrite=overwrite)
    return paths


def _drawings(document: Document) -> dict[str, Figure]:
    """File names, unique, with their figures, whose titles name session and mode."""
    out: dict[str, Figure] = {}
    for section in document.sections:
        for tab, blocks in [(None, section.blocks), *((t, t.blocks) for t in section.tabs)]:
            for figure in (b for b in blocks if isinstance(b, Figure)):
                mode = figure.mode or (tab.mode if tab else "")
                title = figure.title.removesuffix(f": {mode}")
                label = tab.label if tab else f"{mode or 'all'} sessions"
                words = label if not mode or label.startswith(mode) else f"{label}, {mode}"
                name = "-".join(slug(p).lower() for p in (label.replace("(", "").replace(")", ""), section.id, title))
                name, n = name[:120].rstrip("-."), 2
                while name in out:
                    name, n = f"{name.removesuffix(f'-{n - 1}')}-{n}", n + 1
                out[name] = replace(figure, title=f"{title}: {words}")
    return out


def render_svg(figure: Figure) -> str:
    return _DRAW[type(figure)](figure)


def _bars(f: Bars) -> str:
    canvas = Canvas()
    top = canvas.heading(f.title, [(s.name, s.colour) for s in f.series] if len(f.series) > 1 else [])
    left = min(280.0, max(len(clip(label, 42)) for label in f.labels) * CHARACTER + 10)
    right = canvas.width - (12 if f.stacked else 62)
    values = _totals(f) if f.stacked else [v for s in f.series for v in [*s.values, *(s.high or [])] if v is not None]
    most = max([*values, f.mark or 0, 1e-12])
    thick = 24.0 if f.stacked else 13.0 if len(f.series) > 1 else 18.0
    row = 36.0 if f.stacked else thick * len(f.series) + 14
    bottom = top + row * len(f.labels)

    low, high = _decades(min(v for v in values if v > 0), most) if f.log and any(values) else (0.0, most)

    def place(value: float) -> float:
        if low:
            return left + (right - left) * math.log10(max(value, low) / low) / math.log10(high / low)
        return left + (right - left) * value / most

    x_axis(canvas, log_ticks(low, high) if low else linear_ticks(most), place, top, bottom, f.unit)
    for i, label in enumerate(f.labels):
        canvas.text(left - 8, top + row * (i + 0.5) + 4, clip(label, 42), anchor="end")
        draw = _stacked_row if f.stacked else _grouped_row
        draw(canvas, f, i, top + row * i + 6, thick, place)
    if f.mark is not None:
        canvas.line(place(f.mark), top, place(f.mark), bottom, stroke=INK, dash="4 3")
    return canvas.finish(bottom + 42, f.title)


def _totals(f: Bars) -> list[float]:
    return [sum(s.values[i] or 0.0 for s in f.series) for i in range(len(f.labels))]


def _stacked_row(canvas: Canvas, f: Bars, i: int, y: float, thick: float, place: Callable[[float], float]) -> None:
    at = 0.0
    for s in f.series:
        value = s.values[i]
        if not value:
            continue
        width = place(at + value) - place(at)
        canvas.rect(place(at), y, width, thick, s.colour, tip=_tip(f, s, i), edge=PAPER)
        if width > 34:
            canvas.text(
                place(at) + width / 2,
                y + 16,
                _short(value, f.digits),
                anchor="middle",
                size=10.5,
                fill=palette.ink(s.colour),
            )
        at += value
    if all(s.values[i] is None for s in f.series):
        canvas.text(place(0) + 4, y + 16, "not measured", size=11, fill=MUTED)


def _grouped_row(canvas: Canvas, f: Bars, i: int, y: float, thick: float, place: Callable[[float], float]) -> None:
    for j, s in enumerate(f.series):
        value, top = s.values[i], y + thick * j
        if value is None:
            canvas.text(place(0) + 4, top + thick - 3, "not measured", size=10, fill=MUTED)
            continue
        end = place(value)
        canvas.rect(place(0), top, end - place(0), thick - 2, s.colour, tip=_tip(f, s, i))
        if s.low and s.high and s.low[i] is not None and s.high[i] is not None:
            low, high = place(s.low[i] or 0.0), place(s.high[i] or 0.0)
            middle = top + (thick - 2) / 2
            canvas.line(low, middle, high, middle, stroke=INK, width=1.5)
            for x in (low, high):
                canvas.line(x, middle - 4, x, middle + 4, stroke=INK, width=1.5)
            end = high
        canvas.text(end + 5, top + thick - 3, _short(value, f.digits), size=10.5, fill=MUTED)


def _tip(f: Bars, s: Series, i: int) -> str:
    return f"{f.labels[i]}, {s.name}: {number(s.values[i], f.digits)} {f.unit}"


def _short(value: float, digits: int) -> str:
    return number(float(value), 0 if abs(value) >= 100 else min(digits, 1 if abs(value) >= 10 else 2))


def _scatter(f: Scatter) -> str:
    canvas = Canvas()
    colours = dict(f.to_json()["groups"])
    top = canvas.heading(f.title, list(colours.items()))
    left, right, bottom = 62.0, canvas.width - 16, top + 380
    xs, ys = [p.x for p in f.points], [p.y for p in f.points]
    flats, slopes = [r.flat for r in f.roofs if r.flat], [r.per_x for r in f.roofs if r.per_x]
    high, steep = max([*flats, *ys]), max(slopes, default=0.0)
    low_x, high_x = _decades(min(xs) / 2, max([*xs, *([high / steep] if steep else [])]) * 4)
    low_y, high_y = _decades(min(ys) / 2, high * 2)

    def place_x(v: float) -> float:
        return left + (right - left) * math.log(v / low_x) / math.log(high_x / low_x)

    def place_y(v: float) -> float:
        return bottom - (bottom - top) * math.log(v / low_y) / math.log(high_y / low_y)

    x_axis(canvas, log_ticks(low_x, high_x), place_x, top, bottom, f.x_title)
    y_axis(canvas, log_ticks(low_y, high_y), place_y, left, right, f.y_title)
    for roof in f.roofs:
        if roof.flat:
            start = max(low_x, roof.flat / steep if steep else low_x)
            canvas.line(place_x(start), place_y(roof.flat), right, place_y(roof.flat), stroke=MUTED)
            canvas.text(right - 4, place_y(roof.flat) - 5, roof.name, anchor="end", size=11, fill=MUTED)
        elif roof.per_x:
            start = max(low_x, low_y / roof.per_x)
            canvas.line(
                place_x(start), place_y(start * roof.per_x), place_x(high / roof.per_x), place_y(high), stroke=MUTED
            )
    for p in f.points:
        tip = f"{p.name}: {number(p.x)} {f.x_title}, {number(p.y)} {f.y_title}"
        canvas.circle(place_x(p.x), place_y(p.y), 2.5 + math.sqrt(max(p.size, 0)) * 2.5, colours[p.group], tip=tip)
    return canvas.finish(bottom + 42, f.title)


def _decades(low: float, high: float) -> tuple[float, float]:
    return 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))


def _timeline(f: Timeline) -> str:
    canvas = Canvas()
    colours = f.to_json()["colours"]
    top = canvas.heading(f.title, list(zip(f.groups, colours, strict=True)))
    lanes = [*f.rows, *(["idle"] if f.gaps else [])]
    left, right = max(len(lane) for lane in lanes) * CHARACTER + 14, canvas.width - 12
    bottom = top + 50 * len(lanes)
    length = max(f.length_us, 1e-9) / 1000

    def place(ms: float) -> float:
        return left + (right - left) * ms / length

    x_axis(canvas, linear_ticks(length, 8), place, top, bottom, "time in step, ms")
    for i, lane in enumerate(lanes):
        canvas.text(left - 8, top + 50 * i + 29, lane, anchor="end")
    for start, us, group, name, _, row in f.items:
        tip = f"{f.names[name]}: {number(float(us), 1)} µs" if len(f.items) <= NAMED_LAUNCHES else ""
        canvas.rect(
            place(start / 1000), top + 50 * row + 6, max(0.3, place(us / 1000) - left), 38, colours[group], tip=tip
        )
    for start, us in f.gaps:
        y = top + 50 * len(f.rows) + 6
        canvas.rect(
            place(start / 1000),
            y,
            max(0.5, place(us / 1000) - left),
            38,
            "#a5260f",
            tip=f"idle: {number(float(us), 1)} µs",
        )
    return canvas.finish(bottom + 42, f.title)


def _area(f: Area) -> str:
    canvas = Canvas()
    top = canvas.heading(f.title, [(s.name, s.colour) for s in f.series])
    left, right, bottom = 58.0, canvas.width - 12, top + 240
    floor = [0.0] * len(f.x)
    most = max((sum(s.values[i] or 0.0 for s in f.series) for i in range(len(f.x))), default=0) or 1.0
    first, last = f.x[0], max(f.x[-1], f.x[0] + 1e-9)

    def place_x(v: float) -> float:
        return left + (right - left) * (v - first) / (last - first)

    def place_y(v: float) -> float:
        return bottom - (bottom - top) * v / most

    x_axis(canvas, [t for t in linear_ticks(last, 8) if t >= first], place_x, top, bottom, f.x_title)
    y_axis(canvas, linear_ticks(most, 5), place_y, left, right, f.unit)
    for s in f.series:
        roof = [a + (v or 0.0) for a, v in zip(floor, s.values, strict=True)]
        upper, lower = _steps(f.x, roof, place_x, place_y), _steps(f.x, floor, place_x, place_y)
        canvas.polygon([*upper, *reversed(lower)], s.colour)
        floor = roof
    return canvas.finish(bottom + 42, f.title)


def _steps(x: list[float], y: list[float], place_x: Any, place_y: Any) -> list[tuple[float, float]]:
    """A value is constant until the next point."""
    points = [(place_x(x[0]), place_y(y[0]))]
    for i in range(1, len(x)):
        points += [(place_x(x[i]), place_y(y[i - 1])), (place_x(x[i]), place_y(y[i]))]
    return points


def _tree(f: Tree) -> str:
    """Bars of the first two levels of the tree: a treemap requires interaction."""
    totals: dict[str, dict[str, float]] = {}
    for path, value, group in zip(f.paths, f.values, f.groups, strict=True):
        branch = totals.setdefault(".".join(path.split(".")[:2]), {})
        branch[group] = branch.get(group, 0.0) + value
    labels = sorted(totals, key=lambda b: -sum(totals[b].values()))[:24]
    groups = list(dict.fromkeys(f.groups))
    series = [Series(name=g, values=[totals[b].get(g, 0.0) for b in labels]) for g in groups]
    return _bars(Bars(id=f.id, title=f.title, labels=labels, series=series, unit=f.unit, digits=f.digits, stacked=True))


GAIN, LOSS, SOLID, OTHER = "#3aa57c", "#d9722b", "#3178b5", "#858c95"


def _waterfall(f: Waterfall) -> str:
    canvas = Canvas(880 - 2 * MARGIN)
    canvas.text(0, 12, f.title, size=15, bold=True)
    left, right, height = 242.0, 600.0, 38.0
    ms_at, factor_at, error_at = 702.0, 770.0, canvas.width
    for x, head in ((ms_at, "ms"), (factor_at, "vs FP32"), (error_at, "error")):
        canvas.text(x, 38, head, anchor="end", size=11, fill=MUTED)
    most = max(max(r.ms, r.previous_ms or 0.0) for r in [*f.rows, *f.compared])

    def place(ms: float) -> float:
        return left + (right - left) * ms / most

    def row(r: WaterfallRow, y: float, colour: str, *, bold: bool = False) -> None:
        canvas.text(0, y + 15, r.label, size=12.5, bold=bold)
        canvas.text(0, y + 29, r.note, size=10.5, fill=MUTED)
        solid = min(r.ms, r.previous_ms or r.ms)
        canvas.rect(place(0), y + 6, place(solid) - place(0), height - 14, colour, tip=r.tip)
        if r.previous_ms is not None:
            _change(canvas, r, place, y, height)
        canvas.text(ms_at, y + 22, number(r.ms, 1), anchor="end", size=13, bold=bold)
        canvas.text(factor_at, y + 22, f"{number(r.factor, 1)} ×", anchor="end", size=12, bold=bold)
        canvas.text(error_at, y + 22, r.error or MISSING, anchor="end", size=11, fill=MUTED)

    y = 46.0
    for i, r in enumerate(f.rows):
        row(r, y, SOLID, bold=i in (0, len(f.rows) - 1))
        y += height
    if f.compared:
        canvas.line(0, y + 8, error_at, y + 8)
        canvas.text(0, y + 26, "For comparison: the same network without Voxtune", size=11, fill=MUTED)
        y += 32
        for r in f.compared:
            row(r, y, OTHER)
            y += height
    canvas.line(0, y + 8, error_at, y + 8)
    for line in f.caption.splitlines():
        y += 18
        canvas.text(0, y + 10, line, size=10.5, fill=MUTED)
    return canvas.finish(y + 10, f.title)


def _change(canvas: Canvas, r: WaterfallRow, place: Callable[[float], float], y: float, height: float) -> None:
    """The time removed or added compared with the row above."""
    assert r.previous_ms is not None
    change = r.ms - r.previous_ms
    low, high = sorted((place(r.ms), place(r.previous_ms)))
    canvas.line(place(r.previous_ms), y - 8, place(r.previous_ms), y + 6, stroke=MUTED, dash="2 2")
    canvas.rect(low, y + 6, high - low, height - 14, LOSS if change > 0 else GAIN, tip=f"{change:+.1f} ms", opacity=0.6)
    label = f"{change:+.1f}".replace("-", "−")
    canvas.text(high + 6, y + 22, label, size=11, fill=MUTED)


_DRAW: dict[type[Figure], Callable[[Any], str]] = {
    Bars: _bars,
    Scatter: _scatter,
    Timeline: _timeline,
    Area: _area,
    Tree: _tree,
    Waterfall: _waterfall,
}

"""Figures as plain data, drawn by the HTML page (from JSON) and by svg.py."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from voxtune.report import palette


@dataclass(kw_only=True)
class Series:
    """Values of one colour; None was not measured and is not drawn."""

    name: str
    values: list[float | None]
    low: list[float | None] | None = None
    high: list[float | None] | None = None
    colour: str = ""


@dataclass(kw_only=True)
class Figure:
    kind: ClassVar[str] = ""
    id: str
    title: str
    caption: str = ""
    # The mode of its sessions (training or sampling) if they have one.
    mode: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, **asdict(self)}


@dataclass(kw_only=True)
class Bars(Figure):
    """Horizontal bars, one label per row, series grouped or stacked."""

    kind: ClassVar[str] = "bars"
    labels: list[str]
    series: list[Series]
    unit: str = ""
    digits: int = 2
    stacked: bool = False
    # A reference line, such as 1 for ratios.
    mark: float | None = None
    # Logarithmic axis; bars start at the lowest decade.
    log: bool = False

    def __post_init__(self) -> None:
        for position, series in enumerate(self.series):
            assert len(series.values) == len(self.labels), f"{self.title}: {series.name} has a different length"
            series.colour = series.colour or palette.colour(series.name, position)

    def unmeasured(self) -> str:
        """The labels of rows without any value."""
        empty = [i for i in range(len(self.labels)) if all(s.values[i] is None for s in self.series)]
        return ", ".join(self.labels[i] for i in empty)

    def rows(self, chosen: list[int], **changes: Any) -> Bars:
        """The same figure with some of its rows."""

        def part(values: list[float | None] | None) -> list[float | None] | None:
            return None if values is None else [values[i] for i in chosen]

        series = [
            Series(
                name=s.name, values=[s.values[i] for i in chosen], low=part(s.low), high=part(s.high), colour=s.colour
            )
            for s in self.series
        ]
        return Bars(**{**vars(self), "labels": [self.labels[i] for i in chosen], "series": series} | changes)


@dataclass(kw_only=True)
class Point:
    name: str
    x: float
    y: float
    size: float  # weight of the point, such as its share of time in percent
    group: str
    detail: str = ""


@dataclass(kw_only=True)
class Roof:
    """A ceiling of the roofline: constant `flat`, or slope `per_x` (y = per_x * x)."""

    name: str
    flat: float | None = None
    per_x: float | None = None


@dataclass(kw_only=True)
class Scatter(Figure):
    """Points and roofs on two logarithmic axes."""

    kind: ClassVar[str] = "scatter"
    x_title: str
    y_title: str
    points: list[Point]
    roofs: list[Roof] = field(default_factory=list)
    size_title: str = "share of the step, %"

    def to_json(self) -> dict[str, Any]:
        groups = list(dict.fromkeys(p.group for p in self.points))
        return {**super().to_json(), "groups": [[g, palette.colour(g, i)] for i, g in enumerate(groups)]}


@dataclass(kw_only=True)
class Timeline(Figure):
    """Launches of one step. `items`: (start µs, duration µs, group, name, note, row); the last four are indices."""

    kind: ClassVar[str] = "timeline"
    rows: list[str]
    groups: list[str]
    names: list[str]
    notes: list[str]
    items: list[tuple[float, float, int, int, int, int]]
    gaps: list[tuple[float, float]] = field(default_factory=list)
    length_us: float = 0.0

    def to_json(self) -> dict[str, Any]:
        colours = [palette.colour(g, i) for i, g in enumerate(self.groups)]
        return {"kind": self.kind, **vars(self), "colours": colours}


@dataclass(kw_only=True)
class Area(Figure):
    """Stacked areas over time; a value is constant until the next point."""

    kind: ClassVar[str] = "area"
    x: list[float]
    series: list[Series]
    x_title: str = "time in step, ms"
    unit: str = "GiB"
    digits: int = 2

    def __post_init__(self) -> None:
        for position, series in enumerate(self.series):
            assert len(series.values) == len(self.x), f"{self.title}: {series.name} has a different length"
            series.colour = series.colour or palette.colour(series.name, position)


@dataclass(kw_only=True)
class Tree(Figure):
    """A treemap of dotted paths: area by value, colour by group."""

    kind: ClassVar[str] = "tree"
    paths: list[str]
    values: list[float]
    groups: list[str]
    unit: str = "ms"
    digits: int = 2

    def to_json(self) -> dict[str, Any]:
        names = list(dict.fromkeys(self.groups))
        return {**super().to_json(), "palette": {g: palette.colour(g, i) for i, g in enumerate(names)}}


@dataclass(kw_only=True)
class WaterfallRow:
    """`previous_ms` is the row that this one improves on; None for a row that stands alone."""

    label: str
    note: str
    ms: float
    previous_ms: float | None
    factor: float
    error: str
    tip: str


@dataclass(kw_only=True)
class Waterfall(Figure):
    """A bar per configuration and, beside it, the time that it removes or adds. For documents: drawn as SVG only."""

    kind: ClassVar[str] = "waterfall"
    rows: list[WaterfallRow]
    compared: list[WaterfallRow] = field(default_factory=list)

"""Reads a metrics.json for display. The file may come from any program, so every value is checked."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from voxtune.errors import InputError
from voxtune.reading import read_json
from voxtune.report.numbers import MISSING, number


@dataclass(frozen=True, kw_only=True)
class MetricRow:
    """One metric as text. `interval` and `count` are empty where the file has none."""

    name: str
    value: str
    interval: str = ""
    count: str = ""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """`figures`: metrics over all volumes. `volumes`: names and values per volume, by file name."""

    figures: tuple[MetricRow, ...] = ()
    volumes: dict[str, list[tuple[str, str]]] = field(default_factory=dict)


def read_metrics(path: Path) -> Metrics:
    """A metrics.json: {"figures": [{"name", "value", "low", "high", "n", "unit"}], "volumes": [{"file", "psnr", ...}]}."""
    fix = 'expected {"figures": [{"name": ..., "value": ...}]}, as written by voxtune evaluate'
    data = read_json(path)
    figures = data.get("figures") if isinstance(data, dict) else None
    if not isinstance(figures, list):
        raise InputError(f"{path}: no list of metrics; {fix}")
    return Metrics(
        figures=tuple(_row(m) for m in figures if isinstance(m, dict) and m.get("name")),
        volumes=_volume_values(data.get("volumes")),
    )


def _volume_values(rows: Any) -> dict[str, list[tuple[str, str]]]:
    volumes = {}
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, dict) and isinstance(row.get("file"), str):
            # The file name alone, since folders may have moved; both separators, since it may come from another system.
            volumes[row["file"].replace("\\", "/").rpartition("/")[2]] = _values(row)
    return volumes


def _values(row: dict[str, Any]) -> list[tuple[str, str]]:
    """The numbers of a row and of nested rows, such as Dice per label."""
    values = []
    for name, value in row.items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        values += [(f"{name} {part}".strip(), _text(v)) for part, v in inner if _finite(v) is not None]
    return values


def _row(metric: dict[str, Any]) -> MetricRow:
    unit = metric.get("unit")
    unit = f" {unit}" if isinstance(unit, str) and unit else ""
    low, high, count = (_finite(metric.get(key)) for key in ("low", "high", "n"))
    return MetricRow(
        name=str(metric["name"]),
        value=_text(metric.get("value")) + unit,
        interval=f"{_text(low)} to {_text(high)}" if low is not None and high is not None else "",
        count=number(int(count)) if count is not None else "",
    )


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    size = _finite(value)
    if size is None:
        return MISSING
    # Four significant digits, since metrics range from thousandths (MMD) to tens (PSNR).
    return f"{size:.4g}" if 1e-4 <= abs(size) < 1e4 or size == 0 else number(size, 1)


def _finite(value: Any) -> float | None:
    finite = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if finite else None

"""Metrics that were computed elsewhere, as rows to show: read with care, since any program may have written them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from voxtune.errors import InputError
from voxtune.files import one_line
from voxtune.report.numbers import MISSING, number


@dataclass(frozen=True, kw_only=True)
class MetricRow:
    """One figure as text. `interval` and `count` are empty where the file has none."""

    name: str
    value: str
    interval: str = ""
    count: str = ""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """`figures` are of all volumes together; `volumes` holds names and values of one volume, by its file's name."""

    figures: tuple[MetricRow, ...] = ()
    volumes: dict[str, list[tuple[str, str]]] = field(default_factory=dict)


def read_metrics(path: Path) -> Metrics:
    """A metrics.json: {"figures": [{"name", "value", "low", "high", "n", "unit"}], "volumes": [{"file", "psnr", ...}]}."""
    fix = 'it should be {"figures": [{"name": ..., "value": ...}]}, as voxtune evaluate writes it'
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as metrics ({one_line(error)}); {fix}") from None
    figures = data.get("figures") if isinstance(data, dict) else None
    if not isinstance(figures, list):
        raise InputError(f"{path}: holds no list of figures; {fix}")
    return Metrics(
        figures=tuple(_row(f) for f in figures if isinstance(f, dict) and f.get("name")),
        volumes=_of_volumes(data.get("volumes")),
    )


def _of_volumes(rows: Any) -> dict[str, list[tuple[str, str]]]:
    found = {}
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, dict) and isinstance(row.get("file"), str):
            # Folders move; names stay. Both kinds of slash, since the file may have been written elsewhere.
            found[row["file"].replace("\\", "/").rpartition("/")[2]] = _values(row)
    return found


def _values(row: dict[str, Any]) -> list[tuple[str, str]]:
    """The numbers of a row, and of the rows in it: dice of each label."""
    values = []
    for name, value in row.items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        values += [(f"{name} {part}".strip(), _text(v)) for part, v in inner if _finite(v) is not None]
    return values


def _row(figure: dict[str, Any]) -> MetricRow:
    unit = figure.get("unit")
    unit = f" {unit}" if isinstance(unit, str) and unit else ""
    low, high, count = (_finite(figure.get(key)) for key in ("low", "high", "n"))
    return MetricRow(
        name=str(figure["name"]),
        value=_text(figure.get("value")) + unit,
        interval=f"{_text(low)} to {_text(high)}" if low is not None and high is not None else "",
        count=number(int(count)) if count is not None else "",
    )


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    found = _finite(value)
    if found is None:
        return MISSING
    # Metrics span from thousandths (MMD) to tens (PSNR): what they share is significant digits.
    return f"{found:.4g}" if 1e-4 <= abs(found) < 1e4 or found == 0 else number(found, 1)


def _finite(value: Any) -> float | None:
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if usable else None

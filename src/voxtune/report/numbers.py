"""Number formats, shared by console, SVG and HTML (assets/tables.js implements the same rules)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from voxtune.analysis.table import Column

MISSING = "–"  # not measured


def number(value: float | int | None, digits: int = 2) -> str:
    """`digits` decimal places; small values keep two significant digits, huge ones use exponents."""
    if value is None:
        return MISSING
    if isinstance(value, int):
        return f"{value:,}"
    size = abs(value)
    if size >= 1e7:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    if 0 < size < 0.5 * 10**-digits:
        return f"{value:.2g}" if size >= 1e-4 else f"{value:.1e}".replace("e-0", "e-")
    return f"{value:,.{digits}f}"


def cell(value: Any, column: Column) -> str:
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    return number(int(value) if column.kind == "int" else value, column.digits)


# The suffix of a column name for a unit.
_ENDINGS = {"%": "pct", "µs": "us", "us": "us", "GB/s": "gbs", "TFLOP/s": "tflops", "s": "seconds"}


# Titles of columns whose names are kept for JSON.
_TITLES = {
    "few": "few tier",
    "few_a_launch": "few per launch",
    "full_a_launch": "full per launch",
    "opcodes_a_launch": "opcodes per launch",
    "turns": "all tiers",
    "named": "precision by name",
    "what": "item",
}


def heading(column: Column) -> tuple[str, str]:
    """The column title without unit suffix, and the unit with an arrow for the better direction."""
    name = column.title or _TITLES.get(column.name) or column.name.replace("_", " ")
    ending, words = _ENDINGS.get(column.unit, column.unit.lower()), name.split(" ")
    if column.title:
        pass
    elif column.unit and words[-1] == ending and len(words) > 1:
        name = " ".join(words[:-1])
    elif column.unit and name == ending:
        name = _NAMES.get(ending, name)
    arrow = {"low": "↓", "high": "↑"}.get(column.better, "") if column.kind != "bool" else ""
    return name, f"{column.unit} {arrow}".strip()


# Titles of columns that are named by their unit only.
_NAMES = {
    "ms": "time",
    "us": "time",
    "seconds": "time",
    "mib": "size",
    "gb": "DRAM traffic",
    "gbs": "rate",
    "tflops": "rate",
    "gflop": "FLOPs",
}


def cudnn_version(version: Any) -> str:
    """cuDNN 9 reports major * 10000 + minor * 100 + patch."""
    # Not str.isdigit: it accepts characters, and thousands of digits, that int does not.
    code = int(version) if re.fullmatch(r"[0-9]{1,9}", str(version)) else 0
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}" if code >= 90000 else str(version)


def clip(text: str, width: int) -> str:
    """Shortens a long name in the middle, since start and end are the most informative."""
    if len(text) <= width:
        return text
    tail = width // 3
    return f"{text[: width - tail - 1]}…{text[-tail:]}"

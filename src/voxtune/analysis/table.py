"""The result of every analysis: a table with units, the better direction, notes and missing values.

A value that was not measured is None, never 0. A refused table has a reason instead of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["text", "int", "float", "percent", "bool"]
Better = Literal["low", "high", "none"]


@dataclass(frozen=True)
class Column:
    """`kind` selects the format; percent is 0 to 100. `digits` are decimal places, `doc` is the tooltip.

    `title` replaces the heading made of the name. The page shows columns of `detail` on request only.
    """

    name: str
    unit: str = ""
    kind: Kind = "float"
    better: Better = "none"
    digits: int = 2
    doc: str = ""
    title: str = ""
    detail: bool = False


@dataclass
class Table:
    """`rows` map column names to str, int, float, bool or None. `extra` holds results that are not rows, such as a verdict."""

    title: str
    columns: list[Column]
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refused: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [c.name for c in self.columns]
        assert len(names) == len(set(names)), f"{self.title}: duplicate column names"
        unknown = {key for row in self.rows for key in row} - set(names)
        assert not unknown, f"{self.title}: not columns: {sorted(unknown)}"
        # Every row has every column and plain values, so printing and JSON need no special cases.
        self.rows = [{n: plain(row.get(n)) for n in names} for row in self.rows]

    def column(self, name: str) -> list[Any]:
        assert any(c.name == name for c in self.columns), f"{self.title}: no column {name}"
        return [row[name] for row in self.rows]

    def row(self, **match: Any) -> dict[str, Any]:
        """The one row whose cells equal `match`."""
        matches = [r for r in self.rows if all(r[k] == v for k, v in match.items())]
        assert len(matches) == 1, f"{self.title}: {len(matches)} rows match {match}"
        return matches[0]

    def to_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "columns": [vars(c) | {} for c in self.columns],
            "rows": self.rows,
            "notes": list(self.notes),
            "refused": self.refused,
            **({"extra": self.extra} if self.extra else {}),
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Table:
        return Table(
            data["title"],
            [Column(**c) for c in data["columns"]],
            data["rows"],
            data.get("notes", []),
            data.get("refused"),
            data.get("extra", {}),
        )


def refuse(title: str, reason: str, columns: Iterable[Column] = ()) -> Table:
    return Table(title, list(columns), refused=reason)


def plain(value: Any) -> Any:
    """A cell as a JSON value: numpy and pandas scalars unwrapped; NA, NaN and infinities become None."""
    if value is None or isinstance(value, str | bool):
        return value
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    raise AssertionError(f"not a plain value: {value!r}")


def as_text(table: Table) -> str:
    if table.refused is not None:
        return f"{table.title}\n  refused: {table.refused}"
    header = [f"{c.name} [{c.unit}]" if c.unit else c.name for c in table.columns]
    body = [[cell(row[c.name], c) for c in table.columns] for row in table.rows]
    widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]
    lines = [table.title, _line(header, widths, table.columns), *(_line(row, widths, table.columns) for row in body)]
    return "\n".join([*lines, *(f"  {note}" for note in table.notes)])


def cell(value: Any, column: Column) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.{column.digits}f}"
    # A kernel name must not send control characters to the terminal.
    return "".join(ch if ch.isprintable() else "?" for ch in str(value))


def _line(cells: list[str], widths: list[int], columns: list[Column]) -> str:
    pairs = zip(cells, widths, columns, strict=True)
    return "  " + "  ".join(c.ljust(w) if k.kind == "text" else c.rjust(w) for c, w, k in pairs).rstrip()

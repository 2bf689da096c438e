"""A table as plain text, for the verbs that print one small table and for test failures; the report has its own."""

from __future__ import annotations

from typing import Any

from voxtune.analysis.table import Column, Table


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
    # A hostile kernel name must not move the cursor of the terminal it is printed on.
    return "".join(ch if ch.isprintable() else "?" for ch in str(value))


def _line(cells: list[str], widths: list[int], columns: list[Column]) -> str:
    pairs = zip(cells, widths, columns, strict=True)
    return "  " + "  ".join(c.ljust(w) if k.kind == "text" else c.rjust(w) for c, w, k in pairs).rstrip()

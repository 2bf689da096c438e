"""The table of files with problems: at most 20 rows on standard error, all of them in a text file."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Sequence

from voxtune.errors import MAX_MESSAGE, printable

SHOWN_ROWS = 20


def print_problems(problems: Sequence[tuple[str, str]], headline: str, *, one_line: bool) -> None:
    """Prints the headline, then (file, problem) in a table; with `one_line` only the headline and the file of all problems."""
    rows = [(printable(file, MAX_MESSAGE), printable(problem, MAX_MESSAGE)) for file, problem in problems]
    complete = f"; all of them: {_list_file(rows)}" if one_line or len(rows) > SHOWN_ROWS else ""
    print(printable(headline, MAX_MESSAGE) + (complete if one_line else ""), file=sys.stderr)
    if one_line:
        return
    _print_rows(rows[:SHOWN_ROWS])
    if len(rows) > SHOWN_ROWS:
        print(f"{len(rows) - SHOWN_ROWS} more{complete}", file=sys.stderr)


def _print_rows(rows: list[tuple[str, str]]) -> None:
    """A table that fits a terminal; elsewhere, or without rich, a line for each row."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        width = max(len(file) for file, _ in rows)
        for file, problem in rows:
            print(f"  {file:{width}}  {problem}", file=sys.stderr)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("file", overflow="fold", ratio=2)
    table.add_column("problem", overflow="fold", ratio=3)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(stderr=True).print(table)


def _list_file(rows: list[tuple[str, str]]) -> str:
    """Writes all rows to a text file in the system's temporary folder, and returns its path."""
    try:
        handle, name = tempfile.mkstemp(prefix="voxtune-errors-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.writelines(f"{name}\t{problem}\n" for name, problem in rows)
    except OSError as error:
        return f"not written, {error.strerror or error}"
    return name

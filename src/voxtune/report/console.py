"""Prints a document on the console: headline and tables, without figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from voxtune.report.document import Badge, Block, Document, Section, TableBlock, Text
from voxtune.report.numbers import cell, clip, heading

if TYPE_CHECKING:
    from rich.console import Console

    from voxtune.analysis.table import Table

ROWS = 12
NAME_WIDTH = 60
PIPE_WIDTH = 200


def make_console() -> Console:
    """A console with the width of the terminal, or a fixed width for files and pipes."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def print_document(document: Document, console: Console, *, rows: int = ROWS) -> None:
    from rich.text import Text as Line

    console.print(Line(document.title, style="bold"))
    console.print(Line(document.subtitle, style="dim"))
    for fact in document.facts:
        console.print(Line(f"  {fact.label}: {fact.value}" + (f" ({fact.note})" if fact.note else "")))
    for badge in document.coverage:
        _print_badge(badge, console)
    for section in document.sections:
        _print_section(section, console, rows)


def print_table(table: Table, console: Console, *, rows: int = ROWS) -> None:
    """Cells are plain text: markup in a kernel name is not interpreted."""
    from rich.table import Table as Grid
    from rich.text import Text as Line

    if table.refused:
        console.print(Line(f"{table.title}: refused: {table.refused}", style="red"))
    elif not table.rows:
        console.print(Line(f"{table.title}: no data", style="dim"))
    else:
        grid = Grid(title=Line(table.title, style="bold"), title_justify="left", box=None, pad_edge=False)
        columns = [c for c in table.columns if any(r[c.name] is not None for r in table.rows)]
        for column in columns:
            name, aside = heading(column)
            title = f"{name}{', ' if column.unit else ' '}{aside}".strip()
            if column.kind in ("text", "bool"):
                grid.add_column(Line(title), overflow="fold", header_style="dim")
            else:
                grid.add_column(Line(title), justify="right", no_wrap=True, header_style="dim")
        for row in table.rows[:rows]:
            grid.add_row(*(Line(_printable(clip(cell(row[c.name], c), NAME_WIDTH))) for c in columns))
        console.print(grid)
        missing = [heading(c)[0] for c in table.columns if c not in columns]
        if missing:
            console.print(Line(f"  not measured: {', '.join(missing)}", style="dim"))
        if len(table.rows) > rows:
            console.print(Line(f"  ... {len(table.rows) - rows} more rows", style="dim"))
    for note in table.notes:
        console.print(Line(f"  {_printable(note)}", style="dim"))


def _print_section(section: Section, console: Console, rows: int) -> None:
    from rich.text import Text as Line

    console.print()
    console.rule(Line(section.title, style="bold"), align="left", style="dim")
    for block in section.blocks:
        _print_block(block, console, rows)
    for tab in section.tabs:
        if len(section.tabs) > 1:
            console.print(Line(tab.label, style="bold underline"))
        for block in tab.blocks:
            _print_block(block, console, rows)


def _print_block(block: Block, console: Console, rows: int) -> None:
    from rich.text import Text as Line

    if isinstance(block, TableBlock):
        print_table(block.table, console, rows=rows)
    elif isinstance(block, Badge):
        _print_badge(block, console)
    elif isinstance(block, Text):
        style = {"good": "green", "bad": "red", "missing": "dim"}.get(block.tone, "")
        title = f"{block.title}: " if block.title else ""
        console.print(Line(_printable(title + block.text), style=style))


def _print_badge(badge: Badge, console: Console) -> None:
    from rich.text import Text as Line

    mark = "✓" if badge.good else "✗"
    console.print(Line(f"  {mark} {_printable(badge.label)}", style="green" if badge.good else "red"))
    if not badge.good:
        for reason in badge.reasons:
            console.print(Line(f"      {_printable(reason)}"))


def _printable(text: str) -> str:
    """Replaces control characters, which a kernel name must not send to the terminal."""
    return "".join(c if c.isprintable() else "�" for c in text)

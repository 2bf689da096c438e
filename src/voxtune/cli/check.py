"""voxtune check: a regression gate for CI."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from voxtune.cli.common import JsonOption, Output, QuietOption


def command(
    base: Annotated[Path, typer.Argument(help="Session to hold against.")],
    new: Annotated[Path, typer.Argument(help="Session to check.")],
    max_slowdown: Annotated[str, typer.Option(help="How much slower a step may be.")] = "5%",
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Leave with 0 if NEW is not slower than allowed, 1 if it is, 3 if the spread is too large to say."""
    from voxtune.analysis.check import check, parse_percent
    from voxtune.analysis.table import as_text
    from voxtune.profile.session import load_session

    out = Output(json=as_json, quiet=quiet)
    allowed = parse_percent(max_slowdown)
    table = check(load_session(base), load_session(new), allowed)
    out.result(table.to_json())
    if not as_json:
        out.say(as_text(table))
        out.say(f"{table.extra['verdict']}: {table.extra['reason']}")
    raise typer.Exit(table.extra["exit_code"])

"""voxtune check: a performance regression check for CI."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from voxtune.cli.common import JsonOption, Output, QuietOption


def command(
    base: Annotated[Path, typer.Argument(help="Baseline session.")],
    new: Annotated[Path, typer.Argument(help="Session to check.")],
    max_slowdown: Annotated[str, typer.Option(help="Largest allowed slowdown of a step.")] = "5%",
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Compare the step time of NEW with BASE.

    Exit code: 0 not slower than allowed, 1 slower, 3 undecided (the timings vary too much).
    """
    from voxtune.analysis.check import check, parse_percent
    from voxtune.analysis.table import as_text
    from voxtune.profile.session import load_session

    output = Output(json=as_json, quiet=quiet)
    allowed = parse_percent(max_slowdown)
    table = check(load_session(base), load_session(new), allowed)
    output.result(table.to_json())
    if not as_json:
        output.say(as_text(table))
        output.say(f"{table.extra['verdict']}: {table.extra['reason']}")
    raise typer.Exit(table.extra["exit_code"])

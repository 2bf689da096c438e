"""voxtune doctor: what works on this machine."""

from __future__ import annotations

import typer

from voxtune.cli.common import EXIT_NEGATIVE, JsonOption, Output, QuietOption

MARKS = {"ok": "ok", "note": "--", "warning": "!!", "error": "XX"}


def command(json: JsonOption = False, quiet: QuietOption = False) -> None:
    """Check this machine: versions, GPU, known defects, and what works. Exit code 3 if a problem is found."""
    from voxtune.runtime.doctor import examine, verdict

    output = Output(json=json, quiet=quiet)
    checks = examine()
    result = verdict(checks)
    if not json:
        for check in checks:
            output.say(f"{MARKS[check.level]}  {check.name:16} {check.value}")
            if check.consequence:
                output.say(f"{'':20} {check.consequence}")
    output.result(result)
    if result["verdict"] == "error":
        raise typer.Exit(EXIT_NEGATIVE)

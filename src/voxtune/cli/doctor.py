"""voxtune doctor: what will and will not work here."""

from __future__ import annotations

import typer

from voxtune.cli.common import JsonOption, Output, QuietOption


def command(json: JsonOption = False, quiet: QuietOption = False) -> None:
    """Examine this machine: versions, GPU, known hazards, what will and will not work."""
    from voxtune.runtime.doctor import examine, verdict

    output = Output(json=json, quiet=quiet)
    checks = examine()
    result = verdict(checks)
    if not json:
        for check in checks:
            mark = {"ok": "ok", "note": "--", "warning": "!!", "error": "XX"}[check.level]
            output.say(f"{mark}  {check.name:16} {check.found}")
            if check.follows:
                output.say(f"{'':20} {check.follows}")
    output.result(result)
    if result["verdict"] == "error":
        raise typer.Exit(2)

"""The command line, called in this process."""

from __future__ import annotations

from typing import Any

from tests.factories import GOLDENS
from voxtune.cli.main import main

CHECKPOINT = str(GOLDENS / "med_ddpm_tiny.pt")


def run(capsys: Any, *arguments: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `voxtune arguments`."""
    code = main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err

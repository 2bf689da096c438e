"""The command line: one file a verb; each parses, calls and prints."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Annotated

import typer

from voxtune.errors import InputError

# The order in which help lists them.
VERBS = (
    "demo",
    "sample",
    "evaluate",
    "steps",
    "usefulness",
    "tune",
    "ladder",
    "train",
    "import",
    "info",
    "cohort",
    "pack",
    "profile",
    "report",
    "view",
    "study",
    "check",
    "estimate",
    "doctor",
)

app = typer.Typer(
    help="Makes 3D diffusion U-Nets run near the hardware's limit, and proves it.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(show: bool) -> None:
    if show:
        from voxtune.versions import __version__

        print(f"voxtune {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def _register() -> None:
    for verb in VERBS:
        module = importlib.import_module(f"voxtune.cli.{'import_' if verb == 'import' else verb}")
        app.command(verb)(module.command)


_register()


def run(arguments: list[str] | None = None) -> None:
    """The console script: 0 done, 2 the user's input is wrong (one line), 1 our fault."""
    sys.exit(main(arguments))


def main(arguments: list[str] | None = None) -> int:
    try:
        code = app(arguments, standalone_mode=False) or 0
        return _fail("stopped", code=130) if code == 130 else code  # typer's own answer to Ctrl-C
    except typer.Exit as leave:
        return leave.exit_code
    except BrokenPipeError:
        # The reader of our output went away (voxtune ... | head): silence the interpreter's own flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (KeyboardInterrupt, typer.Abort):
        return _fail("stopped", code=130)
    except InputError as error:
        return _fail(str(error))
    except Exception as error:
        usage = getattr(error, "format_message", None)  # wrong usage, found by the parser
        return _fail(usage() or "give a command; see voxtune --help") if usage else _our_fault()


def _our_fault() -> int:
    traceback.print_exc()
    return _fail("this is our fault, not yours; please report it with the lines above", code=1)


def _fail(message: str, code: int = 2) -> int:
    print(f"voxtune: error: {' '.join(message.split())}", file=sys.stderr)
    return code

"""The command line: one module per command; each parses, calls and prints."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Annotated

import typer

from voxtune.cli.choices import Command
from voxtune.cli.common import EXIT_CODES, EXIT_INPUT, EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_OK
from voxtune.errors import InputError

# In the order of the help.
COMMANDS = (
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
    help="Fast 3D diffusion U-Nets for brain MRI: sample, train, profile and check them.",
    epilog="Exit codes: " + "; ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items()) + ".",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
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
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def _register() -> None:
    for name in COMMANDS:
        module = importlib.import_module(f"voxtune.cli.{'import_' if name == 'import' else name}")
        app.command(name, cls=Command)(module.command)


_register()


def run(arguments: list[str] | None = None) -> None:
    """The console script."""
    sys.exit(main(arguments))


def main(arguments: list[str] | None = None) -> int:
    """Runs a command and returns its exit code, one of `voxtune.cli.common.EXIT_CODES`."""
    try:
        # The name is fixed so that shell completion also works with `python -m voxtune`.
        code = app(arguments, prog_name="voxtune", standalone_mode=False) or EXIT_OK
        return _interrupted() if code == EXIT_INTERRUPTED else code  # typer's own handling of Ctrl-C
    except (typer.Exit, SystemExit) as leave:  # SystemExit: the options for shell completion
        status = leave.code if isinstance(leave, SystemExit) else leave.exit_code
        return status if isinstance(status, int) else EXIT_OK
    except BrokenPipeError:
        # The reader of our output is gone (voxtune ... | head). Keep the interpreter's flush at exit quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted()
    except InputError as error:
        return _fail(str(error))
    except Exception as error:
        usage = getattr(error, "format_message", None)  # wrong usage, reported by the parser
        return _fail(usage() or "missing command; see voxtune --help") if usage else _internal_error()


def _internal_error() -> int:
    traceback.print_exc()
    return _fail("internal error; please report it with the traceback above", code=EXIT_INTERNAL)


def _interrupted() -> int:
    return _fail("interrupted", code=EXIT_INTERRUPTED)


def _fail(message: str, code: int = EXIT_INPUT) -> int:
    print(f"voxtune: error: {' '.join(message.split())}", file=sys.stderr)
    return code

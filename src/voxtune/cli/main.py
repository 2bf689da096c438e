"""The command line: one file a verb; each parses, calls and prints."""

from __future__ import annotations

import importlib
import os
import sys
import traceback

import typer

from voxtune.errors import InputError

# The order in which help lists them.
VERBS = ("demo", "sample", "train", "import", "info", "cohort", "doctor")

app = typer.Typer(
    help="Makes 3D diffusion U-Nets run near the hardware's limit, and proves it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(show: bool) -> None:
    if show:
        from voxtune import __version__

        print(f"voxtune {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


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
        return app(arguments, standalone_mode=False) or 0
    except InputError as error:
        return _fail(" ".join(str(error).split()))
    except KeyboardInterrupt:
        print("voxtune: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output went away (voxtune ... | head): silence the interpreter's own flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except typer.Exit as leave:
        return leave.exit_code
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # wrong usage, found by the parser
            return _fail(error.format_message() or "give a command; see voxtune --help")
        traceback.print_exc()
        print("voxtune: this is our fault, not yours; please report it with the lines above", file=sys.stderr)
        return 1


def _fail(message: str) -> int:
    print(f"voxtune: error: {message}", file=sys.stderr)
    return 2

"""The command line: one module per command; each parses, calls and prints."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated

import typer

from voxtune.cli.choices import Command
from voxtune.cli.common import EXIT_CODES, EXIT_INPUT, EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_OK
from voxtune.errors import FilesError, InputError
from voxtune.files import printable

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

# Rows of a table of files with errors; a text file has all of them.
SHOWN_ROWS = 20
# Characters of a message: names and values in files can have any length.
MAX_MESSAGE = 500

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
    read_limit: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory that reading one file may need, such as 4GB. Default: 1GiB, or 16 times the size of the file if that "
            "is more.",
        ),
    ] = None,
) -> None:
    if read_limit is not None:
        from voxtune.reading import LIMIT_VARIABLE, parse_bytes

        parse_bytes(read_limit, "--read-limit")
        os.environ[LIMIT_VARIABLE] = read_limit  # also for the processes that the command starts
    if context.invoked_subcommand is None:
        print(context.get_help())


def _register() -> None:
    for name in COMMANDS:
        module = importlib.import_module(f"voxtune.cli.{'import_' if name == 'import' else name}")
        app.command(name, cls=Command)(module.command)


_register()


def main(arguments: list[str] | None = None) -> int:
    """Runs a command and returns its exit code, one of `voxtune.cli.common.EXIT_CODES`."""
    with _interrupts() as pressed:
        return _run(arguments, pressed)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM. After a plain KeyboardInterrupt within exec(), as in imports, Python ignores the exit code."""


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Within the block, Ctrl-C and SIGTERM raise KeyboardInterrupt; the list holds the signals that arrived."""
    pressed: list[int] = []

    def press(number: int, _frame: FrameType | None) -> None:
        pressed.append(number)
        raise Interrupted

    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return
    handled = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, press) for number in handled}
    hook = sys.unraisablehook
    # An interruption within a destructor or a callback cannot be raised; Python would print a traceback.
    sys.unraisablehook = lambda event: None if pressed else hook(event)
    try:
        yield pressed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = hook


def _run(arguments: list[str] | None, pressed: list[int]) -> int:
    try:
        # The name is fixed so that shell completion also works with `python -m voxtune`.
        code = app(arguments, prog_name="voxtune", standalone_mode=False) or EXIT_OK
        return _interrupted(pressed) if code == EXIT_INTERRUPTED else code  # typer's own handling of Ctrl-C
    except (typer.Exit, SystemExit) as leave:  # SystemExit: the options for shell completion
        status = leave.code if isinstance(leave, SystemExit) else leave.exit_code
        return status if isinstance(status, int) else EXIT_OK
    except BrokenPipeError:
        # The reader of our output is gone (voxtune ... | head). Keep the interpreter's flush at exit quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted(pressed)
    except Exception as error:
        # Libraries turn the interruption of an import or a callback into errors of their own.
        return _interrupted(pressed) if pressed else _report(error, arguments)


def _report(error: Exception, arguments: list[str] | None) -> int:
    """Prints an error and returns its exit code."""
    if isinstance(error, InputError):
        one_line = "--json" in (sys.argv[1:] if arguments is None else arguments)
        return _fail_files(error, one_line=one_line) if isinstance(error, FilesError) else _fail(str(error))
    usage = getattr(error, "format_message", None)  # wrong usage, reported by the parser
    if usage:
        return _fail(usage() or "missing command; see voxtune --help")
    traceback.print_exception(error)
    return _fail("internal error; please report it with the traceback above", code=EXIT_INTERNAL)


def _interrupted(pressed: list[int]) -> int:
    """Prints the line of an interrupted command; its exit code is that of a process that the signal ended."""
    return _fail("interrupted", code=128 + pressed[0] if pressed else EXIT_INTERRUPTED)


def _fail(message: str, code: int = EXIT_INPUT) -> int:
    print(f"voxtune: error: {printable(message, MAX_MESSAGE)}", file=sys.stderr)
    return code


def _fail_files(error: FilesError, *, one_line: bool) -> int:
    """Prints the problems of several files as a table, or on `one_line`; many also go to a text file."""
    rows = [(printable(file, MAX_MESSAGE), printable(problem, MAX_MESSAGE)) for file, problem in error.rows]
    if len(rows) == 1:
        return _fail(str(error))
    complete = f"; all of them: {_list_file(rows)}" if one_line or len(rows) > SHOWN_ROWS else ""
    if one_line:
        return _fail(f"{error}{complete}")
    _fail(f"{len(rows)} files cannot be used:")
    _print_rows(rows[:SHOWN_ROWS])
    if len(rows) > SHOWN_ROWS:
        print(f"{len(rows) - SHOWN_ROWS} more{complete}", file=sys.stderr)
    return EXIT_INPUT


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

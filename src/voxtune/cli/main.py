"""The command line: one module per command; each parses, calls and prints."""

from __future__ import annotations

import errno
import importlib
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from types import FrameType
from typing import Annotated, Any

import typer

from voxtune.cli.choices import Command
from voxtune.cli.common import ARRIVED_SIGNALS, EXIT_CODES, EXIT_INPUT, EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_OK
from voxtune.cli.problems import print_problems
from voxtune.errors import MAX_MESSAGE, FilesError, InputError, printable
from voxtune.files import one_line

# In the order of the help.
COMMANDS = (
    "demo",
    "sample",
    "generate",
    "evaluate",
    "steps",
    "usefulness",
    "tune",
    "ladder",
    "train",
    "distill",
    "ema",
    "import",
    "export",
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

# Not internal errors, wherever they happen, such as at a line of standard output.
DISK_ERRORS = {errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS}

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
        code = _run(arguments, pressed)
        try:
            sys.stdout.flush()
        except OSError as error:
            return _unwritable(error, code)
        return code


# Seconds until a signal is sent again that arrived where it could not interrupt.
AGAIN = 0.05


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM. After a plain KeyboardInterrupt within exec(), as in imports, Python ignores the exit code."""


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Within the block, Ctrl-C and SIGTERM raise KeyboardInterrupt; the list holds the signals that arrived."""
    pressed = ARRIVED_SIGNALS
    pressed.clear()

    def press(number: int, _frame: FrameType | None) -> None:
        pressed.append(number)
        raise Interrupted

    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return
    handled = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, press) for number in handled}
    hook = sys.unraisablehook

    def unraisable(event: Any) -> None:
        # An interruption within a destructor or a callback cannot be raised there; Python would print a traceback and go on.
        if issubclass(event.exc_type, Interrupted):
            again = threading.Timer(AGAIN, os.kill, (os.getpid(), pressed[-1]))
            again.daemon = True
            again.start()
        elif not pressed:
            hook(event)

    sys.unraisablehook = unraisable
    try:
        yield pressed
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) != signal.SIG_IGN:  # as the end of one of several processes does
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
    except BrokenPipeError as error:
        return _unwritable(error, EXIT_OK)
    except (KeyboardInterrupt, typer.Abort):
        return _once(lambda: _interrupted(pressed))
    except Exception as error:
        # Libraries turn the interruption of an import or a callback into errors of their own.
        failure = error
        return _once(lambda: _interrupted(pressed) if pressed else _report(failure, arguments))


def _once(report: Callable[[], int]) -> int:
    """The exit code of an error that is reported; of several processes that torchrun started, one reports it."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return report()
    from voxtune.training.distributed import reporting_once

    with reporting_once() as first:
        if first:
            return report()
        with redirect_stderr(io.StringIO()):
            return report()


def _unwritable(error: OSError, code: int) -> int:
    """The exit code if the disk or standard output cannot be written to."""
    with suppress(OSError, ValueError):
        # Keep the interpreter's flush at exit quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):  # the reader of our output is gone (voxtune ... | head)
        return code
    return _fail(f"{error.filename or 'standard output'}: {error.strerror or one_line(error)}")


def _report(error: Exception, arguments: list[str] | None) -> int:
    """Prints an error and returns its exit code."""
    if isinstance(error, InputError):
        one_line = "--json" in (sys.argv[1:] if arguments is None else arguments)
        return _fail_files(error, one_line=one_line) if isinstance(error, FilesError) else _fail(str(error))
    usage = getattr(error, "format_message", None)  # wrong usage, reported by the parser
    if usage:
        return _fail(usage() or "missing command; see voxtune --help")
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return _unwritable(error, EXIT_INPUT)
    traceback.print_exception(error)
    return _fail("internal error; please report it with the traceback above", code=EXIT_INTERNAL)


def _interrupted(pressed: list[int]) -> int:
    """Prints the line of an interrupted command; its exit code is that of a process that the signal ended."""
    return _fail("interrupted", code=128 + pressed[0] if pressed else EXIT_INTERRUPTED)


def _fail(message: str, code: int = EXIT_INPUT) -> int:
    with suppress(OSError):  # of a log on a full disk
        print(f"voxtune: error: {printable(message, MAX_MESSAGE)}", file=sys.stderr)
    return code


def _fail_files(error: FilesError, *, one_line: bool) -> int:
    """Prints the problems of several files as a table, or on `one_line`."""
    if len(error.rows) == 1:
        return _fail(str(error))
    headline = f"voxtune: error: {error}" if one_line else f"voxtune: error: {len(error.rows)} files cannot be used:"
    print_problems(error.rows, headline, one_line=one_line)
    return EXIT_INPUT

"""The command line: the console script, and `python -m voxtune`. Ctrl-C and SIGTERM end it with one line from here on."""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType


def run() -> None:
    """The console script."""
    # A shell starts background jobs with Ctrl-C ignored; they keep ignoring it.
    handled = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
    for number in handled:
        # Within an import, KeyboardInterrupt would become other errors, or be ignored. Nothing is written yet.
        signal.signal(number, _leave)
    from voxtune.cli.main import main

    code = main()
    for number in handled:
        # The interpreter's own clean-up would print a traceback.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _leave)
    _leave_others(code)
    sys.exit(code)


def _leave_others(code: int) -> None:
    """Ends a process of several at once: threads of their connections may abort the interpreter's own clean-up."""
    distributed = sys.modules.get("voxtune.training.distributed")
    if distributed is not None and distributed.is_connected():
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _leave(number: int, _frame: FrameType | None) -> None:
    os.write(2, b"voxtune: error: interrupted\n")
    os._exit(128 + number)


# Processes started side by side import this module again, and must not run the command again.
if __name__ == "__main__":
    run()

"""The command line: the console script, and `python -m voxtune`. Ctrl-C ends it with one line from here on."""

import os
import signal
import sys
from types import FrameType


def run() -> None:
    """The console script."""
    # A shell starts background jobs with the signal ignored; they keep ignoring it.
    interruptible = signal.getsignal(signal.SIGINT) != signal.SIG_IGN
    if interruptible:
        # Within an import, KeyboardInterrupt would become other errors, or be ignored. Nothing is written yet.
        signal.signal(signal.SIGINT, _leave)
    from voxtune.cli.main import main

    code = main()
    if interruptible:
        # The interpreter's own clean-up would print a traceback.
        signal.signal(signal.SIGINT, _leave)
    sys.exit(code)


def _leave(_number: int, _frame: FrameType | None) -> None:
    os.write(2, b"voxtune: error: interrupted\n")
    os._exit(130)


# Processes started side by side import this module again, and must not run the command again.
if __name__ == "__main__":
    run()

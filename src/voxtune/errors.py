"""The one exception of this project for what a user can mend."""

from __future__ import annotations


class InputError(ValueError):
    """Something the user gave is wrong. The message says what, where, and how to mend it, in one line.

    The command line prints the message and leaves with exit code 2.
    """

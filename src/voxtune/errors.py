"""The exception for errors that the user can fix."""

from __future__ import annotations


class InputError(ValueError):
    """Invalid input. The one-line message states what is wrong, where, and how to fix it.

    The command line prints the message and exits with code 2.
    """

"""Errors that the user can fix: invalid input, and optional dependencies that are not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

# Optional dependencies: import name -> extra in pyproject.toml.
EXTRAS = {
    "nilearn": "cohort",
    "scipy": "cohort",
    "pandas": "report",
    "pyarrow": "report",
    "tensorboard": "train",
    "yaml": "train",
}


class InputError(ValueError):
    """Invalid input. The one-line message states what is wrong, where, and how to fix it.

    The command line prints the message and exits with code 2.
    """


def install_command(library: str) -> str:
    """The `pip install` that brings `library`."""
    return f'pip install "voxtune[{EXTRAS[library]}]"' if library in EXTRAS else f"pip install {library}"


def missing_dependency(library: str, purpose: str) -> InputError:
    title = "PyYAML" if library == "yaml" else library
    return InputError(f"{purpose} requires {title}, which is not installed: {install_command(library)}")


def check_installed(purpose: str, *libraries: str) -> None:
    """Raises before any work if optional libraries are missing; one command installs all of them."""
    missing = [library for library in libraries if find_spec(library) is None]
    if missing:
        extras = ",".join(dict.fromkeys(EXTRAS[library] for library in missing))
        raise InputError(
            f"{purpose} requires {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: "
            f'pip install "voxtune[{extras}]"'
        )


@contextmanager
def optional_import(purpose: str) -> Iterator[None]:
    """Around the import of an optional library: if it is not installed, an InputError with the command that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in EXTRAS:
            raise
        raise missing_dependency(library, purpose) from None

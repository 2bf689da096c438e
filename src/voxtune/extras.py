"""The optional dependencies: the extra of the package that installs each, and the error when one is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from voxtune.errors import InputError

# Import name -> extra in pyproject.toml.
EXTRAS = {
    "nilearn": "cohort",
    "scipy": "cohort",
    "pandas": "report",
    "pyarrow": "report",
    "tensorboard": "train",
    "yaml": "train",
}


def install_command(library: str) -> str:
    """The `pip install` that brings `library`."""
    return f'pip install "voxtune[{EXTRAS[library]}]"' if library in EXTRAS else f"pip install {library}"


def missing(library: str, purpose: str) -> InputError:
    title = "PyYAML" if library == "yaml" else library
    return InputError(f"{purpose} requires {title}, which is not installed: {install_command(library)}")


@contextmanager
def optional_import(purpose: str) -> Iterator[None]:
    """Around the import of an optional library: if it is not installed, an InputError with the command that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in EXTRAS:
            raise
        raise missing(library, purpose) from None

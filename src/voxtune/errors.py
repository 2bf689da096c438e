"""Errors that the user can fix: invalid input, invalid files, and optional dependencies that are not installed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec

# Optional dependencies: import name -> extra in pyproject.toml.
EXTRAS = {
    "nilearn": "cohort",
    "scipy": "cohort",
    "pandas": "report",
    "pyarrow": "report",
    "ray": "scale",
    "tensorboard": "train",
    "yaml": "train",
}

# Characters of a message: names and values in files can have any length.
MAX_MESSAGE = 500


def printable(text: str, limit: int | None = None) -> str:
    """The text on one line with control characters escaped: file names may contain terminal commands.

    A text of more than `limit` characters is shortened in its middle, because the end of a message is its advice.
    """
    words = " ".join((text if limit is None else _shortened(text, 4 * limit)).split())
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)
    return escaped if limit is None else _shortened(escaped, limit)


def _shortened(text: str, limit: int) -> str:
    gap = " ... "
    if len(text) <= limit:
        return text
    head = (limit - len(gap)) * 2 // 3
    return text[:head] + gap + text[head + len(gap) - limit :]


class InputError(ValueError):
    """Invalid input. The one-line message states what is wrong, where, and how to fix it.

    The command line prints the message and exits with code 2. Names and values from files are part of many messages, so
    every message is made printable and cut to MAX_MESSAGE characters here.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message), MAX_MESSAGE))

    def names(self, file: object) -> bool:
        """Whether the message names the file."""
        # A long name is cut.
        return printable(str(file))[: MAX_MESSAGE // 3] in str(self)


class FilesError(InputError):
    """Problems of files. The message is the first one and the number of the others; `rows` holds all, as (file, problem)."""

    def __init__(self, rows: Iterable[tuple[str, str]]):
        self.rows = tuple(rows)
        file, problem = self.rows[0]
        others = len(self.rows) - 1
        more = f"; and {others} more {'file' if others == 1 else 'files'} with errors" if others else ""
        super().__init__(f"{file}: {problem}{more}")

    def __reduce__(self) -> tuple[type[FilesError], tuple[tuple[tuple[str, str], ...]]]:
        return type(self), (self.rows,)


class FileProblems:
    """Collects problems of files, to raise them as one FilesError. Problems of one file share a row."""

    def __init__(self) -> None:
        self._problems: dict[str, list[str]] = {}

    def add(self, file: object, error: InputError | str) -> None:
        """Adds a problem; the file's name at the beginning of the message is dropped, because the row has it."""
        rows = error.rows if isinstance(error, FilesError) else ((str(file), str(error)),)
        for name, message in rows:
            problem = message.removeprefix(f"{name}: ").removeprefix(f"{printable(name)}: ")
            problems = self._problems.setdefault(name, [])
            if problem not in problems:
                problems.append(problem)

    def __bool__(self) -> bool:
        return bool(self._problems)

    @property
    def rows(self) -> tuple[tuple[str, str], ...]:
        """(file, problem) of each file."""
        return tuple((name, "; ".join(problems)) for name, problems in self._problems.items())

    def raise_all(self) -> None:
        if self._problems:
            raise FilesError(self.rows)


# The options of the command that runs; none when Voxtune is used from Python.
_OPTIONS: ContextVar[frozenset[str]] = ContextVar("options", default=frozenset())


@contextmanager
def command_options(options: Iterable[str]) -> Iterator[None]:
    """Within the block, errors advise these options, such as "--fit"."""
    token = _OPTIONS.set(frozenset(options))
    try:
        yield
    finally:
        _OPTIONS.reset(token)


def advice(*cures: str) -> str:
    """The cures whose options the running command has, joined by "or"; if there are none, those that need no option."""
    needed = {cure: set(re.findall(r"--[a-z][a-z-]*", cure)) for cure in cures}
    fitting = [cure for cure in cures if needed[cure] and needed[cure] <= _OPTIONS.get()]
    return ", or ".join(fitting or (cure for cure in cures if not needed[cure]))


def overwrite_advice() -> str:
    """How to replace existing files."""
    return advice("pass --overwrite", "pass overwrite=True")


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

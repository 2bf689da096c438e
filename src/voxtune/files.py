"""Atomic writes, checks of output paths, and operating system errors as InputError."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from voxtune.errors import InputError, overwrite_advice


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary file beside `path`, which replaces it durably if the block ends without an error."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    part = Path(name)
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.chmod(0o666 & ~_umask())
        part.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        part.unlink(missing_ok=True)


def _umask() -> int:
    """The process's umask, which can be read only by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def write_atomic(path: Path, data: bytes) -> None:
    """Writes `data` to `path`, creating its folder; an existing file is replaced only once the new one is complete."""
    with reporting_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            part.write_bytes(data)


@contextmanager
def reporting_os_errors(path: Path) -> Iterator[None]:
    """Raises operating system errors (no such file, permission denied, disk full) as InputError."""
    try:
        yield
    except OSError as error:
        # The user does not know the name of the temporary file.
        named = error.filename if error.filename and not str(error.filename).endswith(".part") else path
        raise InputError(f"{named}: {error.strerror or one_line(error)}") from error


def checked_path(value: str | os.PathLike[str], name: str = "path") -> Path:
    """`value` as a Path; raises InputError for anything that is not a path. `name` is the argument in the message."""
    if not isinstance(value, str | os.PathLike) or isinstance(os.fspath(value), bytes):
        raise InputError(f"{name}: expected a path, got {type(value).__name__}")
    text = os.fspath(value)
    if not text.strip() or "\0" in text:
        raise InputError(f"{name} {text[:80]!r}: not a path")
    return Path(text)


def check_output_path(file: Path, overwrite: bool) -> None:
    """Raises InputError if `file` cannot be written, or exists without `overwrite`; call it before the work starts."""
    parent = next(path for path in file.absolute().parents if path.exists())
    if not parent.is_dir():
        raise InputError(f"{parent}: is a file, not a folder; choose another output path")
    if file.is_dir():
        raise InputError(f"{file}: is a folder; give a file name")
    if file.exists() and not overwrite:
        raise InputError(f"{file}: already exists; {overwrite_advice()} to replace it")


def counted(count: int, noun: str) -> str:
    """A number with its noun: 1 voxel, 2 voxels."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def one_line(error: BaseException) -> str:
    """The message of an error on one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def printable(text: str) -> str:
    """The text on one line with control characters escaped: file names may contain terminal commands."""
    escaped = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(text.split()))
    return "".join(escaped)

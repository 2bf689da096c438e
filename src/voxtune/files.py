"""Files that appear whole or not at all, and the operating system's refusals as the user's errors."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from voxtune.errors import InputError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file beside `path` that takes its place, durably, when the block ends without an error."""
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
    """The permissions that new files of this process lack; it can be read only by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def write_atomic(path: Path, data: bytes) -> None:
    """Writes `data` to `path`, making its folder; a file that was there stays until the new one is complete."""
    with reporting_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            part.write_bytes(data)


@contextmanager
def reporting_os_errors(path: Path) -> Iterator[None]:
    """Turns what the operating system refuses (no such file, permission, full disk) into the user's error."""
    try:
        yield
    except OSError as error:
        # A file in the making is not a name that the user knows.
        named = error.filename if error.filename and not str(error.filename).endswith(".part") else path
        raise InputError(f"{named}: {error.strerror or one_line(error)}") from error


def check_output_path(file: Path, overwrite: bool) -> None:
    """Refuses a file that could not be written, or must not be, before the work that would be lost."""
    there = next(path for path in file.absolute().parents if path.exists())
    if not there.is_dir():
        raise InputError(f"{there}: is a file; name a folder with -o")
    if file.is_dir():
        raise InputError(f"{file}: is a folder; give the name of a file")
    if file.exists() and not overwrite:
        raise InputError(f"{file}: exists already; choose another file or pass --overwrite")


def one_line(error: BaseException) -> str:
    """An error's words on one line, for a message."""
    return " ".join(str(error).split())[:300] or type(error).__name__

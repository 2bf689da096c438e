"""The writer of this project: atomic files, append-only logs, locks, and the rules on which files may be replaced.

- A whole file is written to a temporary file beside its target, flushed to disk, then moved there. It never goes through a
  symbolic link.
- A file that exists is not replaced, unless the caller passes `overwrite`, and then only if Voxtune wrote it.
- `check_outputs` applies the same rules to all outputs of a command before any work starts.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shlex
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from voxtune.errors import FileProblems, InputError, overwrite_advice

log = logging.getLogger("voxtune")

# Temporary files of this module, which a killed process leaves behind; version 0.1 wrote .NAME.random.part.
PART = re.compile(r"\.voxtune-[a-z0-9_]{8}\.part")
LOCK = ".voxtune.lock"
# An argument in which a path may follow an option or the name of a setting: --out=PATH, -oPATH, --set=data.images=PATH.
VALUE = re.compile(r"((?:--[\w-]+=|-\w(?==?[/.]))?=?(?:[\w.]+=)?)(.*)", re.DOTALL)
# The limit of Linux file systems, in bytes.
MAX_NAME_BYTES = 255
NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK}


@contextmanager
def writing(path: Path, *, overwrite: bool = False, state: bool = False) -> Iterator[Path]:
    """Yields a temporary file beside `path`, which appears there durably if the block ends without an error.

    `overwrite` allows replacing a file that Voxtune wrote. `state`: the file belongs to a folder that only this process
    writes, so it is replaced without a check of its content.
    """
    with reporting_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_existing(path, overwrite=overwrite, state=state)
        handle, part = _create_part(path.parent)
        try:
            yield part
            _flush(part, os.O_RDWR)
            part.chmod(0o666 & ~_umask())
            _publish(part, path, replace=overwrite or state)
            _flush(path.parent, os.O_RDONLY)
        finally:
            try:
                part.unlink(missing_ok=True)
            finally:
                if handle is not None:
                    os.close(handle)


def write_file(path: Path, data: bytes | str, *, overwrite: bool = False, state: bool = False) -> Path:
    """Writes `data` to `path`, creating its folder; the rules are those of `writing`."""
    with writing(path, overwrite=overwrite, state=state) as part:
        part.write_bytes(utf8(data) if isinstance(data, str) else data)
    return path


def utf8(text: str) -> bytes:
    """The text of a file. Names of files need not be UTF-8; their other bytes are escaped."""
    return text.encode(errors="backslashreplace")


def write_output(path: Path, data: bytes | str, *, overwrite: bool = False) -> Path:
    """`write_file` for the output of a command that locks no folder; deletes what killed commands left beside it."""
    with reporting_os_errors(path):
        _delete_leftovers(path.parent.glob(".*.part"), alone=False)
    return write_file(path, data, overwrite=overwrite)


def write_json(path: Path, data: Any, *, overwrite: bool = False, state: bool = False) -> Path:
    """Writes `data` as an indented JSON file; the rules are those of `writing`."""
    text = json.dumps(data, indent=2, default=str, allow_nan=False)
    return write_file(path, text + "\n", overwrite=overwrite, state=state)


def _create_part(folder: Path) -> tuple[int | None, Path]:
    """A temporary file, and the handle that locks it, if there are locks: so it differs from one of a killed process."""
    while True:
        handle, name = tempfile.mkstemp(dir=folder, prefix=".voxtune-", suffix=".part")
        part, locked = Path(name), _try_lock(handle)
        # Before it was locked, another process may have deleted it as one of a killed process.
        if locked and part.exists():
            return handle, part
        os.close(handle)
        if locked is None:
            return None, part


def _try_lock(handle: int) -> bool | None:
    """Locks a file until its handle is closed. False if another process has locked it, None where there are no locks."""
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # Windows and some cluster file systems
        return None
    return True


def _delete_leftovers(files: Iterable[Path], *, alone: bool) -> None:
    """Deletes the temporary files of killed processes among `files`. `alone`: also where there are no locks."""
    for file in files:
        if PART.fullmatch(file.name) is None:
            continue
        try:
            handle = os.open(file, os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0))
        except OSError:  # no longer there, or not ours
            continue
        try:
            abandoned = _try_lock(handle)
            if abandoned or (alone and abandoned is None):
                file.unlink(missing_ok=True)
        finally:
            os.close(handle)


def _flush(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _publish(part: Path, path: Path, *, replace: bool) -> None:
    """Moves a complete temporary file to its target; without `replace`, fails if the target exists by now."""
    if not replace:
        try:
            os.link(part, path)  # unlike a rename, never replaces
            return
        except FileExistsError:
            raise _exists(path) from None
        except OSError as error:
            if error.errno not in NO_HARD_LINKS:
                raise
            _check_existing(path, overwrite=False, state=False)
    part.replace(path)


def _umask() -> int:
    """The process's umask, which can be read only by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _exists(path: Path) -> InputError:
    return InputError(f"{path}: already exists; choose another path, or {overwrite_advice()} to replace it")


def _check_existing(path: Path, *, overwrite: bool, state: bool) -> None:
    """Raises InputError if `path` exists and must not be replaced."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISLNK(mode):
        raise InputError(f"{path}: is a symbolic link, which is not replaced; remove it or choose another path")
    if stat.S_ISDIR(mode):
        raise InputError(f"{path}: is a folder; give a file name")
    if not stat.S_ISREG(mode):
        raise InputError(f"{path}: is not a regular file; choose another path")
    if state:
        return
    if not overwrite:
        raise _exists(path)
    from voxtune.marks import written_by_voxtune

    if not written_by_voxtune(path):
        raise InputError(f"{path}: was not written by Voxtune, so it is not replaced; move it or choose another path")


def delete_file(path: Path) -> bool:
    """Deletes a file that Voxtune wrote; any other file stays, and the result is False."""
    from voxtune.marks import written_by_voxtune

    with reporting_os_errors(path):
        if path.is_symlink() or not path.is_file() or not written_by_voxtune(path):
            return False
        path.unlink()
    return True


NOT_A_FOLDER = "is not a folder; choose another output path"


def check_outputs(files: Iterable[Path], *, overwrite: bool = False, folder: Path | None = None) -> None:
    """Raises one FilesError with every file that cannot or must not be written; call it before the work starts.

    With `folder`, all files must be inside it, also after symbolic links are resolved.
    """
    problems = FileProblems()
    for file in files:
        try:
            _check_output(file, overwrite=overwrite, folder=folder)
        except InputError as error:
            # Of many files in what is not a folder, one row.
            name, _, problem = str(error).rpartition(f": {NOT_A_FOLDER}")
            problems.add(*((name, NOT_A_FOLDER) if name and not problem else (file, error)))
    problems.raise_all()


def _check_output(file: Path, *, overwrite: bool, folder: Path | None) -> None:
    long = next((part for part in file.parts if len(os.fsencode(part)) > MAX_NAME_BYTES), None)
    if long is not None:
        raise InputError(
            f"{file.parent}: the output name {long[:40]}... is longer than {MAX_NAME_BYTES} bytes; shorten it"
        )
    with reporting_os_errors(file):
        parent = next(path for path in file.absolute().parents if path.exists() or path.is_symlink())
        if not parent.is_dir():
            raise InputError(f"{parent}: {NOT_A_FOLDER}")
        if folder is not None and not file.parent.resolve().is_relative_to(folder.resolve()):
            raise InputError(f"{file}: is outside the output folder {folder}; rename what it is named after")
        _check_existing(file, overwrite=overwrite, state=False)


def check_output_path(file: Path, overwrite: bool) -> None:
    """`check_outputs` for one file."""
    _check_output(file, overwrite=overwrite, folder=None)


def slug(name: str, *, default: str = "unnamed") -> str:
    """The part of a file name for a name that comes from a file: letters, digits and ._+- without a leading dot or dash.

    "ce T1/w" becomes "ce-T1-w". Names of the user's own files need no slug.
    """
    text = re.sub(r"[^A-Za-z0-9._+-]+", "-", name).strip("-.")
    return re.sub(r"\.{2,}", ".", text)[:80].rstrip("-.") or default


_RECORD_PATHS: ContextVar[bool] = ContextVar("record_paths", default=False)


@contextmanager
def recording_paths(allowed: bool = True) -> Iterator[None]:
    """Within the block, records keep whole paths and command lines (--record-paths); by default they hold file names only."""
    token = _RECORD_PATHS.set(allowed)
    try:
        yield
    finally:
        _RECORD_PATHS.reset(token)


def paths_are_recorded() -> bool:
    return _RECORD_PATHS.get()


def recorded_path(path: str | os.PathLike[str], inside: Path | None = None) -> str:
    """How a record names a file or a folder: its last name, or its path relative to the folder `inside` that contains it.

    Within `recording_paths`, the absolute path if it is not inside.
    """
    given, full = Path(path), Path(path).resolve()
    if inside is not None and full.is_relative_to(inside.resolve()):
        return full.relative_to(inside.resolve()).as_posix()
    if _RECORD_PATHS.get():
        return full.as_posix()
    return full.name if given.name in ("", "..") else given.name


def recorded_command(arguments: Iterable[str]) -> str:
    """A command line for a record: paths among its arguments as `recorded_path` names them, quoted for the shell."""
    words = []
    for word in arguments:
        match = VALUE.fullmatch(word)
        before, value = ("", word) if match is None else match.groups()
        # "tumour=1,4; brain=2" or 1e-4/2 are no paths; a relative path within the current folder names nothing private.
        if ("/" in value or os.sep in value) and (Path(value).is_absolute() or ".." in Path(value).parts):
            value = recorded_path(value)
        words.append(shlex.quote(f"{before}{value}"))
    return " ".join(words)


def recorded_text(text: str, folders: Iterable[Path] = ()) -> str:
    """A message for a record: files inside `folders` are named relative to them, other paths by their last name.

    Within `recording_paths`, the text as it is.
    """
    if _RECORD_PATHS.get():
        return text
    for folder in sorted({str(folder) for folder in folders} - {"."}, key=len, reverse=True):
        text = text.replace(f"{folder}{os.sep}", "")
    return re.sub(r"(?<![\w.])(?:/|\.\./)[^\s'\"]*/([^\s'\"/]+)", r"\1", text)


def recorded_values(data: Any) -> Any:
    """A JSON document for a record, with `recorded_text` applied to its texts."""
    if isinstance(data, dict):
        return {key: recorded_values(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [recorded_values(value) for value in data]
    return recorded_text(data) if isinstance(data, str) and "/" in data else data


class AppendLog:
    """A file to which whole lines are appended. A torn last line, of a kill or a full disk, is removed on opening.

    With `new`, the file must not exist yet; then it may also hold records that are not lines (`append`).
    """

    def __init__(self, path: Path, *, new: bool = False):
        self.path = path
        with reporting_os_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
            self._handle: int | None = os.open(path, flags | (os.O_EXCL if new else 0), 0o666)
            self._size = _complete_size(self._handle)
            os.ftruncate(self._handle, self._size)

    def write(self, line: str) -> None:
        """Appends one line; if that fails, the file is as before."""
        self.append(line.encode() + b"\n")

    def append(self, data: bytes) -> None:
        """Appends one record; if that fails, the file is as before."""
        assert self._handle is not None, "the log is closed"
        with reporting_os_errors(self.path):
            try:
                written = os.write(self._handle, data)
                if written != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._handle, self._size)
                raise
        self._size += len(data)

    def sync(self) -> None:
        """Flushes to disk."""
        assert self._handle is not None, "the log is closed"
        with reporting_os_errors(self.path):
            os.fsync(self._handle)

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _complete_size(handle: int) -> int:
    """The number of bytes up to the end of the last complete line."""
    end = os.fstat(handle).st_size
    while end:
        start = max(0, end - 2**16)
        place = os.pread(handle, end - start, start).rfind(b"\n")
        if place >= 0:
            return start + place + 1
        end = start
    return 0


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Creates an output folder, locks it for this process, and deletes temporary files of killed ones.

    Folders that were created for an output of which nothing was written are removed.
    """
    with _created(folder), _lock(folder / LOCK, folder):
        with reporting_os_errors(folder):
            _delete_leftovers(folder.rglob(".*.part"), alone=True)
        yield


@contextmanager
def locked_file(file: Path, *, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Locks an output file for this process, by a hidden file beside it; creates its folder like `locked_folder`.

    Deletes temporary files of killed processes in this folder, where locks tell them from those of running ones. With
    `waiting`, waits for another process that has locked the file, and calls it every half second.
    """
    with _created(file.parent), _lock(_lock_file(file), file, waiting):
        with reporting_os_errors(file):
            _delete_leftovers(file.parent.glob(".*.part"), alone=False)
        yield


def _lock_file(file: Path) -> Path:
    # The name of the file may be as long as a name can be.
    stem = os.fsencode(file.name)[: MAX_NAME_BYTES - 20].decode(errors="ignore")
    return file.with_name(f".{stem}.voxtune.lock")


def is_locked(file: Path) -> bool:
    """Whether another process has locked the file with `locked_file`."""
    try:
        handle = os.open(_lock_file(file), os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0))
    except OSError:  # nobody has
        return False
    try:
        return _try_lock(handle) is False
    finally:
        os.close(handle)


def delete_leftovers(folder: Path) -> None:
    """Deletes the temporary files of killed processes in a folder, where locks tell them from those of running ones."""
    with reporting_os_errors(folder):
        _delete_leftovers(folder.glob(".*.part"), alone=False)


def discard(file: Path) -> None:
    """Deletes a regular file that a record of Voxtune lists as its own, whatever it contains by now."""
    with reporting_os_errors(file):
        if file.is_file() and not file.is_symlink():
            file.unlink()


@contextmanager
def _created(folder: Path) -> Iterator[None]:
    """Creates a folder; at the end, those that were created and are empty are removed."""
    missing = [path for path in (folder, *folder.absolute().parents) if not path.exists()]
    with reporting_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # not empty
            for path in missing:
                path.rmdir()


@contextmanager
def _lock(path: Path, output: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    with reporting_os_errors(path):
        handle = _locked_handle(path, output, waiting)
    try:
        yield
    finally:
        _unlock(path, handle)


def _unlock(path: Path, handle: int) -> None:
    # Deleted while it is locked: a process that opened it meanwhile sees that it is gone, and starts again.
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be deleted (%s); it does not lock anything", path, one_line(error))
    finally:
        os.close(handle)


def _locked_handle(path: Path, output: Path, waiting: Callable[[], None] | None) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
    while True:
        handle = os.open(path, flags, 0o666)
        locked = _try_lock(handle)
        if locked is False:
            pid = os.read(handle, 20).decode(errors="replace").strip()
            os.close(handle)
            if waiting is not None:
                waiting()
                time.sleep(0.5)
                continue
            process = f" (PID {pid})" if pid.isdigit() else ""
            raise InputError(
                f"{output}: in use by another Voxtune process{process}; wait for it or choose another output"
            )
        if locked is None:
            log.warning("%s cannot be locked on this file system: do not start another command on it", output)
            return handle
        try:
            current = path.lstat()
        except FileNotFoundError:
            current = None
        opened = os.fstat(handle)
        if current is not None and (current.st_dev, current.st_ino) == (opened.st_dev, opened.st_ino):
            try:
                os.ftruncate(handle, 0)
                os.write(handle, f"{os.getpid()}\n".encode())
            except OSError:  # such as a full disk
                _unlock(path, handle)
                raise
            return handle
        os.close(handle)


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


def counted(count: int, noun: str) -> str:
    """A number with its noun: 1 voxel, 2 voxels."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def one_line(error: BaseException) -> str:
    """The message of an error on one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__

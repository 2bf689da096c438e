"""Reading files of strangers: regular files only, sizes checked before anything is allocated, errors on one line.

Every reader of a user's file runs inside `reading`, which turns whatever goes wrong into an InputError that names the file.
What a file claims about its size is compared with the bytes present by `check_memory`.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import re
import stat
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from voxtune.errors import FilesError, InputError
from voxtune.files import one_line

# Memory that reading one file may need: this much, or MEMORY_RATIO times the size of the file if that is more.
DEFAULT_LIMIT = 2**30
MEMORY_RATIO = 16
LIMIT_VARIABLE = "VOXTUNE_READ_LIMIT"
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
# Configurations and records of Voxtune are far smaller.
MAX_JSON_BYTES = 16 * 2**20
MAX_DEPTH = 100
# Memory of a value in a JSON document as Python holds it: a list or dictionary, a place in a list, a character.
OBJECT_BYTES, LIST_BYTES, VALUE_BYTES, CHARACTER_BYTES = 240, 100, 72, 4
# Larger numbers do not fit into a float.
MAX_DIGITS = 300
MAX_FIELD = 2**16
CHUNK = 2**20


@contextmanager
def reading(path: object, what: str = "file", *, fix: str = "") -> Iterator[None]:
    """Turns any failure within the block into an InputError of one line: PATH: damaged or truncated WHAT (REASON); FIX.

    Damaged bytes make libraries raise almost any exception, so every one of them is caught here, and nowhere else. An
    InputError that does not name the file gets its name.
    """
    try:
        yield
    except InputError as error:
        if isinstance(error, FilesError) or error.names(path):
            raise
        raise InputError(f"{path}: {error}{f'; {fix}' if fix else ''}") from None
    except OSError as error:
        if error.errno is None:
            raise _damaged(path, what, error, fix) from None
        raise InputError(f"{path}: {error.strerror or one_line(error)}") from None
    except MemoryError:
        raise InputError(f"{path}: not enough memory to read this {what}") from None
    except Exception as error:
        raise _damaged(path, what, error, fix) from None


def _damaged(path: object, what: str, error: Exception, fix: str) -> InputError:
    reason = one_line(error)
    named = reason if reason == type(error).__name__ else f"{type(error).__name__}: {reason}"
    return InputError(f"{path}: damaged or truncated {what} ({named[:200]}){f'; {fix}' if fix else ''}")


def open_regular(path: Path) -> int:
    """A handle to read a regular file; a pipe, a device or a socket is refused, and opening never blocks."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        reason = "is a folder" if error.errno == errno.EISDIR else (error.strerror or one_line(error))
        name = f"{str(path)[:200]}..." if error.errno == errno.ENAMETOOLONG else path
        raise InputError(f"{name}: {reason[:1].lower()}{reason[1:]}") from None
    except ValueError as error:  # a NUL in the name
        raise InputError(f"{path}: {one_line(error)}") from None
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise InputError(f"{path}: is {'a folder' if stat.S_ISDIR(mode) else 'not a regular file'}")
    return handle


@contextmanager
def opening(path: Path, what: str = "file", *, fix: str = "") -> Iterator[BufferedReader]:
    """A regular file, open for reading within the guard `reading`."""
    with os.fdopen(open_regular(path), "rb") as file, reading(path, what, fix=fix):
        yield file


@contextmanager
def opening_zip(path: Path, what: str, *, fix: str = "") -> Iterator[zipfile.ZipFile]:
    """A zip archive within the guard `reading`. Its records do not overlap: together they are no larger than the file."""
    with opening(path, what, fix=fix) as file:
        try:
            archive = zipfile.ZipFile(file)
        except zipfile.BadZipFile:
            raise InputError(f"{path}: not a {what}, or truncated{f'; {fix}' if fix else ''}") from None
        if sum(record.compress_size for record in archive.infolist()) > file_size(file):
            raise InputError(f"{path}: damaged or truncated {what} (the sizes of its records exceed that of the file)")
        yield archive


def gunzip(path: Path, what: str = "file", *, fix: str = "") -> bytes:
    """The content of a gzip file, within the limit of `check_memory`."""
    with opening(path, what, fix=fix) as file:
        size = file_size(file)
        parts, total = [], 0
        with gzip.GzipFile(fileobj=file) as stream:
            while part := stream.read(CHUNK):
                total += len(part)
                check_memory(path, 2 * total, size)  # the parts, and the whole
                parts.append(part)
        return b"".join(parts)


def read_into(stream: IO[bytes], buffer: memoryview) -> None:
    """Fills a buffer of bytes from a stream, part by part: memory that the stream does not fill stays unused."""
    place = 0
    while place < len(buffer):
        part = stream.read(min(CHUNK, len(buffer) - place))
        if not part:
            raise EOFError(f"{place} of {len(buffer)} bytes")
        buffer[place : place + len(part)] = part
        place += len(part)


def file_size(file: BufferedReader) -> int:
    return os.fstat(file.fileno()).st_size


def file_sha256(path: Path) -> str:
    """The hash of a regular file, in hexadecimal digits."""
    with opening(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_file(path: Path, *, limit: int | None = None, what: str = "file") -> bytes:
    """The bytes of a regular file of at most `limit` bytes."""
    with opening(path, what) as file:
        size = file_size(file)
        if limit is not None and size > limit:
            raise InputError(f"{path}: {size} bytes are more than a {what} can have ({limit})")
        data = file.read() if limit is None else file.read(limit + 1)
        if limit is not None and len(data) > limit:
            raise InputError(f"{path}: more than {limit} bytes, too large for a {what}")
        return data


def read_head(path: Path, size: int) -> bytes:
    """At most `size` bytes from the beginning of a regular file."""
    with opening(path) as file:
        return file.read(size)


def read_text(path: Path, *, limit: int = MAX_JSON_BYTES, what: str = "text file") -> str:
    """The text of a small UTF-8 file, with or without a byte order mark."""
    data = read_file(path, limit=limit, what=what)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start})") from None


def read_json(path: Path, *, limit: int = MAX_JSON_BYTES) -> Any:
    """The document in a JSON file."""
    return parse_json(read_file(path, limit=limit, what="JSON file"), path)


def parse_json(
    data: bytes | str,
    where: object,
    *,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
    file_bytes: int | None = None,
) -> Any:
    """A JSON document of bounded depth and bounded numbers; NaN and infinity are errors.

    `pairs` makes an object of its keys and values, by default a dictionary. `file_bytes` is the size of the file if the
    document was compressed.
    """
    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
        check_memory(where, json_memory(text), len(data) if file_bytes is None else file_bytes)
        if _depth(text) > MAX_DEPTH:
            raise InputError(f"{where}: not valid JSON (nested more than {MAX_DEPTH} deep)")
        return json.loads(text, parse_int=_int, parse_float=_float, parse_constant=_constant, object_pairs_hook=pairs)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid JSON ({one_line(error)})") from None


def json_memory(text: str) -> int:
    """At most the memory that the values in a JSON document take: an empty list of two characters takes 56 bytes."""
    values = VALUE_BYTES * (text.count(",") + 1) + OBJECT_BYTES * text.count("{") + LIST_BYTES * text.count("[")
    return values + len(text) * (1 if text.isascii() else CHARACTER_BYTES)


def _depth(text: str) -> int:
    """The deepest nesting of brackets outside of strings, without recursion."""
    deepest = depth = 0
    for token in re.finditer(r'"(?:[^"\\]+|\\.)*+(?:"|\Z)|[\[{]|[\]}]', text, re.DOTALL):
        first = token[0][0]
        if first in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif first in "]}":
            depth -= 1
    return deepest


def _int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text[:20]} is out of range")
    return value


def _constant(text: str) -> float:
    raise ValueError(f"{text} is not a number in JSON")


def tsv_rows(text: str) -> list[dict[str, str]]:
    """The rows of a tab-separated table with a header line; missing cells are empty, more cells than columns an error."""
    lines = text.splitlines()
    if not lines:
        return []
    names = lines[0].split("\t")
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        cells = line.split("\t")
        if len(cells) > len(names) or max(map(len, cells)) > MAX_FIELD:
            raise InputError(f"line {number} has more cells than the header or a cell of over {MAX_FIELD} characters")
        rows.append(dict(zip(names, [*cells, *[""] * (len(names) - len(cells))], strict=True)))
    return rows


def read_limit() -> int:
    """The memory that reading one small file may need, in bytes: $VOXTUNE_READ_LIMIT, set by voxtune --read-limit, or 1 GiB."""
    text = os.environ.get(LIMIT_VARIABLE)
    return DEFAULT_LIMIT if not text else parse_bytes(text, LIMIT_VARIABLE)


def parse_bytes(text: str, name: str) -> int:
    """The number of bytes in text such as 8GB, 512MiB or 1000000."""
    match = re.fullmatch(r"\s*(\d{1,6}(?:\.\d{1,3})?|\d{1,18})\s*([KMG]I?B|)\s*", text.upper())
    if match is None or float(match[1]) <= 0:
        raise InputError(f"{name} {text[:40]!r}: expected a size such as 4GB or 512MiB")
    return int(float(match[1]) * UNITS[match[2]])


def allowed_memory(file_bytes: int) -> int:
    """The memory that reading a file of `file_bytes` bytes may need."""
    return max(read_limit(), MEMORY_RATIO * file_bytes)


def check_memory(path: object, needed: int, file_bytes: int) -> None:
    """Raises InputError if a file of `file_bytes` bytes says that it needs too much memory."""
    allowed = allowed_memory(file_bytes)
    if needed > allowed:
        raise InputError(
            f"{path}: {file_bytes} bytes that need {needed / 2**30:.3g} GiB of memory, over the limit of "
            f"{allowed / 2**30:.3g} GiB; if you trust the file, raise it: voxtune --read-limit {needed / 2**30 + 1:.0f}GiB ..., "
            f"or {LIMIT_VARIABLE} in the environment"
        )

"""The masks of a data set: a CSV or Parquet table that a person can read, or a folder. All rows are checked before any work.

| column | meaning |
|---|---|
| mask | the file, relative to the manifest's folder |
| subject | names the volumes and their noise instead of the file (optional) |
| replicates | volumes of this mask instead of --per-mask (optional) |
"""

from __future__ import annotations

import csv
import io
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from voxtune.data.derivative import bids_subject, mask_stem
from voxtune.data.modality import NIFTI_ENDINGS, NIFTI_NAME
from voxtune.data.pairing import mask_files
from voxtune.errors import FileProblems, InputError, optional_import
from voxtune.reading import check_memory, file_size, opening, read_text, reading

COLUMNS = ("mask", "subject", "replicates")
DELIMITERS = ",;\t"
MAX_MANIFEST_BYTES = 512 * 2**20
MAX_ROWS = 5_000_000
MAX_REPLICATES = 100_000
MAX_PATH = 4096
# A subject in a manifest: no part of a path, and no name that the command line or a shell would take for something else.
SUBJECT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+-]{0,99}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestRow:
    """One mask. `named` names the volumes and their noise: the mask's file, or the subject that the manifest gives."""

    mask: Path
    named: Path
    subject: str  # with the other entities of BIDS
    replicates: int
    images: tuple[Path, ...] = ()


def read_manifest(path: Path, *, per_mask: int, allow_outside: bool = False) -> list[ManifestRow]:
    """The rows of a table or the masks of a folder, checked; raises one FilesError with every row that cannot be used."""
    if path.is_dir():
        given: Iterable[tuple[str, Mapping[str, Any]]] = (
            (str(f), {"mask": str(f)}) for f in mask_files([path.absolute()])
        )
        return _checked(given, Path(), per_mask, allow_outside=True)
    table = _parquet_rows(path) if path.suffix.lower() == ".parquet" else csv_rows(path, COLUMNS)
    given = ((f"{path.name} row {number}", row) for number, row in table)
    return _checked(given, path.absolute().parent, per_mask, allow_outside=allow_outside)


def with_images(rows: list[ManifestRow], images: Mapping[Path, tuple[Path, ...]]) -> list[ManifestRow]:
    """The rows with the images of their subjects."""
    return [replace(row, images=images.get(row.mask, ())) for row in rows]


def _checked(
    given: Iterable[tuple[str, Mapping[str, Any]]], folder: Path, per_mask: int, *, allow_outside: bool
) -> list[ManifestRow]:
    rows: list[ManifestRow] = []
    problems = FileProblems()
    first_row: dict[str, str] = {}
    real_folder = real_path(folder)
    for place, values in given:
        try:
            row = _row(values, folder, per_mask)
            _check_file(row.mask, None if allow_outside else real_folder)
            # Names that differ in case only are one file on some file systems. A stem determines the noise.
            for name in (f"subject {row.subject}".casefold(), f"stem {mask_stem(row.named)}".casefold()):
                other = first_row.setdefault(name, place)
                if other != place:
                    raise InputError(
                        f"has the same name as {other} ({row.subject}), which determines the noise and the files of its "
                        "volumes; give each a subject of its own"
                    )
            rows.append(row)
        except InputError as error:
            problems.add(place, error)
    problems.raise_all()
    if not rows:
        raise InputError(f"{folder}: the manifest lists no masks")
    return rows


def _row(values: Mapping[str, Any], folder: Path, per_mask: int) -> ManifestRow:
    mask = values.get("mask")
    if not isinstance(mask, str) or not mask.strip() or len(mask) > MAX_PATH or "\0" in mask:
        raise InputError(f"mask {str(mask)[:80]!r}: expected the path of a file")
    path = folder / mask.strip()
    if not NIFTI_NAME.search(path.name):
        raise InputError(f"mask {mask[:80]!r}: not a mask ({NIFTI_ENDINGS})")
    subject = values.get("subject")
    named = path if subject in (None, "") else _named(subject)
    return ManifestRow(
        mask=path, named=named, subject=bids_subject(named), replicates=_replicates(values.get("replicates"), per_mask)
    )


def _named(subject: Any) -> Path:
    named = named_after(str(subject))
    # A word such as "seg" names no subject.
    if not isinstance(subject, str | int) or not SUBJECT.fullmatch(str(subject)) or mask_stem(named) != str(subject):
        raise InputError(f"subject {str(subject)[:80]!r}: expected letters and digits, such as 01 or sub-01_ses-2")
    return named


def named_after(subject: str) -> Path:
    """A file name from which `mask_stem` and `bids_subject` return the subject."""
    return Path(f"{subject}_dseg.nii.gz")


def _replicates(value: Any, per_mask: int) -> int:
    if value in (None, ""):
        return per_mask
    number = int(value) if isinstance(value, str) and re.fullmatch(r"\s*[0-9]{1,9}\s*", value) else value
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MAX_REPLICATES:
        raise InputError(f"replicates {str(value)[:80]!r}: expected a whole number from 1 to {MAX_REPLICATES}")
    return number


def _check_file(path: Path, inside: str | None) -> None:
    """Raises for a path that is no regular file or, with `inside`, is outside this folder after links are resolved."""
    try:
        state = path.lstat()
        linked = stat.S_ISLNK(state.st_mode)
        state = path.stat() if linked else state
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(state.st_mode):
        raise InputError(f"{path}: is not a regular file")
    if inside is None:
        return
    real = real_path(path) if linked else real_path(path.parent)
    if real != inside and not real.startswith(f"{inside.rstrip(os.sep)}{os.sep}"):
        raise InputError(f"{path}: is outside the manifest's folder; pass --allow-outside if you trust the manifest")


@lru_cache(4096)
def real_path(folder: Path) -> str:
    return os.path.realpath(folder)


def csv_rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows of a table with their numbers; the header is row 1, as in a spreadsheet. It has the first of the columns.

    Cells are separated by commas, semicolons or tabs.
    """
    text = read_text(path, limit=MAX_MANIFEST_BYTES, what="manifest")
    with reading(path, "manifest"):
        header = text.partition("\n")[0]
        delimiter = next((d for d in DELIMITERS if columns[0] in header.strip().split(d)), ",")
        table = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        names = [name.strip() for name in next(table, [])]
        _check_columns(names, columns)
        for number, cells in enumerate(table, start=2):
            if number > MAX_ROWS:
                raise InputError(f"more than {MAX_ROWS} rows; split the manifest")
            if len(cells) > len(names):
                raise InputError(f"row {number} has {len(cells)} cells, the header {len(names)}")
            if any(cells):
                yield number, dict(zip(names, cells, strict=False))


def _check_columns(names: list[str], columns: tuple[str, ...]) -> None:
    unknown = [name for name in names if name not in columns]
    repeated = [name for place, name in enumerate(names) if name in names[:place]]
    if columns[0] not in names or unknown or repeated:
        problem = (
            f"no column {columns[0]!r}"
            if columns[0] not in names
            else f"unknown column {unknown[0][:40]!r}"
            if unknown
            else f"column {repeated[0]!r} is given twice"
        )
        raise InputError(f"{problem}; the columns are {columns[0]} and optionally {', '.join(columns[1:])}")


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with optional_import("reading a Parquet manifest"):
        import pyarrow.parquet as pq
    with opening(path, "manifest") as stream:
        file = pq.ParquetFile(stream)
        names = list(file.schema_arrow.names)
        _check_columns(names, COLUMNS)
        meta = file.metadata
        if meta.num_rows > MAX_ROWS:
            raise InputError(f"{path}: {meta.num_rows} rows, more than {MAX_ROWS}; split the manifest")
        unpacked = sum(meta.row_group(number).total_byte_size for number in range(meta.num_row_groups))
        check_memory(path, max(unpacked, meta.num_rows * len(names) * 64), file_size(stream))
        number = 0
        for batch in file.iter_batches(batch_size=4096, columns=names, use_threads=False):
            for row in batch.to_pylist():
                number += 1
                yield number, row

"""The ledger of a data set: what decides the bytes of its volumes, which volumes it has, and which are written.

DATASET/ledger/settings.json         settings and plan, fixed at the first start
DATASET/ledger/masks.csv             the masks with the number of volumes of each
DATASET/ledger/shard-1-of-4.jsonl    a line for each written volume, with the checksums of its files

A volume is complete if any line of any shard lists its files as they are on disk: lines have no order between shards, and a
line that is lost only costs the time to draw its volume again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from voxtune.data.derivative import dataset_mask, volume_files
from voxtune.errors import InputError
from voxtune.files import counted, recorded_text, write_file, write_json
from voxtune.reading import file_sha256, opening, parse_json, read_json
from voxtune.runtime.generate import PlannedVolume
from voxtune.scale.manifest import MAX_REPLICATES, ManifestRow, csv_rows, named_after

FOLDER, SETTINGS, MASKS = "ledger", "settings.json", "masks.csv"
FORMAT = "voxtune-dataset/1"
MASK_COLUMNS = ("subject", "mask", "replicates")
MAX_LINE = 2**16
MARK = "_desc-synth"


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenFile:
    """A file of a data set as it was written. Its time tells at once that it was not written again."""

    sha256: str
    size: int
    time_ns: int

    @classmethod
    def of(cls, path: Path) -> WrittenFile:
        state = path.stat()
        return cls(sha256=file_sha256(path), size=state.st_size, time_ns=state.st_mtime_ns)

    def damage(self, path: Path, *, read: bool) -> str | None:
        """How the file on disk differs, or None. Its content is read if its time differs too, or always with `read`."""
        try:
            state = path.lstat()
        except OSError:
            return "missing"
        if path.is_symlink() or not path.is_file():
            return "not a regular file"
        if state.st_size != self.size:
            return f"has {counted(state.st_size, 'byte')} instead of {self.size}"
        if not read and state.st_mtime_ns == self.time_ns:
            return None
        try:
            return None if file_sha256(path) == self.sha256 else "has another checksum"
        except InputError as error:
            return str(error)


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerLine:
    """A written volume, or the mask that is stored beside the volumes: its files, relative to the data set."""

    name: str
    files: Mapping[str, WrittenFile]
    source: WrittenFile | None = None  # the mask's own file
    reduced: bool = False  # drawn with a smaller batch than that of the data set

    def to_json(self) -> str:
        data: dict[str, Any] = {"name": self.name}
        data["files"] = {name: [file.sha256, file.size, file.time_ns] for name, file in self.files.items()}
        if self.source is not None:
            data["source"] = [self.source.sha256, self.source.size, self.source.time_ns]
        if self.reduced:
            data["reduced"] = True
        return json.dumps(data)

    @classmethod
    def parse(cls, line: bytes, where: str) -> LedgerLine | None:
        """None for a line that is no record of files, such as one that a power failure damaged."""
        try:
            data = parse_json(line, where)
            files = {str(name): _written(value) for name, value in data["files"].items()}
            source = None if data.get("source") is None else _written(data["source"])
            return cls(name=str(data["name"]), files=files, source=source, reduced=data.get("reduced") is True)
        except (InputError, LookupError, TypeError, ValueError, AttributeError):
            return None


def _written(value: Any) -> WrittenFile:
    sha256, size, time_ns = value
    if not isinstance(sha256, str) or type(size) is not int or type(time_ns) is not int:
        raise TypeError("not a file of the ledger")
    return WrittenFile(sha256=sha256, size=size, time_ns=time_ns)


def failure_line(names: Sequence[str], problem: str) -> str:
    """For people who read the ledger; volumes that failed are drawn at the next start."""
    return json.dumps({"failed": list(names), "problem": recorded_text(problem)})


def volume_name(subject: str, number: int) -> str:
    return f"{subject}{MARK}{number:02d}"


def split_volume_name(name: str) -> tuple[str, int] | None:
    """The subject and the number of a volume; None for any other name."""
    subject, mark, number = name.rpartition(MARK)
    if not mark or not number.isascii() or not number.isdigit() or not 1 <= int(number[:9]) <= MAX_REPLICATES:
        return None
    return (subject, int(number)) if volume_name(subject, int(number)) == name else None


def files_of_volume(subject: str, number: int, images: Sequence[str]) -> tuple[str, ...]:
    """All files of a volume, relative to the data set."""
    names = volume_files(named_after(subject), number, images)
    return PlannedVolume(mask=0, replicate=number, index=0, names=names).outputs


class DatasetLedger:
    """The files of the ledger of the data set `root`."""

    def __init__(self, root: Path):
        self.root, self.folder = root, root / FOLDER
        self.settings_file, self.masks_file = self.folder / SETTINGS, self.folder / MASKS

    def shard_file(self, shard: int, shards: int) -> Path:
        return self.folder / f"shard-{shard}-of-{shards}.jsonl"

    def shard_files(self) -> list[Path]:
        return sorted(self.folder.glob("shard-*-of-*.jsonl"))

    def exists(self) -> bool:
        return self.settings_file.is_file()

    def settings(self) -> dict[str, Any]:
        data = read_json(self.settings_file)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise InputError(f"{self.settings_file}: not the ledger of a data set of voxtune generate")
        return data

    def write_settings(self, data: Mapping[str, Any]) -> None:
        write_json(self.settings_file, {"format": FORMAT, **data})

    def masks(self) -> dict[str, int]:
        """The number of volumes of each subject."""
        masks: dict[str, int] = {}
        for number, row in csv_rows(self.masks_file, MASK_COLUMNS):
            count = row.get("replicates", "")
            if not row["subject"] or not count.isascii() or not count.isdigit() or int(count[:9]) > MAX_REPLICATES:
                raise InputError(
                    f"{self.masks_file}: row {number} is damaged; start voxtune generate again to write it"
                )
            masks[row["subject"]] = int(count)
        return masks

    def write_masks(self, rows: Sequence[ManifestRow]) -> None:
        lines = [",".join(MASK_COLUMNS)]
        lines += [f"{row.subject},{_cell(row.mask.name)},{row.replicates}" for row in rows]
        write_file(self.masks_file, "\n".join(lines) + "\n", state=True)

    def lines(self) -> Iterator[LedgerLine]:
        """The records of all shards. An incomplete last line, of a killed process or a full disk, is no record."""
        for file in self.shard_files():
            with opening(file, "ledger") as stream:
                while line := stream.readline(MAX_LINE):
                    record = LedgerLine.parse(line, str(file)) if line.endswith(b"\n") else None
                    if record is not None:
                        yield record

    def damage(self, line: LedgerLine, *, read: bool) -> tuple[str, str] | None:
        """The first file of a record that differs from it, and how; None if there is none."""
        for name, file in line.files.items():
            damage = file.damage(self.root / name, read=read)
            if damage is not None:
                return name, damage
        return None

    def is_expected(self, line: LedgerLine, masks: Mapping[str, int], images: Sequence[str]) -> bool:
        """Whether the record is of a volume or of a mask of the data set, with exactly its files."""
        volume = split_volume_name(line.name)
        if volume is None:
            return line.name in masks and line.files.keys() == {dataset_mask(named_after(line.name))}
        subject, number = volume
        expected = number <= masks.get(subject, 0)
        return expected and line.files.keys() == set(files_of_volume(subject, number, images))


def _cell(text: str) -> str:
    name = os.fsencode(text).decode(errors="backslashreplace")
    return f'"{name.replace(chr(34), chr(34) * 2)}"' if any(c in name for c in ',;\t"\r\n') else name

"""Reads a data set again and compares it with its ledger: what is missing, what differs, and what does not belong to it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from voxtune.data.derivative import DESCRIPTION, dataset_mask
from voxtune.errors import InputError
from voxtune.files import LOCK, PART
from voxtune.scale.dataset import IGNORED, LABEL_TABLE
from voxtune.scale.ledger import (
    FOLDER,
    DatasetLedger,
    LedgerLine,
    files_of_volume,
    split_volume_name,
    volume_name,
)
from voxtune.scale.manifest import named_after

READERS = 4
AHEAD = 64
OWN_FILES = {DESCRIPTION, LABEL_TABLE, IGNORED, LOCK}


@dataclass(kw_only=True)
class Verification:
    """(name, problem) of every volume, mask and file that is not as the ledger says; `verified` volumes are."""

    volumes: int
    verified: int = 0
    reduced: int = 0
    missing: list[tuple[str, str]] = field(default_factory=list)
    damaged: list[tuple[str, str]] = field(default_factory=list)
    extra: list[tuple[str, str]] = field(default_factory=list)

    @property
    def problems(self) -> list[tuple[str, str]]:
        return [*self.missing, *self.damaged, *self.extra]

    def to_json(self) -> dict[str, Any]:
        listed = {name: [{"name": n, "problem": p} for n, p in getattr(self, name)] for name in KINDS}
        return {"volumes": self.volumes, "verified": self.verified, "reduced_batch": self.reduced, **listed}


KINDS = ("missing", "damaged", "extra")


def verify(root: Path, progress: Callable[[int], None] = lambda _done: None) -> Verification:
    """Reads every file of the data set `root`; `progress(done)` is called after each volume and mask."""
    ledger = DatasetLedger(root)
    if not ledger.exists():
        raise InputError(f"{root}: not a data set of voxtune generate ({FOLDER}/ is missing or incomplete)")
    settings, masks = ledger.settings(), ledger.masks()
    images = [str(image) for image in settings["images"]]
    result = Verification(volumes=sum(masks.values()))
    intact: dict[str, int] = {}  # the numbers of each subject as bits; bit 0 is the mask
    problems: dict[str, str] = {}
    for done, (line, damage) in enumerate(_read(ledger, masks, images), start=1):
        progress(done)
        subject, number = split_volume_name(line.name) or (line.name, 0)
        if damage is not None:
            problems[line.name] = f"{damage[0]} is missing" if damage[1] == "missing" else f"{damage[0]}: {damage[1]}"
        elif not intact.get(subject, 0) >> number & 1:
            intact[subject] = intact.get(subject, 0) | 1 << number
            result.verified += number > 0
            result.reduced += line.reduced
    for subject, count in masks.items():
        bits = intact.get(subject, 0)
        for number in range(count + 1):
            if not bits >> number & 1:
                name = volume_name(subject, number) if number else f"mask of {subject}"
                problem = problems.get(name if number else subject)
                if problem is None:
                    result.missing.append((name, "is not in the ledger"))
                else:
                    kind = result.missing if problem.endswith(" is missing") else result.damaged
                    kind.append((name, problem))
    result.extra = [(name, "does not belong to the data set") for name in _extra(root, masks, images)]
    return result


def _read(
    ledger: DatasetLedger, masks: dict[str, int], images: list[str]
) -> Iterator[tuple[LedgerLine, tuple[str, str] | None]]:
    """Each record of the data set with what differs from it; the files are read by several threads."""
    with ThreadPoolExecutor(READERS) as readers:
        pending: list[tuple[LedgerLine, Future[tuple[str, str] | None]]] = []
        for line in ledger.lines():
            if ledger.is_expected(line, masks, images):
                pending.append((line, readers.submit(ledger.damage, line, read=True)))
            if len(pending) >= AHEAD:
                first, damage = pending.pop(0)
                yield first, damage.result()
        for line, damage in pending:
            yield line, damage.result()


def _extra(root: Path, masks: dict[str, int], images: list[str]) -> Iterator[str]:
    """The files that belong neither to a volume nor to the ledger, relative to the data set."""
    subjects: dict[str, list[str]] = defaultdict(list)
    for subject in masks:
        subjects[dataset_mask(named_after(subject)).rpartition("/")[0]].append(subject)
    for folder, folders, files in os.walk(root):
        folders.sort()
        place = Path(folder).relative_to(root).as_posix()
        if place == FOLDER:
            folders.clear()
            continue
        expected = set()
        for subject in subjects.get(place, ()):
            expected.add(dataset_mask(named_after(subject)))
            for number in range(1, masks[subject] + 1):
                expected.update(files_of_volume(subject, number, images))
        for name in sorted(files):
            path = name if place == "." else f"{place}/{name}"
            own = place == "." and name in OWN_FILES
            # Temporary files of a running or killed worker; the next start deletes them.
            if path not in expected and not own and PART.fullmatch(name) is None:
                yield path
        for name in folders:
            if (Path(folder) / name).is_symlink():
                yield f"{name if place == '.' else f'{place}/{name}'}"

"""The simulated cohort on disk as a BIDS dataset: images as raw data, masks as a derivative.

dataset_description.json  participants.tsv  README
sub-0000/anat/sub-0000_T1w.nii.gz
derivatives/masks/dataset_description.json  derivatives/masks/dseg.tsv
derivatives/masks/sub-0000/anat/sub-0000_dseg.nii.gz
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from voxtune.data.cohort import LABELS, TUMOUR, Subject
from voxtune.data.contract import Shape
from voxtune.data.contrast import KINDS
from voxtune.data.derivative import DESCRIPTION, dataset_root, read_json, sidecar_path
from voxtune.data.modality import bids_name
from voxtune.data.nifti import volume_bytes
from voxtune.data.pairing import Pair
from voxtune.data.simulation import check_version, simulated_subject
from voxtune.errors import FileProblems, InputError, overwrite_advice
from voxtune.files import (
    LOCK,
    PART,
    check_outputs,
    delete_file,
    locked_folder,
    reporting_os_errors,
    write_file,
    write_json,
)
from voxtune.marks import written_by_voxtune
from voxtune.versions import __version__

MASKS = Path("derivatives", "masks")
PARTICIPANTS = "participants.tsv"
DATASET = (DESCRIPTION, PARTICIPANTS, "README", MASKS / DESCRIPTION, MASKS / "dseg.tsv")
COHORT_SUBJECT = re.compile(r"sub-\d{4,}")
# Name and masks' name of the dataset; version 0.1 wrote "voxtune cohort" and "voxtune cohort: masks".
NAME, MASKS_NAME = "voxtune cohort: simulated subjects", "voxtune cohort: masks of simulated subjects"
NAME_START = "voxtune cohort"
# Images in [0, 1] are stored as integers 0 .. 1000, a third of the file size of floats.
INTENSITY_STEPS = 1000
README = """Simulated subjects of the cohort of voxtune: the MNI152 average brain, varied by smooth warps, contrast and
bias fields, with simulated lesions. None of the subjects is a real person.
Masks are in derivatives/masks: 0 background, 1 brain, 2 tumour.
"""
README_2 = """Simulated subjects of the cohort of voxtune, version 2: the tissue maps of the MNI152 average brain, varied by
smooth warps and random sulci, with the signal of each tissue in each sequence, and with simulated lesions of core, rim and
oedema. None of the subjects is a real person.
Masks are in derivatives/masks: 0 background, 1 brain, 2 tumour (core and rim, without oedema).
"""


def write_cohort(
    folder: str | Path,
    n: int,
    seed: int,
    size: Shape,
    callback: Callable[[int, int], None] | None = None,
    *,
    overwrite: bool = False,
    healthy_fraction: float = 0.1,
    first: int = 0,
    version: int = 1,
    kinds: Sequence[str] = ("T1w",),
) -> list[Pair]:
    """Writes `n` simulated subjects of cohort `seed`, starting with number `first`; the same call writes the same bytes.

    Version 2 of the cohort has images of several `kinds`.

    `callback(done, n)` is called after each subject.
    """
    folder = Path(folder)
    if n < 1:
        raise InputError(f"number of subjects is {n}; it must be 1 or more")
    check_version(version, kinds)
    numbers = range(first, first + n)
    new = [file for number in numbers for file in _subject_files(folder, f"sub-{number:04d}", kinds)]

    def check() -> list[Path]:
        earlier = _earlier_subjects(folder, overwrite)
        check_outputs([*(folder / name for name in DATASET), *new], overwrite=overwrite, folder=folder)
        return earlier

    check()
    with locked_folder(folder):
        old = check()  # again: another process may have written a cohort meanwhile
        delete_file(folder / PARTICIPANTS)
        _delete(old)
        provenance = {"seed": seed, "size": list(size), "subjects": n, "healthy_fraction": healthy_fraction}
        provenance |= {"first": first} if first else {}
        provenance |= {"version": version, "images": list(kinds)} if version != 1 else {}
        _write_descriptions(folder, provenance, README if version == 1 else README_2, overwrite=overwrite)
        rows, pairs = ["participant_id\tseed\tindex\ttumour_ml\torigin"], []
        for index in numbers:
            simulated = simulated_subject(version, seed, index, size, healthy_fraction=healthy_fraction, kinds=kinds)
            pairs.append(_write_subject(folder, simulated))
            millilitres = (simulated.labels_DHW == TUMOUR).sum() * np.linalg.det(simulated.affine[:3, :3]) / 1000
            rows.append(f"{simulated.id}\t{seed}\t{index}\t{millilitres:.3f}\tsimulated")
            if callback is not None:
                callback(len(pairs), n)
        # Written last: a cohort with a list of participants is complete.
        write_file(folder / PARTICIPANTS, "\n".join(rows) + "\n", overwrite=overwrite)
    return pairs


def _subject_files(folder: Path, name: str, kinds: Sequence[str]) -> list[Path]:
    """The images and the mask of a subject."""
    endings = ["_".join(part for part in bids_name(kind) if part) for kind in kinds]
    images = [folder / name / "anat" / f"{name}_{ending}.nii.gz" for ending in endings]
    return [*images, folder / MASKS / name / "anat" / f"{name}_dseg.nii.gz"]


def _write_subject(folder: Path, simulated: Subject) -> Pair:
    labels = simulated.label_volume()
    *image_paths, mask_path = _subject_files(folder, simulated.id, simulated.kinds)
    # Those of an earlier cohort are deleted by now.
    for kind, path in zip(simulated.kinds, image_paths, strict=True):
        image = simulated.image_volume(kind)
        write_file(path, volume_bytes(np.rint(image.array * INTENSITY_STEPS).astype(np.int16), image))
    write_file(mask_path, volume_bytes(labels.array, labels))
    return Pair(id=simulated.id, images=tuple(image_paths), mask=mask_path)


def _write_descriptions(folder: Path, provenance: dict[str, Any], readme: str, *, overwrite: bool) -> None:
    description = f"simulated subjects: voxtune cohort {json.dumps(provenance)}"
    made_by = [{"Name": "voxtune", "Version": __version__, "Description": description}]
    raw = {"Name": NAME, "BIDSVersion": "1.9.0", "DatasetType": "raw", "GeneratedBy": made_by}
    masks = {**raw, "Name": MASKS_NAME, "DatasetType": "derivative"}
    write_json(folder / DESCRIPTION, raw, overwrite=overwrite)
    write_json(folder / MASKS / DESCRIPTION, masks, overwrite=overwrite)
    rows = ["index\tname", "0\tbackground", *(f"{label.value}\t{label.name}" for label in LABELS)]
    write_file(folder / MASKS / "dseg.tsv", "\n".join(rows) + "\n", overwrite=overwrite)
    write_file(folder / "README", readme, overwrite=overwrite)


def _earlier_subjects(folder: Path, overwrite: bool) -> list[Path]:
    """The files of the subjects of an earlier cohort in `folder`, to be deleted.

    Raises InputError unless the folder is empty or, with `overwrite`, its subjects hold nothing but such files.
    """
    with reporting_os_errors(folder):
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder}: is a file, not a folder")
        if not folder.exists() or not any(map(_is_content, folder.iterdir())):
            return []
        if not overwrite:
            raise InputError(
                f"{folder}: the folder is not empty; {overwrite_advice()} to replace a cohort, or choose another folder"
            )
        if not is_cohort(folder, "raw"):
            raise InputError(f"{folder}: contains files other than those of a voxtune cohort; choose another folder")
        subjects = [*folder.glob("sub-*"), *(folder / MASKS).glob("sub-*")]
        files = [file for entry in subjects for file in _files_below(entry)]
    others = FileProblems()
    for file in files:
        names = filter(COHORT_SUBJECT.fullmatch, file.relative_to(folder).parts)
        own = any(file in _subject_files(folder, name, KINDS) for name in names)
        if not own or file.is_symlink() or not written_by_voxtune(file):
            others.add(
                file, "is not a file of this cohort, whose subjects are replaced; move it or choose another folder"
            )
    others.raise_all()
    return files


def _files_below(entry: Path) -> list[Path]:
    """Everything but folders: `entry` itself, or what is below it without following links."""
    if entry.is_symlink() or not entry.is_dir():
        return [entry]
    return [file for child in sorted(filter(_is_content, entry.iterdir())) for file in _files_below(child)]


def _is_content(path: Path) -> bool:
    """Whether the file is more than the lock or a temporary file of a killed command."""
    return path.name != LOCK and PART.fullmatch(path.name) is None


def _delete(files: list[Path]) -> None:
    """Deletes files of an earlier cohort, and the folders that this empties."""
    for file in files:
        delete_file(file)
    for folder in sorted({parent for file in files for parent in (file.parent, file.parent.parent)}, reverse=True):
        with suppress(OSError):  # not empty
            folder.rmdir()


def is_cohort(folder: Path, dataset_type: str | None = None) -> bool:
    """Whether `folder` is a dataset of simulated subjects that `write_cohort` wrote."""
    description = read_json(folder / DESCRIPTION)
    try:
        generator = description["GeneratedBy"][0]["Name"]
        name, kind = str(description["Name"]), description["DatasetType"]
    except (LookupError, TypeError):
        return False
    return generator == "voxtune" and name.startswith(NAME_START) and dataset_type in (None, kind)


def is_simulated(path: Path) -> bool:
    """Whether a volume is of a simulated subject, according to its sidecar or the description of its dataset."""
    if read_json(sidecar_path(path)).get("Simulated") is True:
        return True
    return is_cohort(dataset_root(path))


def mark_simulated(path: Path, *, overwrite: bool = False) -> None:
    """Writes a sidecar that marks a volume as that of a simulated subject."""
    write_file(sidecar_path(path), json.dumps({"Simulated": True}) + "\n", overwrite=overwrite)

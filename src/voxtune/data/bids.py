"""The cohort on disk as BIDS: images as a raw dataset, masks as a derivative of it.

dataset_description.json  participants.tsv  README
sub-0000/anat/sub-0000_T1w.nii.gz
derivatives/masks/dataset_description.json  derivatives/masks/dseg.tsv
derivatives/masks/sub-0000/anat/sub-0000_dseg.nii.gz
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from voxtune.data.cohort import LABELS, TUMOUR, Subject, subject
from voxtune.data.contract import Shape
from voxtune.data.nifti import write_volume
from voxtune.data.pairing import Pair
from voxtune.errors import InputError
from voxtune.files import write_atomic

MASKS = Path("derivatives", "masks")
DESCRIPTION = "dataset_description.json"
NAME = "voxtune cohort"
# Scanners store whole numbers: [0, 1] becomes 0 .. 1000, exact enough and a third of the file.
INTENSITY_STEPS = 1000
README = """Synthetic subjects of the embedded cohort of voxtune: the MNI152 average brain, varied by smooth warps,
contrast and bias fields, with lesions inserted. None of them is a person.
Masks are in derivatives/masks: 0 background, 1 brain, 2 tumour.
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
) -> list[Pair]:
    """Writes `n` subjects of cohort `seed` from number `first` on; `callback(done, n)` after each.

    The same call gives the same bytes.
    """
    folder = Path(folder)
    if n < 1:
        raise InputError(f"{n} subjects: ask for one or more")
    _make_room(folder, overwrite)
    provenance = {"seed": seed, "size": list(size), "subjects": n, "healthy_fraction": healthy_fraction}
    provenance |= {"first": first} if first else {}
    _write_descriptions(folder, provenance)
    rows, pairs = ["participant_id\tseed\tindex\ttumour_ml"], []
    for index in range(first, first + n):
        drawn = subject(seed, index, size, healthy_fraction=healthy_fraction)
        pairs.append(_write_subject(folder, drawn))
        millilitres = (drawn.labels_DHW == TUMOUR).sum() * np.linalg.det(drawn.affine[:3, :3]) / 1000
        rows.append(f"{drawn.id}\t{seed}\t{index}\t{millilitres:.3f}")
        if callback is not None:
            callback(len(pairs), n)
    # Last: a cohort that lists its participants is complete.
    _write_text(folder / "participants.tsv", "\n".join(rows) + "\n")
    return pairs


def _write_subject(folder: Path, drawn: Subject) -> Pair:
    image, labels = drawn.image_volume(), drawn.label_volume()
    image_path = folder / drawn.id / "anat" / f"{drawn.id}_T1w.nii.gz"
    mask_path = folder / MASKS / drawn.id / "anat" / f"{drawn.id}_dseg.nii.gz"
    write_volume(image_path, np.rint(image.array * INTENSITY_STEPS).astype(np.int16), image)
    write_volume(mask_path, labels.array, labels)
    return Pair(id=drawn.id, images=(image_path,), mask=mask_path)


def _write_descriptions(folder: Path, provenance: dict[str, Any]) -> None:
    made_by = [{"Name": "voxtune", "Version": _version(), "Description": "voxtune cohort " + json.dumps(provenance)}]
    raw = {"Name": NAME, "BIDSVersion": "1.9.0", "DatasetType": "raw", "GeneratedBy": made_by}
    masks = {**raw, "Name": "voxtune cohort: masks", "DatasetType": "derivative"}
    _write_text(folder / DESCRIPTION, json.dumps(raw, indent=2) + "\n")
    _write_text(folder / MASKS / DESCRIPTION, json.dumps(masks, indent=2) + "\n")
    rows = ["index\tname", "0\tbackground", *(f"{label.value}\t{label.name}" for label in LABELS)]
    _write_text(folder / MASKS / "dseg.tsv", "\n".join(rows) + "\n")
    _write_text(folder / "README", README)


def _make_room(folder: Path, overwrite: bool) -> None:
    """Refuses a folder in use. Overwriting removes subjects only from a folder that this module wrote."""
    try:
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder}: is a file; name a folder")
        if not folder.exists() or not any(folder.iterdir()):
            return
        if not overwrite:
            raise InputError(f"{folder}: the folder is not empty; choose another or overwrite it")
        old = [*folder.glob("sub-*"), *(folder / MASKS).glob("sub-*")]
        # Also volumes that were drawn into the folder, and what lies loose beside subjects, are not ours to remove.
        if not _is_ours(folder) or not all(place.is_dir() for place in old):
            raise InputError(f"{folder}: holds something other than a voxtune cohort; choose another folder")
        (folder / "participants.tsv").unlink(missing_ok=True)
        for place in old:
            shutil.rmtree(place)
    except OSError as error:
        raise InputError(f"{folder}: cannot be used ({error.strerror or error})") from None


def _is_ours(folder: Path) -> bool:
    try:
        described = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        return (described["Name"], described["GeneratedBy"][0]["Name"]) == (NAME, "voxtune")
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _write_text(path: Path, text: str) -> None:
    write_atomic(path, text.encode())


def _version() -> str:
    try:
        return importlib.metadata.version("voxtune")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"

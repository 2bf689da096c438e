"""The simulated cohort on disk as a BIDS dataset: images as raw data, masks as a derivative.

dataset_description.json  participants.tsv  README
sub-0000/anat/sub-0000_T1w.nii.gz
derivatives/masks/dataset_description.json  derivatives/masks/dseg.tsv
derivatives/masks/sub-0000/anat/sub-0000_dseg.nii.gz
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from voxtune.data.cohort import LABELS, TUMOUR, Subject, subject
from voxtune.data.contract import Shape
from voxtune.data.derivative import DESCRIPTION, dataset_root, read_json, sidecar_path
from voxtune.data.nifti import write_volume
from voxtune.data.pairing import Pair
from voxtune.errors import InputError, overwrite_advice
from voxtune.files import write_file
from voxtune.versions import __version__

MASKS = Path("derivatives", "masks")
# Name and masks' name of the dataset; version 0.1 wrote "voxtune cohort" and "voxtune cohort: masks".
NAME, MASKS_NAME = "voxtune cohort: simulated subjects", "voxtune cohort: masks of simulated subjects"
NAME_START = "voxtune cohort"
# Images in [0, 1] are stored as integers 0 .. 1000, a third of the file size of floats.
INTENSITY_STEPS = 1000
README = """Simulated subjects of the cohort of voxtune: the MNI152 average brain, varied by smooth warps, contrast and
bias fields, with simulated lesions. None of the subjects is a real person.
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
    """Writes `n` simulated subjects of cohort `seed`, starting with number `first`; the same call writes the same bytes.

    `callback(done, n)` is called after each subject.
    """
    folder = Path(folder)
    if n < 1:
        raise InputError(f"number of subjects is {n}; it must be 1 or more")
    _clear(folder, overwrite)
    provenance = {"seed": seed, "size": list(size), "subjects": n, "healthy_fraction": healthy_fraction}
    provenance |= {"first": first} if first else {}
    _write_descriptions(folder, provenance)
    rows, pairs = ["participant_id\tseed\tindex\ttumour_ml\torigin"], []
    for index in range(first, first + n):
        simulated = subject(seed, index, size, healthy_fraction=healthy_fraction)
        pairs.append(_write_subject(folder, simulated))
        millilitres = (simulated.labels_DHW == TUMOUR).sum() * np.linalg.det(simulated.affine[:3, :3]) / 1000
        rows.append(f"{simulated.id}\t{seed}\t{index}\t{millilitres:.3f}\tsimulated")
        if callback is not None:
            callback(len(pairs), n)
    # Written last: a cohort with a list of participants is complete.
    _write_text(folder / "participants.tsv", "\n".join(rows) + "\n")
    return pairs


def _write_subject(folder: Path, simulated: Subject) -> Pair:
    image, labels = simulated.image_volume(), simulated.label_volume()
    image_path = folder / simulated.id / "anat" / f"{simulated.id}_T1w.nii.gz"
    mask_path = folder / MASKS / simulated.id / "anat" / f"{simulated.id}_dseg.nii.gz"
    write_volume(image_path, np.rint(image.array * INTENSITY_STEPS).astype(np.int16), image)
    write_volume(mask_path, labels.array, labels)
    return Pair(id=simulated.id, images=(image_path,), mask=mask_path)


def _write_descriptions(folder: Path, provenance: dict[str, Any]) -> None:
    description = f"simulated subjects: voxtune cohort {json.dumps(provenance)}"
    made_by = [{"Name": "voxtune", "Version": __version__, "Description": description}]
    raw = {"Name": NAME, "BIDSVersion": "1.9.0", "DatasetType": "raw", "GeneratedBy": made_by}
    masks = {**raw, "Name": MASKS_NAME, "DatasetType": "derivative"}
    _write_text(folder / DESCRIPTION, json.dumps(raw, indent=2) + "\n")
    _write_text(folder / MASKS / DESCRIPTION, json.dumps(masks, indent=2) + "\n")
    rows = ["index\tname", "0\tbackground", *(f"{label.value}\t{label.name}" for label in LABELS)]
    _write_text(folder / MASKS / "dseg.tsv", "\n".join(rows) + "\n")
    _write_text(folder / "README", README)


def _clear(folder: Path, overwrite: bool) -> None:
    """Raises InputError unless the folder is empty; with `overwrite`, removes the subjects of an earlier cohort only."""
    try:
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder}: is a file, not a folder")
        if not folder.exists() or not any(folder.iterdir()):
            return
        if not overwrite:
            raise InputError(
                f"{folder}: the folder is not empty; {overwrite_advice()} to replace a cohort, or choose another folder"
            )
        old = [*folder.glob("sub-*"), *(folder / MASKS).glob("sub-*")]
        # Generated volumes and other files beside the subjects must not be removed.
        if not is_cohort(folder, "raw") or not all(path.is_dir() for path in old):
            raise InputError(f"{folder}: contains files other than those of a voxtune cohort; choose another folder")
        (folder / "participants.tsv").unlink(missing_ok=True)
        for path in old:
            shutil.rmtree(path)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written to ({error.strerror or error})") from None


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


def mark_simulated(path: Path) -> None:
    """Writes a sidecar that marks a volume as that of a simulated subject."""
    _write_text(sidecar_path(path), json.dumps({"Simulated": True}) + "\n")


def _write_text(path: Path, text: str) -> None:
    write_file(path, text.encode(), state=True)

"""Names of generated volumes: from a mask to the files of its volumes, and from a volume back to its subject.

The output folder is a BIDS derivative dataset:

dataset_description.json
sub-01/ses-2/anat/sub-01_ses-2_desc-synth01_T1w.nii.gz  and a sidecar .json
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from voxtune import reading
from voxtune.data.modality import NIFTI_NAME, SYNTHETIC, bids_stem, split_name
from voxtune.errors import InputError
from voxtune.files import slug, write_json
from voxtune.versions import __version__

DESCRIPTION = "dataset_description.json"
# Mask names without a subject, such as dseg.nii.gz, or aseg.mgz of FreeSurfer: the folder names the subject.
GENERIC_NAME = re.compile(r"dseg|seg|mask|labels?|wmparc|(aparc(\.[a-z0-9]+)?\+)?aseg", re.IGNORECASE)
MASK_SUFFIX = re.compile(rf"(_(dseg|seg|mask|labels?))?{NIFTI_NAME.pattern}", re.IGNORECASE)
# A subject in the terms of BIDS, with any other entities: sub-01_ses-2_run-1.
BIDS_SUBJECT = re.compile(r"sub-[A-Za-z0-9+]+(_[A-Za-z]+-[A-Za-z0-9+]+)*")
# Descriptions and sidecars are small; larger files are not read.
MAX_JSON_BYTES = 2**20
MAX_NAME = 255


def mask_stem(path: Path) -> str:
    """The name of a mask without .nii.gz and _dseg, such as sub-01_ses-2; that of its folder for dseg.nii.gz.

    FreeSurfer keeps the files of a subject in SUBJECT/mri.
    """
    stem = MASK_SUFFIX.sub("", path.name)
    if stem and not GENERIC_NAME.fullmatch(stem):
        return stem
    folder = path.absolute().parent
    return (folder.parent if folder.name == "mri" else folder).name or "mask"


def check_stems(masks: Iterable[Path]) -> None:
    """Raises for two masks with one stem, whose volumes would have the same noise and the same names."""
    _unique(
        masks, mask_stem, "have the same name, which determines the noise and the files of their volumes; rename one"
    )


def output_names(
    masks: Sequence[Path], count: int, images: Sequence[str], *, flat: bool
) -> list[list[tuple[str, ...]]]:
    """For each mask and each of its `count` volumes, the files of the images, relative to the output folder.

    With `flat` they are all in that folder and begin with the mask's stem.
    """
    check_stems(masks)
    if not flat:
        reason = (
            "have the same subject and entities in BIDS, {}, so their volumes would overwrite each other; rename one, "
        )
        _unique(masks, bids_subject, reason + "or pass --flat")
    name = _flat_name if flat else _bids_name
    return [
        [tuple(name(mask, image, f"synth{number:02d}") for image in images) for number in range(1, count + 1)]
        for mask in masks
    ]


def volume_files(mask: Path, number: int, images: Sequence[str]) -> tuple[str, ...]:
    """The files of the images of volume `number` of a mask, relative to the dataset."""
    return tuple(_bids_name(mask, image, f"synth{number:02d}") for image in images)


def dataset_mask(mask: Path) -> str:
    """The file of a mask that is stored beside its volumes, relative to the dataset."""
    subject = bids_subject(mask)
    return "/".join([*_folders(subject), f"{subject}_dseg.nii.gz"])


def _flat_name(mask: Path, image: str, description: str) -> str:
    return f"{mask_stem(mask)}_desc-{description}_{slug(image, default='image')}.nii.gz"


def _bids_name(mask: Path, image: str, description: str) -> str:
    subject = bids_subject(mask)
    return "/".join([*_folders(subject), f"{bids_stem(subject, image, description)}.nii.gz"])


def _folders(subject: str) -> list[str]:
    folders = [part for part in subject.split("_") if part.startswith(("sub-", "ses-"))]
    return [*dict.fromkeys(folders), "anat"]


def bids_subject(mask: Path) -> str:
    """The subject of a mask with its other entities: sub-01_ses-2.

    Of a name that is not of BIDS, the letters and digits become the label of the subject: sub-case12 for case_12.
    """
    stem = mask_stem(mask)
    subject = split_name(Path(f"{stem}.nii.gz"))[0] or stem
    if BIDS_SUBJECT.fullmatch(subject):
        return subject
    label = re.sub(r"[^A-Za-z0-9]+", "", subject.removeprefix("sub-"))
    if not label:
        raise InputError(f"{mask}: the name has no letter or digit for a BIDS subject; rename the file or pass --flat")
    return f"sub-{label}"


def _unique(masks: Iterable[Path], name: Callable[[Path], str], problem: str) -> None:
    known: dict[str, Path] = {}
    for mask in masks:
        # Names that differ in case only are one file on some file systems.
        first = known.setdefault(name(mask).casefold(), mask)
        if first is mask:
            continue
        if first.absolute() == mask.absolute():
            raise InputError(f"{mask}: is given twice; pass --count for several volumes of a mask")
        raise InputError(f"{first} and {mask} {problem.format(name(mask))}")


def describe_dataset(folder: Path) -> None:
    """Writes the BIDS description of a derivative dataset, if there is none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}; choose a writable folder") from None
    description = {
        "Name": "Synthetic MRI",
        "BIDSVersion": "1.10.0",
        "DatasetType": "derivative",
        "GeneratedBy": [{"Name": "voxtune", "Version": __version__}],
    }
    if not (folder / DESCRIPTION).exists():
        write_json(folder / DESCRIPTION, description)


def dataset_root(path: Path) -> Path:
    """The folder of the dataset that a file belongs to: the nearest one above it with a description, else its own."""
    return next((folder for folder in list(path.parents)[:4] if (folder / DESCRIPTION).is_file()), path.parent)


def subject_of(path: Path, images: Iterable[str] = ()) -> str:
    """The subject of an image or mask: that in its name; of a generated volume, that of the mask in its sidecar."""
    if SYNTHETIC.search(path.name):
        noise = read_json(sidecar_path(path)).get("noise")
        stem = noise.get("stem") if isinstance(noise, dict) else None
        if isinstance(stem, str) and 0 < len(stem) <= MAX_NAME and stem.isprintable():
            return split_name(Path(f"{stem.replace('/', '_')}.nii.gz"), images)[0] or stem
    return split_name(path, images)[0]


def sidecar_path(path: Path) -> Path:
    """The JSON file beside a NIfTI file."""
    return path.with_name(NIFTI_NAME.sub(".json", path.name))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a small file; empty if the file is absent, large or not valid."""
    try:
        content = reading.read_json(path, limit=MAX_JSON_BYTES)
    except InputError:
        return {}
    return content if isinstance(content, dict) else {}

"""Folders of volumes to be judged: which files belong together by name, and each volume on one common grid."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from voxtune.data.contract import DataContract, scale_image
from voxtune.data.grid import fit
from voxtune.data.nifti import Volume, read_labels, read_volume
from voxtune.data.pairing import MASK_ENDINGS, nifti_files, same_modality, split_name
from voxtune.data.preflight import check_mask, check_pair
from voxtune.errors import InputError

# FileErrors of files that one message names; the rest are counted.
SHOWN_FAULTS = 5
DRAWN = re.compile(r"_desc-synth\d+", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class VolumeFile:
    """One image: its subject by name (sub-01 of sub-01_desc-synth02_T1w.nii.gz) and its modality in lower case, or ""."""

    path: Path
    subject: str
    modality: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Placed:
    """One volume on the common grid: `image_DHW` in [-1, 1] by its own extremes; `labels_DHW` of its mask, if any."""

    file: VolumeFile
    image_DHW: np.ndarray
    labels_DHW: np.ndarray | None
    constant: bool


def find_images(folder: str | Path, image: str | None = None, *, synthetic: bool = False) -> list[VolumeFile]:
    """The images below a folder, by name; masks are left out, and modalities other than `image` where it is given.

    A folder may hold real volumes and such that voxtune drew, told by desc-synth: of the two kinds only the one that is
    asked for counts, where it is there.
    """
    known = () if image is None else (image,)
    named = [(path, *split_name(path, known)) for path in nifti_files(folder)]
    found = [VolumeFile(path=p, subject=s, modality=m) for p, s, m in named if m not in MASK_ENDINGS]
    if image is not None:
        found = [f for f in found if not f.modality or same_modality(f.modality, image)]
    found = [f for f in found if bool(DRAWN.search(f.path.name)) == synthetic] or found
    if not found:
        what = "NIfTI images (.nii, .nii.gz)" if image is None else f"{image} images"
        raise InputError(f"{folder}: no {what} below this folder")
    return found


def find_masks(folder: str | Path) -> dict[str, Path]:
    """Subject -> mask of a folder: the files named as masks (_dseg, _seg, _mask), or all of them where none is."""
    files = nifti_files(folder)
    marked = [p for p in files if split_name(p, ())[1] in MASK_ENDINGS]
    masks: dict[str, Path] = {}
    for path in marked or files:
        subject = split_name(path, ())[0]
        if subject in masks:
            raise InputError(f"{masks[subject]}, {path}: several masks for subject {subject}; keep one")
        masks[subject] = path
    if not masks:
        raise InputError(f"{folder}: no NIfTI masks (.nii, .nii.gz) below this folder")
    return masks


def check_modalities(sets: Iterable[Sequence[VolumeFile]]) -> None:
    """Refuses to judge a T1 against a T2: one result speaks of one image."""
    seen: dict[str, VolumeFile] = {}
    for files in sets:
        for file in files:
            if file.modality and not any(same_modality(file.modality, known) for known in seen):
                seen[file.modality] = file
    if len(seen) > 1:
        names = ", ".join(f"{m} ({f.path.name})" for m, f in seen.items())
        raise InputError(f"several kinds of images: {names}; choose one with --image, as --image {next(iter(seen))}")


def pair_by_subject(real: Sequence[VolumeFile], synth: Sequence[VolumeFile]) -> list[tuple[VolumeFile, VolumeFile]]:
    """(real, synthetic) for each synthetic volume whose subject has a real one."""
    by_subject: dict[str, list[VolumeFile]] = {}
    for file in real:
        by_subject.setdefault(file.subject, []).append(file)
    pairs = []
    for drawn in synth:
        partners = by_subject.get(drawn.subject, [])
        if len(partners) > 1:
            names = ", ".join(str(p.path) for p in partners[:4])
            raise InputError(f"{names}: several real images for subject {drawn.subject}; keep one")
        pairs += [(partner, drawn) for partner in partners]
    return pairs


def read_placed(
    file: VolumeFile, mask_path: Path | None, contract: DataContract, *, strict: bool = True, by_mask: bool = True
) -> Placed:
    """One volume, and its mask, on the contract's grid; where it does not fit the grid, cropped around its labels.

    Without `by_mask` around its own middle, as a volume without a mask is: of volumes that are held against each other all
    must be placed alike. A mask on another grid than its volume is an error; `strict` asks about its labels, too.
    """
    volume = read_volume(file.path)
    mask = None if mask_path is None else read_labels(mask_path)
    if mask is not None:
        check_pair(volume, mask).raise_errors()
        if strict:
            check_mask(mask, contract).raise_errors()
    labelled = mask if by_mask else None
    placement = fit(volume if labelled is None else labelled, contract, label=labelled is not None)
    image = placement.apply(volume.array, label=False, fill=float(volume.array.min()))
    labels = None if mask is None else placement.apply(mask.array, label=True)
    constant = float(image.min()) == float(image.max())
    return Placed(file=file, image_DHW=scale_image(image, contract), labels_DHW=labels, constant=constant)


def read_pair(real: VolumeFile, synth: VolumeFile) -> tuple[np.ndarray, np.ndarray]:
    """Both volumes of a pair on their own grid, each in [0, 1] by its own extremes."""
    a, b = read_volume(real.path), read_volume(synth.path)
    if a.shape != b.shape:
        raise InputError(
            f"{b.name}: shape {b.shape} is not that of its real partner {a.name}, {a.shape}; resample one to the other"
        )
    report = check_pair(b, a)
    if not report.ok:
        raise InputError(report.errors[0].message.replace("its mask", "its real partner"))
    return _unit(a), _unit(b)


def _unit(volume: Volume) -> np.ndarray:
    low, high = float(volume.array.min()), float(volume.array.max())
    return (volume.array - np.float32(low)) / np.float32(high - low if high > low else 1.0)


class FileErrors:
    """What is wrong with files, gathered so that one message tells all."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, error: InputError) -> None:
        if str(error) not in self.found:
            self.found.append(str(error))

    def raise_all(self) -> None:
        if self.found:
            more = len(self.found) - SHOWN_FAULTS
            shown = "; ".join(self.found[:SHOWN_FAULTS])
            raise InputError(f"{shown}; and {more} more of the kind" if more > 0 else shown)


def masks_of(files: Sequence[VolumeFile], masks: Mapping[str, Path]) -> list[Path | None]:
    return [masks.get(file.subject) for file in files]

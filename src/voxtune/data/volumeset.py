"""Sets of volumes for evaluation: matching by file name, and placement on a common grid."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from voxtune.data.contract import DataContract, scale_image
from voxtune.data.derivative import subject_of
from voxtune.data.geometry import GeometrySummary
from voxtune.data.grid import fit
from voxtune.data.modality import MASK_ENDINGS, SYNTHETIC, same_kind, split_name
from voxtune.data.nifti import Volume, read_labels, read_volume
from voxtune.data.pairing import nifti_files
from voxtune.data.preflight import MODEL, Consumer, check_mask, check_pair
from voxtune.errors import InputError


@dataclass(frozen=True, kw_only=True)
class VolumeFile:
    """An image file with its subject (sub-01 of sub-01_desc-synth02_T1w.nii.gz) and its modality in lower case, or ""."""

    path: Path
    subject: str
    modality: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Placed:
    """A volume on the common grid: `image_DHW` scaled to [-1, 1] by its minimum and maximum; the labels of its mask."""

    file: VolumeFile
    image_DHW: np.ndarray
    labels_DHW: np.ndarray | None
    constant: bool


def find_images(folder: str | Path, image: str | None = None, *, synthetic: bool = False) -> list[VolumeFile]:
    """The images below a folder, sorted by path, without masks; only those of modality `image` if it is given.

    If a folder contains both generated volumes (desc-synth in the name) and others, `synthetic` selects one kind.
    """
    known = () if image is None else (image,)
    named = [(path, split_name(path, known)[1]) for path in nifti_files(folder)]
    files = [VolumeFile(path=p, subject=subject_of(p, known), modality=m) for p, m in named if m not in MASK_ENDINGS]
    if image is not None:
        files = [f for f in files if not f.modality or same_kind(f.modality, image)]
    files = [f for f in files if bool(SYNTHETIC.search(f.path.name)) == synthetic] or files
    if not files:
        kind = "NIfTI images (.nii, .nii.gz)" if image is None else f"{image} images"
        raise InputError(f"{folder}: no {kind} in this folder")
    return files


def find_masks(folder: str | Path) -> dict[str, Path]:
    """The mask of each subject: the files named as masks (_dseg, _seg, _mask), or all files if none is."""
    files = nifti_files(folder)
    marked = [p for p in files if split_name(p, ())[1] in MASK_ENDINGS]
    masks: dict[str, Path] = {}
    for path in marked or files:
        subject = split_name(path, ())[0]
        if subject in masks:
            raise InputError(f"{masks[subject]}, {path}: several masks for subject {subject}; keep one")
        masks[subject] = path
    if not masks:
        raise InputError(f"{folder}: no NIfTI masks (.nii, .nii.gz) in this folder")
    return masks


def check_modalities(sets: Iterable[Sequence[VolumeFile]]) -> None:
    """Raises InputError if the volumes are of different modalities."""
    seen: dict[str, VolumeFile] = {}
    for files in sets:
        for file in files:
            if file.modality and not any(same_kind(file.modality, known) for known in seen):
                seen[file.modality] = file
    if len(seen) > 1:
        names = ", ".join(f"{m} ({f.path.name})" for m, f in seen.items())
        raise InputError(f"several modalities: {names}; choose one, such as --image {next(iter(seen))}")


def pair_by_subject(
    references: Sequence[VolumeFile], synthetic: Sequence[VolumeFile]
) -> list[tuple[VolumeFile, VolumeFile]]:
    """(reference, synthetic) for each synthetic volume whose subject has a reference."""
    by_subject: dict[str, list[VolumeFile]] = {}
    for file in references:
        by_subject.setdefault(file.subject, []).append(file)
    pairs = []
    for volume in synthetic:
        partners = by_subject.get(volume.subject, [])
        if len(partners) > 1:
            names = ", ".join(str(p.path) for p in partners[:4])
            raise InputError(f"{names}: several reference images for subject {volume.subject}; keep one")
        pairs += [(partner, volume) for partner in partners]
    return pairs


def read_placed(
    file: VolumeFile,
    mask_path: Path | None,
    contract: DataContract,
    *,
    labels_for: Consumer | None = MODEL,
    by_mask: bool = True,
    geometry: GeometrySummary | None = None,
) -> Placed:
    """Reads a volume and its mask on the contract's grid; a larger volume is cropped around its labels.

    Without `by_mask` it is cropped around its centre, as a volume without a mask: volumes that are compared must be placed
    in the same way. A mask on another grid is an error; its labels must be those of `labels_for`, if given. Both files are
    counted in `geometry`.
    """
    volume = read_volume(file.path)
    mask = None if mask_path is None else read_labels(mask_path)
    if geometry is not None:
        for each in (volume, mask):
            if each is not None:
                geometry.add(each)
    if mask is not None:
        check_pair(volume, mask).raise_errors()
        if labels_for is not None:
            check_mask(mask, contract, labels_for).raise_errors()
    labelled = mask if by_mask else None
    placement = fit(volume if labelled is None else labelled, contract, label=labelled is not None)
    image = placement.apply(volume.array, label=False, fill=float(volume.array.min()))
    labels = None if mask is None else placement.apply(mask.array, label=True)
    constant = float(image.min()) == float(image.max())
    return Placed(file=file, image_DHW=scale_image(image, contract), labels_DHW=labels, constant=constant)


def read_pair(reference: VolumeFile, synthetic: VolumeFile) -> tuple[np.ndarray, np.ndarray]:
    """Reads both volumes of a pair on their grid, each scaled to [0, 1] by its minimum and maximum."""
    a, b = read_volume(reference.path), read_volume(synthetic.path)
    if a.shape != b.shape:
        raise InputError(
            f"{b.name}: shape {b.shape} differs from that of its reference {a.name}, {a.shape}; resample one to the other"
        )
    report = check_pair(b, a)
    if not report.ok:
        raise InputError(report.errors[0].message.replace("its mask", "its reference"))
    return _unit(a), _unit(b)


def _unit(volume: Volume) -> np.ndarray:
    low, high = float(volume.array.min()), float(volume.array.max())
    return (volume.array - np.float32(low)) / np.float32(high - low if high > low else 1.0)


def masks_of(files: Sequence[VolumeFile], masks: Mapping[str, Path]) -> list[Path | None]:
    return [masks.get(file.subject) for file in files]

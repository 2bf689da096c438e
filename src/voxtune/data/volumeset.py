"""Sets of volumes for evaluation: matching by file name, and placement on a common grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from voxtune.data.contract import DataContract, scale_image
from voxtune.data.derivative import subject_of
from voxtune.data.geometry import GeometrySummary
from voxtune.data.grid import fit
from voxtune.data.labels import MaskReader
from voxtune.data.modality import (
    MASK_ENDINGS,
    NIFTI_ENDINGS,
    PLAIN_ENDINGS,
    SYNTHETIC,
    describe_counts,
    in_order,
    kind_name,
    listed,
    same_kind,
    split_name,
)
from voxtune.data.nifti import Volume, read_volume
from voxtune.data.pairing import nifti_files
from voxtune.data.preflight import MODEL, Consumer, check_pair
from voxtune.errors import InputError


@dataclass(frozen=True, kw_only=True)
class VolumeFile:
    """An image file with its subject (sub-01 of sub-01_desc-synth02_T1w.nii.gz) and its image kind, or ""."""

    path: Path
    subject: str
    kind: str


@dataclass(frozen=True, kw_only=True)
class VolumeFiles:
    """The files of one volume by image kind; a single image may be of the kind "", which no file name states."""

    subject: str
    images: dict[str, VolumeFile]

    @property
    def path(self) -> Path:
        """The first file."""
        return next(iter(self.images.values())).path


@dataclass(frozen=True, kw_only=True, eq=False)
class Placed:
    """A volume on the common grid: `image_DHW` scaled to [-1, 1] by its minimum and maximum; the labels of its mask.

    `spacing` is that of the file, in mm.
    """

    file: VolumeFile
    image_DHW: np.ndarray
    labels_DHW: np.ndarray | None
    constant: bool
    spacing: tuple[float, float, float]


def find_images(folder: str | Path, images: Sequence[str] = (), *, synthetic: bool = False) -> list[VolumeFile]:
    """The images below a folder, sorted by path, without masks. `images` are kinds that names may state besides the known.

    If a folder contains both generated volumes (desc-synth in the name) and others, `synthetic` selects one sort.
    """
    named = [(path, split_name(path, images)[1]) for path in nifti_files(folder)]
    files = [
        VolumeFile(path=path, subject=subject_of(path, images), kind="" if end in PLAIN_ENDINGS else kind_name(end))
        for path, end in named
        if end not in MASK_ENDINGS
    ]
    files = [f for f in files if bool(SYNTHETIC.search(f.path.name)) == synthetic] or files
    if not files:
        raise InputError(f"{folder}: no NIfTI images ({NIFTI_ENDINGS}) in this folder")
    return files


def common_kinds(sets: Sequence[tuple[Path, Sequence[VolumeFile]]]) -> tuple[tuple[str, ...], list[str]]:
    """(the image kinds of all sets, warnings about others); ("",) if no file name states a kind.

    Raises InputError for sets without a common kind, or if the names of one set do not say which of several kinds it has.
    """
    stated = [(folder, {f.kind for f in files if f.kind}) for folder, files in sets]
    every = in_order(kind for _, kinds in stated for kind in kinds)
    if len(every) < 2:
        return tuple(every) or ("",), []
    for folder, kinds in stated:
        if not kinds:
            options = listed([f"--image {kind}" for kind in every], "or")
            raise InputError(f"{folder}: no file name states the image kind; choose one: {options}")
    common = tuple(kind for kind in every if all(kind in kinds for _, kinds in stated))
    if not common:
        counts = (f"{d}: {describe_counts(f.kind for f in files if f.kind)}" for d, files in sets)
        raise InputError(f"{'; '.join(counts)}; no image kind is in all of them")
    others = [kind for kind in every if kind not in common]
    return common, [f"{listed(others)} images are ignored: not every folder has them"] if others else []


def volumes_of(folder: str | Path, files: Sequence[VolumeFile], kinds: Sequence[str]) -> list[VolumeFiles]:
    """The volumes of a set, with one file of each kind; of a single kind also the files whose names state none."""
    if len(kinds) == 1:
        [kind] = kinds
        chosen = [f for f in files if not kind or not f.kind or same_kind(f.kind, kind)]
        if not chosen:
            raise InputError(f"{folder}: no {kind} images in this folder")
        return [VolumeFiles(subject=f.subject, images={kind: f}) for f in chosen]
    groups: dict[tuple[str, str], dict[str, VolumeFile]] = {}
    for file in files:
        matches = [kind for kind in kinds if same_kind(file.kind, kind)]
        number = SYNTHETIC.search(file.path.name)
        group = groups.setdefault((file.subject, number.group(1) if number else ""), {}) if matches else {}
        for kind in matches:
            if kind in group:
                raise InputError(
                    f"{group[kind].path}, {file.path}: several {kind} images for subject {file.subject}; keep one"
                )
            group[kind] = file
    if not groups:
        raise InputError(f"{folder}: no {listed(list(kinds), 'or')} images in this folder")
    for (subject, _), group in groups.items():
        missing = [kind for kind in kinds if kind not in group]
        if missing:
            raise InputError(
                f"{folder}: no {listed(missing, 'or')} image for subject {subject}; add it, or choose kinds that all "
                f"subjects have, such as --image {next(iter(group))}"
            )
    return [
        VolumeFiles(subject=subject, images={kind: group[kind] for kind in kinds})
        for (subject, _), group in groups.items()
    ]


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
        raise InputError(f"{folder}: no NIfTI masks ({NIFTI_ENDINGS}) in this folder")
    return masks


def pair_by_subject(
    references: Sequence[VolumeFiles], synthetic: Sequence[VolumeFiles]
) -> list[tuple[VolumeFiles, VolumeFiles]]:
    """(reference, synthetic) for each synthetic volume whose subject has a reference."""
    by_subject: dict[str, list[VolumeFiles]] = {}
    for files in references:
        by_subject.setdefault(files.subject, []).append(files)
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
    masks: MaskReader | None = None,
    references: Sequence[Path] = (),
) -> Placed:
    """Reads a volume and its mask on the contract's grid; a larger volume is cropped around its labels.

    Without `by_mask` it is cropped around its centre, as a volume without a mask: volumes that are compared must be placed
    in the same way. A mask on another grid is an error; its labels must be those of `labels_for`, if given. Both files are
    counted in `geometry`. `masks` reads the mask in the values of its contract, and takes a label from the images
    `references` where necessary.
    """
    masks = masks or MaskReader(contract=contract)
    volume = read_volume(file.path)
    fix = f"add an image of subject {file.subject} to the reference volumes"
    mask = None if mask_path is None else masks.read(mask_path, references, fix=fix)
    if geometry is not None:
        for each in (volume, mask):
            if each is not None:
                geometry.add(each)
    if mask is not None:
        check_pair(volume, mask).raise_errors()
        if labels_for is not None:
            masks.check(mask, labels_for).raise_errors()
    labelled = mask if by_mask else None
    placement = fit(volume if labelled is None else labelled, contract, label=labelled is not None)
    image = placement.apply(volume.array, label=False, fill=float(volume.array.min()))
    labels = None if mask is None else placement.apply(mask.array, label=True)
    constant = float(image.min()) == float(image.max())
    return Placed(
        file=file,
        image_DHW=scale_image(image, contract),
        labels_DHW=labels,
        constant=constant,
        spacing=placement.source_spacing,
    )


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


def masks_of(files: Sequence[VolumeFiles], masks: Mapping[str, Path]) -> list[Path | None]:
    return [masks.get(file.subject) for file in files]

"""Volumes to look at, each with its reference volume, its mask and its sidecar.

Reads the folders that `voxtune sample` and `voxtune demo` write, BIDS datasets, and plain folders with matching names.
A case is one subject, or one generated sample of it, with its images of several kinds (T1w, T2w, ...).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from voxtune.data.bids import is_simulated
from voxtune.data.derivative import dataset_root, read_json, sidecar_path, subject_of
from voxtune.data.legend import Legend, read_legend, record_image_label, record_legend, values_named, with_image_label
from voxtune.data.modality import (
    KINDS,
    MASK_ENDINGS,
    NIFTI_ENDINGS,
    NIFTI_NAME,
    PLAIN_ENDINGS,
    SYNTHETIC,
    kind_name,
    same_kind,
    split_name,
)
from voxtune.data.nifti import Volume, read_volume
from voxtune.data.pairing import group_by_subject, nifti_files
from voxtune.data.preflight import check_pair
from voxtune.errors import InputError

# The order of the images of a case; other kinds follow.
ORDER = {kind.name: place for place, kind in enumerate(KINDS)}

# "real" is a user's own scan, "simulated" a subject of the cohort; the origin of a plain "reference" is unknown.
Origin = Literal["synthetic", "simulated", "real", "reference", "volume"]


@dataclass(frozen=True, kw_only=True)
class CaseImage:
    """One image of a case with the reference volume of the same kind; `kind` is empty if the file name states none."""

    kind: str
    volume: Path
    reference: Path | None


@dataclass(frozen=True, kw_only=True)
class FromImage:
    """A label of a condition that was taken from the subject's images; `images` is empty if one of the files is not available."""

    name: str
    images: tuple[Path, ...]

    def fill(self, mask: Volume, legend: Legend) -> tuple[Volume, str]:
        """The mask with the label where it is 0 and the image is not, and a line about it."""
        values = values_named(legend, self.name)
        if np.isin(mask.array, values).any():
            return mask, ""
        missing = f"{self.name} was taken from the image and is not in this mask"
        inside = np.zeros(mask.shape, bool)
        try:
            for path in self.images:
                image = read_volume(path, allow_nonfinite=True)
                check_pair(image, mask).raise_errors()
                inside |= image.array != 0
        except InputError:
            return mask, missing
        if not self.images or not values:
            return mask, missing
        filled = np.where((mask.array == 0) & inside, np.int64(values[0]), mask.array)
        names = ", ".join(path.name for path in self.images)
        return replace(mask, array=filled), f"{self.name} was taken from {names}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One subject or sample to look at.

    `number` (synth01) distinguishes samples of a subject; `record` is the content of the first image's sidecar.
    """

    subject: str
    number: str
    images: tuple[CaseImage, ...]
    origin: Origin
    reference_origin: Origin
    mask: Path | None
    from_image: FromImage | None = None
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def note(self) -> str:
        """The number and the image kinds."""
        return " ".join(part for part in (self.number, ", ".join(i.kind for i in self.images if i.kind)) if part)

    @property
    def name(self) -> str:
        return f"{self.subject} {self.note}".strip()


@dataclass(frozen=True, kw_only=True)
class Cases:
    """All cases below a folder, and the label names from their sidecars or dataset."""

    cases: tuple[Case, ...]
    legend: Legend
    warnings: tuple[str, ...]

    @property
    def origin(self) -> Origin:
        """The origin of all volumes; "volume" if they differ."""
        origins = {case.origin for case in self.cases}
        return origins.pop() if len(origins) == 1 else "volume"


def find_cases(
    folder: str | Path,
    *,
    real: str | Path | None = None,
    masks: str | Path | None = None,
    labels: str | Path | None = None,
    limit: int | None = None,
) -> Cases:
    """Every generated volume below `folder`, or every image if none is marked as generated, with reference and mask.

    References come from the folder `real` if given, else from `folder`. `labels` is a dseg.tsv, a model folder or a text such
    as "tumour=1,4; brain=2"; only its names are then used, not those of the sidecars or the dataset.
    """
    folder = Path(folder)
    if limit is not None and limit < 1:
        raise InputError(f"--limit {limit}: must be 1 or more")
    files = nifti_files(folder)
    images = [p for p in files if split_name(p)[1] not in MASK_ENDINGS]
    synthetic = [p for p in images if SYNTHETIC.search(p.name)]
    if not images:
        raise InputError(f"{folder}: no volumes ({NIFTI_ENDINGS}) in this folder; give one written by voxtune sample")
    references = _references(images if synthetic else [], real)
    mask_pool = _masks(files, real, masks)
    groups = _group(synthetic or images)
    roots = [Path(p) for p in (masks, real, folder) if p is not None]
    cases = [
        _case(group, references, mask_pool, roots, real=real is not None, masks=masks is not None)
        for group in groups[:limit]
    ]
    _check_matches(cases, real, masks)
    warnings = [] if limit is None or len(groups) <= limit else [f"{limit} of {len(groups)} cases shown (--limit)"]
    warnings += _missing([c for c in cases if c.mask is None], cases, "mask", "--masks DIR")
    if real is not None:
        without = [c for c in cases if any(image.reference is None for image in c.images)]
        warnings += _missing(without, cases, "real volume", "--real DIR")
    warnings += _images_absent(cases)
    # `labels` may be "model", which names nothing.
    legend = ({} if labels is None else read_legend(labels)) or _legend(roots, cases)
    for name in {case.from_image.name: None for case in cases if case.from_image is not None}:
        legend = with_image_label(legend, name)
    return Cases(cases=tuple(cases), legend=legend, warnings=tuple(warnings))


def _group(volumes: list[Path]) -> list[list[Path]]:
    """The volumes of each case: same subject and sample, different kinds, ordered by kind."""
    groups: dict[tuple[str, str], list[list[Path]]] = {}
    ordered: list[list[Path]] = []
    for path in volumes:
        siblings = groups.setdefault((subject_of(path), _number(path)), [])
        kind = _kind(path)
        # A second image of a kind, or one of unknown kind, is a case of its own.
        free = [g for g in siblings if kind and all(k and not same_kind(k, kind) for k in map(_kind, g))]
        group = min(free, key=lambda g: g[0].parent != path.parent, default=None)
        if group is None:
            group = []
            siblings.append(group)
            ordered.append(group)
        group.append(path)
    return [sorted(group, key=lambda path: ORDER.get(_kind(path), len(ORDER))) for group in ordered]


def _number(path: Path) -> str:
    """The number of a generated sample, such as synth01, or nothing."""
    match = SYNTHETIC.search(path.name)
    return match.group(1) if match else ""


def _kind(path: Path) -> str:
    """The image kind of a file by its canonical name, or nothing if the name states none."""
    ending = split_name(path)[1]
    generated = NIFTI_NAME.sub("", path.name).rpartition("_")[2]
    if not ending and SYNTHETIC.search(path.name) and not generated.startswith("desc-"):
        # The model's own name of an image, which may be any.
        return generated
    return "" if ending in PLAIN_ENDINGS else kind_name(ending)


def _references(beside: list[Path], real: str | Path | None) -> dict[str, list[Path]]:
    """Reference volumes by subject: those of --real, else those beside the generated volumes."""
    files = beside if real is None else [p for p in nifti_files(real) if split_name(p)[1] not in MASK_ENDINGS]
    return group_by_subject([p for p in files if not SYNTHETIC.search(p.name)])


def _masks(files: list[Path], real: str | Path | None, masks: str | Path | None) -> dict[str, list[Path]]:
    if masks is None:
        nearby = [*files, *(nifti_files(real) if real is not None else [])]
        return group_by_subject([p for p in nearby if split_name(p)[1] in MASK_ENDINGS])
    given = nifti_files(masks)
    # File names in a folder of masks need not end in _dseg or the like.
    return group_by_subject([p for p in given if split_name(p)[1] in MASK_ENDINGS] or given)


def _case(
    files: list[Path],
    references: dict[str, list[Path]],
    mask_pool: dict[str, list[Path]],
    roots: list[Path],
    *,
    real: bool,
    masks: bool,
) -> Case:
    path = files[0]
    record = read_json(sidecar_path(path))
    subject = subject_of(path)
    number = _number(path)
    partners = references.get(subject, [])
    images = tuple(CaseImage(kind=_kind(f), volume=f, reference=_partner(partners, split_name(f)[1])) for f in files)
    reference = next((image.reference for image in images if image.reference is not None), None)
    mask = None if masks else _recorded_mask(path, record)
    origin: Origin = "synthetic" if number or real else "simulated" if is_simulated(path) else "volume"
    simulated = reference is not None and is_simulated(reference)
    return Case(
        subject=subject or path.name,
        number=number,
        images=images,
        origin=origin,
        reference_origin="simulated" if simulated else "real" if real else "reference",
        mask=mask or _by_name(mask_pool, record.get("mask")) or _partner(mask_pool.get(subject, []), ""),
        from_image=_from_image(path, record, roots),
        record=record,
    )


def _partner(candidates: list[Path], ending: str) -> Path | None:
    """The candidate of the same image kind, else the only one without a kind; None if it would be a guess."""
    matches = [p for p in candidates if ending and same_kind(split_name(p)[1], ending)]
    matches = matches or [p for p in candidates if not ending or split_name(p)[1] in ("", *PLAIN_ENDINGS)]
    return matches[0] if len(matches) == 1 else None


def _by_name(pool: dict[str, list[Path]], name: Any) -> Path | None:
    matches = [p for files in pool.values() for p in files if p.name == name]
    return matches[0] if len(matches) == 1 else None


def _recorded_mask(path: Path, record: dict[str, Any]) -> Path | None:
    """The mask that the sidecar names, if it still exists."""
    sources = record.get("Sources")
    for source in sources if isinstance(sources, list) else []:
        if isinstance(source, str) and Path(source).name == record.get("mask") and NIFTI_NAME.search(source):
            # Relative to the dataset.
            mask = dataset_root(path) / source
            if mask.is_file():
                return mask
    return None


def _from_image(path: Path, record: dict[str, Any], roots: list[Path]) -> FromImage | None:
    """The label that was taken from the image, with the images if they are in the folders `roots`."""
    name = record_image_label(record)
    if not name:
        return None
    sources = record.get("Sources")
    images: list[Path] = []
    for source in sources[1:] if isinstance(sources, list) else []:
        # After the mask. The sidecar is not trusted: it must not name a file elsewhere.
        image = _inside(dataset_root(path), source, roots)
        if image is None:
            return FromImage(name=name, images=())
        images.append(image)
    return FromImage(name=name, images=tuple(images))


def _inside(folder: Path, source: Any, roots: list[Path]) -> Path | None:
    """The NIfTI file `source`, relative to `folder`, if it exists and is in one of the folders `roots`."""
    if isinstance(source, str) and NIFTI_NAME.search(source):
        # ValueError: a null character.
        with suppress(OSError, ValueError):
            file = (folder / source).resolve()
            return file if file.is_file() and any(file.is_relative_to(root.resolve()) for root in roots) else None
    return None


def _images_absent(cases: list[Case]) -> list[str]:
    absent = [case for case in cases if case.mask and case.from_image is not None and not case.from_image.images]
    if not absent:
        return []
    label = absent[0].from_image
    return [
        f"{len(absent)} of {len(cases)} cases: {label.name if label else ''} was taken from the image and is not in the mask; "
        "pass --real DIR with the images to show it"
    ]


def _legend(roots: list[Path], cases: list[Case]) -> Legend:
    """Label names from the sidecars, which hold the model's contract; else from a dseg.tsv of the dataset."""
    for case in cases:
        legend = record_legend(case.record)
        if legend:
            return legend
    first = next((case.mask for case in cases if case.mask is not None), None)
    above = [] if first is None else [p / "dseg.tsv" for p in first.parents[:4]]
    for file in [*(f for root in roots for f in sorted(root.rglob("*dseg.tsv"))), *above]:
        # The names are optional: a table that cannot be read is no reason to fail.
        with suppress(InputError):
            return read_legend(file)
    return {}


def _check_matches(cases: list[Case], real: str | Path | None, masks: str | Path | None) -> None:
    """Raises InputError if a folder given by the user matches no volume."""
    example = cases[0].images[0].volume.name
    if real is not None and not any(image.reference for case in cases for image in case.images):
        raise InputError(
            f"{real}: no image of the same subject as {example}; names must start with the same subject, as in sub-01_T1w"
        )
    if masks is not None and not any(case.mask for case in cases):
        raise InputError(
            f"{masks}: no mask of the same subject as {example}; names must start with the same subject, as in sub-01_dseg"
        )


def _missing(without: list[Case], cases: list[Case], name: str, option: str) -> list[str]:
    if not without:
        return []
    subjects = list(dict.fromkeys(case.subject for case in without))
    shown = ", ".join(subjects[:4]) + (" ..." if len(subjects) > 4 else "")
    return [f"{len(without)} of {len(cases)} cases have no unique {name} ({shown}); pass {option} to name the folder"]

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
from voxtune.files import counted

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
    given = GivenFolders(roots=tuple(Path(p) for p in (masks, real, folder) if p is not None))
    files = given.nifti_files(folder)
    images = [p for p in files if split_name(p)[1] not in MASK_ENDINGS]
    synthetic = [p for p in images if SYNTHETIC.search(p.name)]
    if not images:
        if given.outside:
            raise InputError(f"{folder}: {given.warnings()[0]}")
        raise InputError(f"{folder}: no volumes ({NIFTI_ENDINGS}) in this folder; give one written by voxtune sample")
    real_files = [] if real is None else given.nifti_files(real)
    mask_files = None if masks is None else given.nifti_files(masks)
    pools = Pools(
        references=_references(images if synthetic and real is None else real_files),
        masks=_masks([*files, *real_files], mask_files),
        sources=[*files, *real_files, *(mask_files or [])],
    )
    groups = _group(synthetic or images)
    cases = [_case(group, pools, given, real=real is not None, masks=masks is not None) for group in groups[:limit]]
    _check_matches(cases, real, masks)
    warnings = given.warnings()
    warnings += [] if limit is None or len(groups) <= limit else [f"{limit} of {len(groups)} cases shown (--limit)"]
    warnings += _missing([c for c in cases if c.mask is None], cases, "mask", "--masks DIR")
    if real is not None:
        without = [c for c in cases if any(image.reference is None for image in c.images)]
        warnings += _missing(without, cases, "real volume", "--real DIR")
    warnings += _images_absent(cases)
    # `labels` may be "model", which names nothing.
    legend = ({} if labels is None else read_legend(labels)) or _legend(given, cases)
    for name in {case.from_image.name: None for case in cases if case.from_image is not None}:
        legend = with_image_label(legend, name)
    return Cases(cases=tuple(cases), legend=legend, warnings=tuple(warnings))


@dataclass(kw_only=True)
class GivenFolders:
    """The folders that the user gave. Only regular files in them are opened, after symbolic links are resolved.

    A folder of strangers must not make the page contain other files of the reader. `outside` collects what is skipped.
    """

    roots: tuple[Path, ...]
    outside: list[Path] = field(default_factory=list)

    def hold(self, file: Path) -> bool:
        # ValueError: a null character; RuntimeError: links in a circle.
        with suppress(OSError, ValueError, RuntimeError):
            full = file.resolve()
            return full.is_file() and any(full.is_relative_to(root.resolve()) for root in self.roots)
        return False

    def nifti_files(self, folder: str | Path) -> list[Path]:
        files = nifti_files(folder)
        self.outside += [file for file in files if not self.hold(file)]
        return [file for file in files if self.hold(file)]

    def warnings(self) -> list[str]:
        if not self.outside:
            return []
        return [
            f"{counted(len(self.outside), 'file')} not shown, such as {self.outside[0].name}: not a regular file in the given "
            "folders; pass the folder that a link leads to with --real or --masks"
        ]


@dataclass(frozen=True, kw_only=True)
class Pools:
    """The files in the given folders that a case is composed from: references and masks by subject, and all of them."""

    references: dict[str, list[Path]]
    masks: dict[str, list[Path]]
    sources: list[Path]


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


def _references(files: list[Path]) -> dict[str, list[Path]]:
    """Reference volumes by subject."""
    images = [p for p in files if split_name(p)[1] not in MASK_ENDINGS]
    return group_by_subject([p for p in images if not SYNTHETIC.search(p.name)])


def _masks(nearby: list[Path], given: list[Path] | None) -> dict[str, list[Path]]:
    """Masks by subject: those of --masks, else those beside the volumes."""
    files = nearby if given is None else given
    named = [p for p in files if split_name(p)[1] in MASK_ENDINGS]
    # File names in a folder of masks need not end in _dseg or the like.
    return group_by_subject(named or ([] if given is None else given))


def _case(files: list[Path], pools: Pools, given: GivenFolders, *, real: bool, masks: bool) -> Case:
    path = files[0]
    sidecar = sidecar_path(path)
    record = read_json(sidecar) if given.hold(sidecar) else {}
    subject = subject_of(path)
    number = _number(path)
    partners = pools.references.get(subject, [])
    images = tuple(CaseImage(kind=_kind(f), volume=f, reference=_partner(partners, split_name(f)[1])) for f in files)
    reference = next((image.reference for image in images if image.reference is not None), None)
    mask = None if masks else _recorded_mask(path, record, given)
    origin: Origin = "synthetic" if number or real else "simulated" if is_simulated(path) else "volume"
    simulated = reference is not None and is_simulated(reference)
    return Case(
        subject=subject or path.name,
        number=number,
        images=images,
        origin=origin,
        reference_origin="simulated" if simulated else "real" if real else "reference",
        mask=mask or _by_name(pools.masks, record.get("mask")) or _partner(pools.masks.get(subject, []), ""),
        from_image=_from_image(path, record, subject, pools, given),
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


def _recorded_mask(path: Path, record: dict[str, Any], given: GivenFolders) -> Path | None:
    """The mask that the sidecar names, if it is in the given folders."""
    sources = record.get("Sources")
    for source in sources if isinstance(sources, list) else []:
        if isinstance(source, str) and Path(source).name == record.get("mask"):
            mask = _inside(dataset_root(path), source, given)
            if mask is not None:
                return mask
    return None


def _from_image(
    path: Path, record: dict[str, Any], subject: str, pools: Pools, given: GivenFolders
) -> FromImage | None:
    """The label that was taken from the image, with the images if they are in the given folders."""
    name = record_image_label(record)
    if not name:
        return None
    sources = record.get("Sources")
    images: list[Path] = []
    for source in sources[1:] if isinstance(sources, list) else []:  # after the mask
        image = _inside(dataset_root(path), source, given) or _of_subject(pools.sources, source, subject)
        if image is None:
            return FromImage(name=name, images=())
        images.append(image)
    return FromImage(name=name, images=tuple(images))


def _inside(folder: Path, source: Any, given: GivenFolders) -> Path | None:
    """The NIfTI file `source`, relative to `folder`, if it is in the given folders: the sidecar is not trusted."""
    if isinstance(source, str) and NIFTI_NAME.search(source) and given.hold(folder / source):
        return (folder / source).resolve()
    return None


def _of_subject(files: list[Path], source: Any, subject: str) -> Path | None:
    """The only file with the name of `source`, or the only one of the subject."""
    matches = [p for p in files if isinstance(source, str) and p.name == source.rpartition("/")[2]]
    matches = matches if len(matches) == 1 else [p for p in matches if subject_of(p) == subject]
    return matches[0] if len(matches) == 1 else None


def _images_absent(cases: list[Case]) -> list[str]:
    absent = [case for case in cases if case.mask and case.from_image is not None and not case.from_image.images]
    if not absent:
        return []
    label = absent[0].from_image
    return [
        f"{len(absent)} of {len(cases)} cases: {label.name if label else ''} was taken from the image and is not in the mask; "
        "pass --real DIR with the images to show it"
    ]


def _legend(given: GivenFolders, cases: list[Case]) -> Legend:
    """Label names from the sidecars, which hold the model's contract; else from a dseg.tsv of the dataset."""
    for case in cases:
        legend = record_legend(case.record)
        if legend:
            return legend
    first = next((case.mask for case in cases if case.mask is not None), None)
    above = [] if first is None else [p / "dseg.tsv" for p in first.parents[:4]]
    below = [f for root in given.roots for f in sorted(root.rglob("*dseg.tsv")) if given.hold(f)]
    for file in [*below, *above]:
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

"""Volumes to look at, each with its reference volume, its mask and its sidecar.

Reads the folders that `voxtune sample` and `voxtune demo` write, BIDS datasets, and plain folders with matching names.
"""

from __future__ import annotations

import csv
import json
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from voxtune.data.bids import is_simulated
from voxtune.data.derivative import dataset_root, read_json, sidecar_path, subject_of
from voxtune.data.modality import MASK_ENDINGS, NIFTI_NAME, PLAIN_ENDINGS, SYNTHETIC, kind_name, same_kind, split_name
from voxtune.data.pairing import group_by_subject, nifti_files
from voxtune.errors import InputError
from voxtune.files import one_line

COLOUR = re.compile(r"#[0-9a-fA-F]{6}")

# "real" is a user's own scan, "simulated" a subject of the cohort; the origin of a plain "reference" is unknown.
Origin = Literal["synthetic", "simulated", "real", "reference", "volume"]


@dataclass(frozen=True, kw_only=True)
class LabelName:
    """Name and colour (#rrggbb, or empty) of a label."""

    name: str
    colour: str = ""


Legend = dict[int, LabelName]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One volume to look at. `note` distinguishes volumes of the same subject; `record` is the sidecar's content."""

    subject: str
    note: str
    volume: Path
    origin: Origin
    reference: Path | None
    reference_origin: Origin
    mask: Path | None
    record: dict[str, Any] = field(default_factory=dict)


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


def read_legend(path: str | Path) -> Legend:
    """Label names by value, from a dseg.tsv, a model folder or its config.json."""
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read ({one_line(error)}); give a dseg.tsv or a model folder") from None
    legend = _from_tsv(text) if file.suffix.lower() == ".tsv" else _from_contract(text)
    if not legend:
        raise InputError(f"{file}: contains no label names; give a dseg.tsv (columns index, name) or a model folder")
    return legend


def _from_record(record: dict[str, Any]) -> Legend:
    """Label names from a sidecar that `voxtune sample` wrote: {"labels": {"1": "brain"}}."""
    labels = record.get("labels")
    if not isinstance(labels, dict):
        return {}
    return {int(v): LabelName(name=str(name)) for v, name in labels.items() if _is_value(v) and str(name).strip()}


def _from_tsv(text: str) -> Legend:
    legend = {}
    for row in csv.DictReader(text.splitlines(), delimiter="\t"):
        value, name = (row.get("index") or "").strip(), (row.get("name") or "").strip()
        colour = (row.get("color") or "").strip()
        if _is_value(value) and name:
            legend[int(value)] = LabelName(name=name, colour=colour if COLOUR.fullmatch(colour) else "")
    return legend


def _from_contract(text: str) -> Legend:
    try:
        labels = json.loads(text)["data"]["labels"]
        return {int(label["value"]): LabelName(name=str(label["name"])) for label in labels}
    except (ValueError, LookupError, TypeError, RecursionError, OverflowError):
        return {}


def _is_value(text: Any) -> bool:
    return bool(re.fullmatch(r"\d{1,10}", str(text)))


def find_cases(
    folder: str | Path, *, real: str | Path | None = None, masks: str | Path | None = None, limit: int | None = None
) -> Cases:
    """Every generated volume below `folder`, or every image if none is marked as generated, with reference and mask.

    References come from the folder `real` if given, else from `folder`.
    """
    folder = Path(folder)
    if limit is not None and limit < 1:
        raise InputError(f"--limit {limit}: must be 1 or more")
    files = nifti_files(folder)
    images = [p for p in files if split_name(p)[1] not in MASK_ENDINGS]
    synthetic = [p for p in images if SYNTHETIC.search(p.name)]
    volumes = synthetic or images
    if not volumes:
        raise InputError(f"{folder}: no volumes (.nii, .nii.gz) in this folder; give one written by voxtune sample")
    references = _references(images if synthetic else [], real)
    mask_pool = _masks(files, real, masks)
    cases = [
        _case(path, references, mask_pool, real=real is not None, masks=masks is not None) for path in volumes[:limit]
    ]
    _check_matches(cases, real, masks)
    warnings = [] if limit is None or len(volumes) <= limit else [f"{limit} of {len(volumes)} cases shown (--limit)"]
    warnings += _missing(cases, "mask", "mask", "--masks DIR")
    warnings += _missing(cases, "reference", "real volume", "--real DIR") if real is not None else []
    legend = _legend([Path(p) for p in (masks, real, folder) if p is not None], cases)
    return Cases(cases=tuple(cases), legend=legend, warnings=tuple(warnings))


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
    path: Path, references: dict[str, list[Path]], mask_pool: dict[str, list[Path]], *, real: bool, masks: bool
) -> Case:
    record = read_json(sidecar_path(path))
    subject, ending = subject_of(path), split_name(path)[1]
    number = SYNTHETIC.search(path.name)
    kind = "" if ending in PLAIN_ENDINGS else kind_name(ending)
    note = " ".join(part for part in (number.group(1) if number else "", kind) if part)
    reference = _partner(references.get(subject, []), ending)
    mask = None if masks else _recorded_mask(path, record)
    origin: Origin = "synthetic" if number or real else "simulated" if is_simulated(path) else "volume"
    simulated = reference is not None and is_simulated(reference)
    return Case(
        subject=subject or path.name,
        note=note,
        volume=path,
        origin=origin,
        reference=reference,
        reference_origin="simulated" if simulated else "real" if real else "reference",
        mask=mask or _by_name(mask_pool, record.get("mask")) or _partner(mask_pool.get(subject, []), ""),
        record=record,
    )


def _partner(candidates: list[Path], ending: str) -> Path | None:
    """The candidate of the same modality, else the only one without a modality; None if it would be a guess."""
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


def _legend(roots: list[Path], cases: list[Case]) -> Legend:
    """Label names from the sidecars, which hold the model's contract; else from a dseg.tsv of the dataset."""
    for case in cases:
        legend = _from_record(case.record)
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
    example = cases[0].volume.name
    if real is not None and not any(case.reference for case in cases):
        raise InputError(
            f"{real}: no image of the same subject as {example}; names must start with the same subject, as in sub-01_T1w"
        )
    if masks is not None and not any(case.mask for case in cases):
        raise InputError(
            f"{masks}: no mask of the same subject as {example}; names must start with the same subject, as in sub-01_dseg"
        )


def _missing(cases: list[Case], field: str, name: str, option: str) -> list[str]:
    without = [case.subject for case in cases if getattr(case, field) is None]
    if not without:
        return []
    subjects = ", ".join(without[:4]) + (" ..." if len(without) > 4 else "")
    return [
        f"{len(without)} of {len(cases)} cases have no unique {name} ({subjects}); pass {option} to name the folder"
    ]

"""Synthetic volumes on disk with what belongs beside each: the real volume, the mask, the record of how it was drawn.

Folders as `voxtune sample` and `voxtune demo` write them, BIDS data sets, and plain folders with equal names.
"""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from voxtune.data.pairing import MASK_ENDINGS, NIFTI_NAME, nifti_files, same_modality, split_name
from voxtune.errors import InputError
from voxtune.files import one_line

COLOUR = re.compile(r"#[0-9a-fA-F]{6}")


@dataclass(frozen=True, kw_only=True)
class LabelName:
    """`colour` is #rrggbb; empty where the source names none."""

    name: str
    colour: str = ""


Legend = dict[int, LabelName]


def read_legend(path: str | Path) -> Legend:
    """The labels by value, from a dseg.tsv, a model's folder or its config.json."""
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read ({one_line(error)}); give a dseg.tsv or a model's folder") from None
    legend = _from_tsv(text) if file.suffix.lower() == ".tsv" else _from_contract(text)
    if not legend:
        raise InputError(f"{file}: names no label; give a dseg.tsv (columns index, name) or a model's folder")
    return legend


def legend_of_record(record: dict[str, Any]) -> Legend:
    """The labels that `voxtune sample` wrote beside a volume: {"labels": {"1": "brain"}}."""
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
    except (ValueError, LookupError, TypeError):
        return {}


def _is_value(text: Any) -> bool:
    return bool(re.fullmatch(r"\d{1,10}", str(text)))


DRAWN = re.compile(r"_desc-(synth\d+)(?=_|\.)", re.IGNORECASE)
# A sidecar is a page of JSON; what is larger is something else.
LARGEST_RECORD = 2**20


@dataclass(frozen=True, kw_only=True)
class Case:
    """One volume to look at. `note` tells it from others of the same subject."""

    subject: str
    note: str
    volume: Path
    real: Path | None
    mask: Path | None
    record: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Cases:
    """`drawn`: the volumes are known to be synthetic. `legend` holds the labels' names that were found on the way."""

    cases: tuple[Case, ...]
    drawn: bool
    legend: Legend
    warnings: tuple[str, ...]


def find_cases(
    folder: str | Path, *, real: str | Path | None = None, masks: str | Path | None = None, limit: int | None = None
) -> Cases:
    """Every synthetic volume below `folder`, or every image where none is marked as synthetic, with its partners."""
    folder = Path(folder)
    if limit is not None and limit < 1:
        raise InputError(f"--limit {limit}: show one case or more")
    files = nifti_files(folder)
    images = [p for p in files if split_name(p)[1] not in MASK_ENDINGS]
    drawn = [p for p in images if DRAWN.search(p.name)]
    volumes = drawn or images
    if not volumes:
        raise InputError(f"{folder}: no volumes (.nii, .nii.gz) below this folder; give one that voxtune sample wrote")
    reals = _reals(images if drawn else [], real)
    pool = _masks(files, real, masks)
    cases = [_case(path, reals, pool, chosen=masks is not None) for path in volumes[:limit]]
    _refuse_strangers(cases, real, masks)
    warnings = [] if limit is None or len(volumes) <= limit else [f"{limit} of {len(volumes)} cases shown (--limit)"]
    warnings += _lacking(cases, "mask", "--masks DIR")
    warnings += _lacking(cases, "real", "--real DIR") if real is not None else []
    legend = _legend([Path(p) for p in (masks, real, folder) if p is not None], cases)
    return Cases(cases=tuple(cases), drawn=bool(drawn) or real is not None, legend=legend, warnings=tuple(warnings))


def _reals(beside: list[Path], real: str | Path | None) -> dict[str, list[Path]]:
    """Real volumes by subject: those of --real, else those that lie beside the synthetic ones."""
    files = beside if real is None else [p for p in nifti_files(real) if split_name(p)[1] not in MASK_ENDINGS]
    return _by_subject([p for p in files if not DRAWN.search(p.name)])


def _masks(files: list[Path], real: str | Path | None, masks: str | Path | None) -> dict[str, list[Path]]:
    if masks is None:
        around = [*files, *(nifti_files(real) if real is not None else [])]
        return _by_subject([p for p in around if split_name(p)[1] in MASK_ENDINGS])
    given = nifti_files(masks)
    # A folder of masks need not call each of them so.
    return _by_subject([p for p in given if split_name(p)[1] in MASK_ENDINGS] or given)


def _by_subject(files: list[Path]) -> dict[str, list[Path]]:
    subjects = defaultdict(list)
    for path in files:
        subjects[split_name(path)[0]].append(path)
    return subjects


def _case(path: Path, reals: dict[str, list[Path]], pool: dict[str, list[Path]], *, chosen: bool) -> Case:
    record = read_record(path)
    subject, ending = split_name(path)
    number = DRAWN.search(path.name)
    # As the file spells it: T1w, not t1w.
    spelt = NIFTI_NAME.sub("", path.name)[-len(ending) :] if ending else ""
    note = " ".join(part for part in (number.group(1) if number else "", spelt) if part)
    mask = None if chosen else _from_record(path, record)
    return Case(
        subject=subject or path.name,
        note=note,
        volume=path,
        real=_partner(reals.get(subject, []), ending),
        mask=mask or _named(pool, record.get("mask")) or _partner(pool.get(subject, []), ""),
        record=record,
    )


def _partner(candidates: list[Path], ending: str) -> Path | None:
    """The one of the same modality, else the only one of none; nothing where it would be a guess."""
    alike = [p for p in candidates if ending and same_modality(split_name(p)[1], ending)]
    found = alike or [p for p in candidates if not ending or split_name(p)[1] in ("", "image", "img")]
    return found[0] if len(found) == 1 else None


def _named(pool: dict[str, list[Path]], name: Any) -> Path | None:
    found = [p for files in pool.values() for p in files if p.name == name]
    return found[0] if len(found) == 1 else None


def _from_record(path: Path, record: dict[str, Any]) -> Path | None:
    """The mask that the sidecar points to, where it still lies there."""
    sources = record.get("Sources")
    for source in sources if isinstance(sources, list) else []:
        if isinstance(source, str) and Path(source).name == record.get("mask") and NIFTI_NAME.search(source):
            found = path.parent / source
            if found.is_file():
                return found
    return None


def read_record(path: Path) -> dict[str, Any]:
    """The sidecar of a volume; empty where there is none that can be read."""
    sidecar = path.with_name(NIFTI_NAME.sub(".json", path.name))
    try:
        if sidecar.stat().st_size > LARGEST_RECORD:
            return {}
        record = json.loads(sidecar.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _legend(roots: list[Path], cases: list[Case]) -> Legend:
    """Names from the sidecars, which hold the model's contract; then from the dseg.tsv of the data set."""
    for case in cases:
        found = legend_of_record(case.record)
        if found:
            return found
    first = next((case.mask for case in cases if case.mask is not None), None)
    above = [] if first is None else [p / "dseg.tsv" for p in first.parents[:4]]
    for file in [*(f for root in roots for f in sorted(root.rglob("*dseg.tsv"))), *above]:
        # A table found on the way is a help; one that cannot be read is no reason to show nothing.
        with suppress(InputError):
            return read_legend(file)
    return {}


def _refuse_strangers(cases: list[Case], real: str | Path | None, masks: str | Path | None) -> None:
    """Folders that were named on purpose and fit nothing are a mistake."""
    example = cases[0].volume.name
    if real is not None and not any(case.real for case in cases):
        raise InputError(f"{real}: no image of the same subject as {example}; names must start alike, as in sub-01_T1w")
    if masks is not None and not any(case.mask for case in cases):
        raise InputError(
            f"{masks}: no mask of the same subject as {example}; names must start alike, as in sub-01_dseg"
        )


def _lacking(cases: list[Case], what: str, option: str) -> list[str]:
    without = [case.subject for case in cases if getattr(case, what) is None]
    if not without:
        return []
    named = ", ".join(without[:4]) + (" ..." if len(without) > 4 else "")
    thing = "mask" if what == "mask" else "real volume"
    return [f"{len(without)} of {len(cases)} cases have no single {thing} ({named}); {option} says where to look"]

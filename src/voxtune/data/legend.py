"""The labels of a mask in files: names, colours and kinds, and which of them to look at first.

Read from the sidecar of a generated volume, or from what --labels accepts; of a dseg.tsv also colours and kinds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from voxtune.data.contract import DataContract, Kind, Label, check_count
from voxtune.data.labels import BACKGROUND, IMAGE, MAX_FILE_BYTES, MAX_NAME, LabelEntry, parse_labels
from voxtune.errors import InputError
from voxtune.reading import read_text, reading, tsv_rows

COLOUR = re.compile(r"#[0-9a-fA-F]{6}")
# Of the largest area that three slices can show.
ENOUGH = 0.95
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True)
class LabelName:
    """Name and colour (#rrggbb, or empty) of a label value. Without a `role`, its kind follows from the name."""

    name: str
    colour: str = ""
    role: Kind | None = None

    @property
    def kind(self) -> Kind:
        return Label(name=self.name, value=1, channel=0, role=self.role).kind


Legend = dict[int, LabelName]


def contract_legend(contract: DataContract) -> Legend:
    """The label names of a model by value."""
    return _of_labels(contract.ordered)


def record_legend(record: dict[str, Any]) -> Legend:
    """The legend of a sidecar: {"labels": {"1": "brain"}}, or "mask_labels" of a mask whose values were mapped."""
    names = record.get("mask_labels", record.get("labels"))
    if not isinstance(names, dict):
        return {}
    return {int(v): LabelName(name=str(name)) for v, name in names.items() if _is_value(v) and str(name).strip()}


def record_image_label(record: dict[str, Any]) -> str:
    """The label that was taken from the subject's image, according to a sidecar; empty if none was."""
    names = record.get("mask_labels")
    name = names.get(IMAGE) if isinstance(names, dict) else None
    return name if isinstance(name, str) and name.strip() and name.isprintable() and len(name) <= MAX_NAME else ""


def with_image_label(legend: Legend, name: str) -> Legend:
    """With a value for a label that the masks lack, because it was taken from the image."""
    return legend if values_named(legend, name) else {**legend, max(legend, default=0) + 1: LabelName(name=name)}


def values_named(legend: Legend, name: str) -> tuple[int, ...]:
    return tuple(value for value, label in legend.items() if label.name == name)


def read_legend(source: str | Path) -> Legend:
    """The legend of a dseg.tsv, a model folder or its config.json, or of a text such as "tumour=1,4; oedema=2".

    Names that share a value are joined.
    """
    path = Path(source)
    if path.suffix.lower() != ".tsv":
        labels = parse_labels(str(source))
        return {v: LabelName(name=BACKGROUND) for v in labels.background} | _of_labels(labels.entries)
    with reading(path, "table of labels", fix="give a dseg.tsv or a model folder"):
        legend = _from_tsv(read_text(path, limit=MAX_FILE_BYTES, what="table of labels"))
    if not legend:
        raise InputError(f"{path}: contains no label names; a dseg.tsv has the columns index and name")
    return legend


def _from_tsv(text: str) -> Legend:
    """The columns index, name and color are those of BIDS; `role` (organ, pathology, other) is optional."""
    rows = []
    for row in tsv_rows(text):
        value, name, colour, role = (row.get(column, "").strip() for column in ("index", "name", "color", "role"))
        if _is_value(value) and name:
            colour = colour if COLOUR.fullmatch(colour) else ""
            rows.append((int(value), LabelName(name=name, colour=colour, role=_role(role))))
    return _join(rows)


def _of_labels(labels: Iterable[Label | LabelEntry]) -> Legend:
    return _join((value, LabelName(name=n.name, role=n.role)) for n in labels for value in n.values)


def _join(rows: Iterable[tuple[int, LabelName]]) -> Legend:
    """One label for each value: a value of several labels has all names, and is a pathology if one of them is."""
    labels: dict[int, dict[str, LabelName]] = {}
    for count, (value, label) in enumerate(rows, 1):
        check_count(count)
        labels.setdefault(value, {}).setdefault(label.name, label)
    return {value: _joined(list(names.values())) for value, names in labels.items()}


def _joined(labels: list[LabelName]) -> LabelName:
    if len(labels) == 1:
        return labels[0]
    role: Kind | None = "pathology" if any(label.kind == "pathology" for label in labels) else None
    colour = next((label.colour for label in labels if label.colour), "")
    return LabelName(name=" + ".join(label.name for label in labels), colour=colour, role=role)


def _role(text: Any) -> Kind | None:
    return next((kind for kind in KINDS if kind == text), None)


def _is_value(text: Any) -> bool:
    return bool(re.fullmatch(r"\d{1,10}", str(text)))


def first_labels(mask: np.ndarray, legend: Legend) -> tuple[int, ...]:
    """The values to look at first: the pathologies in the mask, else the label with the fewest voxels."""
    values, counts = np.unique(mask, return_counts=True)
    present = {int(value): int(count) for value, count in zip(values, counts, strict=True) if value > 0}
    pathologies = tuple(value for value in present if value in legend and legend[value].kind == "pathology")
    return pathologies or tuple(sorted(present, key=lambda value: (present[value], -value))[:1])


def first_voxel(mask: np.ndarray, legend: Legend) -> tuple[int, int, int]:
    """The voxel to look at first: in the midst of `first_labels`, or of the volume if the mask is empty."""
    x, y, z = centre_of(mask, first_labels(mask, legend)) or tuple(n // 2 for n in mask.shape)
    return x, y, z


def centre_of(mask: np.ndarray, values: Sequence[int]) -> tuple[int, ...] | None:
    """The voxel with one of these values through which the slices of all axes show most of them; None without any."""
    voxels = np.argwhere(np.isin(mask, values)) if len(values) else np.empty((0, 3), int)
    if not len(voxels):
        return None
    area = sum(np.bincount(axis, minlength=n)[axis] for axis, n in zip(voxels.T, mask.shape, strict=True))
    # Nearly the most is enough, so that a stray voxel does not move the slices to the lesion's edge.
    best = voxels[area >= ENOUGH * np.max(area)]
    nearest = np.abs(best - np.median(best, axis=0)).sum(axis=1).argmin()
    return tuple(int(n) for n in best[nearest])

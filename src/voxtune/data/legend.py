"""The labels of a mask in files: names, colours and kinds, and which of them to look at first.

Read from the sidecar of a generated volume, a dseg.tsv, or a model folder.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from voxtune.data.contract import DataContract, Kind, Label
from voxtune.errors import InputError
from voxtune.files import one_line

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
    return _join((value, LabelName(name=n.name, role=n.kind)) for n in contract.labels for value in n.values)


def legend_record(legend: Legend) -> dict[str, dict[str, str]]:
    """The legend as entries of a sidecar, which `record_legend` reads."""
    names = {str(value): label.name for value, label in sorted(legend.items())}
    return {"labels": names, "label_kinds": {str(value): label.kind for value, label in sorted(legend.items())}}


def record_legend(record: dict[str, Any]) -> Legend:
    """The legend of a sidecar: {"labels": {"1": "brain"}}, and since version 0.2 {"label_kinds": {"1": "organ"}}."""
    names, kinds = record.get("labels"), record.get("label_kinds")
    if not isinstance(names, dict):
        return {}
    kinds = kinds if isinstance(kinds, dict) else {}
    return {
        int(value): LabelName(name=str(name), role=_role(kinds.get(value)))
        for value, name in names.items()
        if _is_value(value) and str(name).strip()
    }


def read_legend(path: str | Path) -> Legend:
    """The legend of a dseg.tsv, a model folder or its config.json. Names that share a value are joined."""
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read ({one_line(error)}); give a dseg.tsv or a model folder") from None
    legend = _from_tsv(text) if file.suffix.lower() == ".tsv" else _from_config(text)
    if not legend:
        raise InputError(f"{file}: contains no label names; give a dseg.tsv (columns index, name) or a model folder")
    return legend


def _from_tsv(text: str) -> Legend:
    """The columns index, name and color are those of BIDS; `role` (organ, pathology, other) is optional."""
    rows = []
    for row in csv.DictReader(text.splitlines(), delimiter="\t"):
        value, name = (row.get("index") or "").strip(), (row.get("name") or "").strip()
        colour = (row.get("color") or "").strip()
        if _is_value(value) and name:
            colour = colour if COLOUR.fullmatch(colour) else ""
            rows.append((int(value), LabelName(name=name, colour=colour, role=_role((row.get("role") or "").strip()))))
    return _join(rows)


def _from_config(text: str) -> Legend:
    try:
        labels = json.loads(text)["data"]["labels"]
        return _join(
            (int(value), LabelName(name=str(label["name"]), role=_role(label.get("role"))))
            for label in labels
            for value in (label["value"], *(label.get("more_values") or ()))
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
        return {}


def _join(rows: Iterable[tuple[int, LabelName]]) -> Legend:
    """One label for each value: a value of several labels has all names, and is a pathology if one of them is."""
    legend: Legend = {}
    for value, label in rows:
        first = legend.get(value)
        if first is None:
            legend[value] = label
        elif label.name not in first.name.split(" + "):
            role: Kind | None = "pathology" if "pathology" in (first.kind, label.kind) else None
            legend[value] = LabelName(
                name=f"{first.name} + {label.name}", colour=first.colour or label.colour, role=role
            )
    return legend


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

"""What the labels of a mask are called, from where people keep it: a BIDS dseg.tsv, a model's contract, a sidecar."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

"""A table of steps that was made before, and what of it other subjects have to confirm."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from voxtune.config import from_mapping
from voxtune.errors import InputError
from voxtune.quality.table import FORMAT
from voxtune.runtime.model import Model
from voxtune.runtime.sampling import Drawing
from voxtune.runtime.storage import read_json


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """`ways` are the row it chose and what is not worse in more of the same steps. `seen` subjects came before its last."""

    file: str
    sha256: str
    chosen: str
    margin: float
    subjects: int
    seen: int
    ways: tuple[Drawing, ...]

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("file", "sha256", "chosen", "margin", "subjects")}


def read_earlier(path: Path, model: Model, model_sha256: str | None) -> Earlier:
    """The table in `path`; refuses one of another model, or one that chose nothing."""
    found = read_json(path)
    if not isinstance(found, dict) or found.get("format") != FORMAT or found.get("table") != "steps":
        raise InputError(f"{path}: not a table that voxtune steps wrote; give its steps.json")
    if found.get("model_sha256") != model_sha256:
        raise InputError(f"{path}: was made with other weights than this model's; make the table anew")
    if found.get("chosen") is None:
        raise InputError(f"{path}: chose nothing, so there is nothing to confirm")
    try:
        chosen = next(row for row in found["rows"] if row["name"] == found["chosen"])
        alike = [row for row in found["rows"] if _more_of(chosen, row)]
        ways = tuple(_way(model, row, path) for row in [chosen, *sorted(alike, key=lambda row: int(row["steps"]))])
        numbers = {name: int(found[name]) for name in ("subjects", "skip")}
        margin = float(found["margin"])
    except (KeyError, TypeError, ValueError, StopIteration) as error:
        raise InputError(f"{path}: damaged ({type(error).__name__}: {error}); make the table anew") from None
    if min(numbers.values()) < 0:
        raise InputError(f"{path}: damaged: {numbers}; make the table anew")
    return Earlier(
        file=path.name,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        chosen=str(chosen["name"]),
        margin=margin,
        subjects=numbers["subjects"],
        seen=numbers["skip"] + numbers["subjects"],
        ways=ways,
    )


def _more_of(chosen: dict[str, Any], row: dict[str, Any]) -> bool:
    """Whether a row is not worse and the chosen one in more steps; or in any, without the features that it keeps."""
    same = all(row[name] == chosen[name] for name in ("sampler", "spacing", "clip"))
    passed = row["verdict"] == "not worse" and row["seed"] == chosen["seed"] and "cache" not in row
    return same and passed and ("cache" in chosen or row["steps"] > chosen["steps"])


def _way(model: Model, row: dict[str, Any], path: Path) -> Drawing:
    told = {name: row[name] for name in ("sampler", "steps", "spacing", "clip", "cache") if name in row}
    how = from_mapping(Drawing, told, f"{path}: damaged: row {row['name']}")
    return model.check_request(**{name: getattr(how, name) for name in told}, seed=0)

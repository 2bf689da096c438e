"""A plan: named passes with options, what it was made for, and the evidence that it passed the gate. Stored as JSON."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from voxtune.errors import InputError
from voxtune.files import write_file
from voxtune.reading import read_json

log = logging.getLogger("voxtune")
FORMAT = "voxtune-plan/1"


@dataclass(frozen=True)
class Step:
    """One pass of a plan."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """`made_for` identifies the model, inputs, device and versions that `evidence` was measured on; both may be empty."""

    steps: tuple[Step, ...]
    made_for: dict[str, Any] = field(default_factory=dict)
    evidence: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from voxtune.plan.passes import check_names

        check_names([s.name for s in self.steps])

    @classmethod
    def of(cls, *names: str) -> Plan:
        return cls(tuple(Step(n) for n in names))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(s.name for s in self.steps)

    def options(self, name: str) -> dict[str, Any]:
        return next((s.options for s in self.steps if s.name == name), {})

    def without(self, *names: str) -> Plan:
        return Plan(tuple(s for s in self.steps if s.name not in names), self.made_for, {})

    def to_json(self) -> dict[str, Any]:
        steps = [{"pass": s.name, **({"options": s.options} if s.options else {})} for s in self.steps]
        content = {"passes": steps, "made_for": self.made_for, "evidence": _finite(self.evidence)}
        return {"format": FORMAT, **content, "hash": _hash(content)}

    @classmethod
    def from_json(cls, data: Any, where: str) -> Plan:
        """A plan without its evidence, if the passes, what it was made for or the evidence were edited."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            given = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise InputError(f"{where}: expected a plan of format {FORMAT!r}, got {given!r}")
        unknown = set(data) - {"format", "passes", "made_for", "evidence", "hash"}
        if unknown:
            raise InputError(f"{where}: unknown entry {sorted(unknown)[0]!r}")
        passes = data.get("passes")
        if not isinstance(passes, list):
            raise InputError(f"{where}: passes must be a list, got {type(passes).__name__}")
        try:
            steps = tuple(_step(entry) for entry in passes)
            rest = {key: _mapping(data.get(key, {}), key) for key in ("made_for", "evidence")}
            plan = cls(steps, rest["made_for"], rest["evidence"])
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        if plan.evidence and data.get("hash") != _hash(data):
            log.info("%s: ignoring its evidence, because it is not that of these passes", where)
            return cls(plan.steps, plan.made_for, {})
        return plan

    def save(self, path: Path, *, overwrite: bool = False) -> None:
        write_file(path, (json.dumps(self.to_json(), indent=2) + "\n").encode(), overwrite=overwrite)

    @classmethod
    def load(cls, path: Path) -> Plan:
        return cls.from_json(read_json(path), str(path))


def _hash(data: dict[str, Any]) -> str:
    """Binds the evidence to the passes with their options, and to the network, the inputs and the card."""
    content = {name: data.get(name) for name in ("passes", "made_for", "evidence")}
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def _finite(value: Any) -> Any:
    """For JSON, which has no infinity: None stands for the PSNR of equal tensors and for the error of NaN."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _step(entry: Any) -> Step:
    if isinstance(entry, str):
        return Step(entry)
    if not isinstance(entry, dict) or not isinstance(entry.get("pass"), str):
        raise InputError(f"a pass must be a name or an object with 'pass' and 'options', got {entry!r}")
    extra: Iterable[str] = set(entry) - {"pass", "options"}
    if extra:
        raise InputError(f"pass {entry['pass']!r}: unknown entry {sorted(extra)[0]!r}")
    return Step(entry["pass"], _mapping(entry.get("options", {}), f"options of pass {entry['pass']!r}"))


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{name} must be an object, got {type(value).__name__}")
    return value

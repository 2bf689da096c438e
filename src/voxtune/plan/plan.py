"""A plan: named passes with options, what it was made for, and the evidence that it passed the gate. Stored as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from voxtune.errors import InputError
from voxtune.files import write_file
from voxtune.reading import read_json

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
        return {"format": FORMAT, "passes": steps, "made_for": self.made_for, "evidence": self.evidence}

    @classmethod
    def from_json(cls, data: Any, where: str) -> Plan:
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            given = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise InputError(f"{where}: expected a plan of format {FORMAT!r}, got {given!r}")
        unknown = set(data) - {"format", "passes", "made_for", "evidence"}
        if unknown:
            raise InputError(f"{where}: unknown entry {sorted(unknown)[0]!r}")
        passes = data.get("passes")
        if not isinstance(passes, list):
            raise InputError(f"{where}: passes must be a list, got {type(passes).__name__}")
        try:
            steps = tuple(_step(entry) for entry in passes)
            rest = {key: _mapping(data.get(key, {}), key) for key in ("made_for", "evidence")}
            return cls(steps, rest["made_for"], rest["evidence"])
        except InputError as error:
            raise InputError(f"{where}: {error}") from None

    def save(self, path: Path, *, overwrite: bool = False) -> None:
        write_file(path, (json.dumps(self.to_json(), indent=2) + "\n").encode(), overwrite=overwrite)

    @classmethod
    def load(cls, path: Path) -> Plan:
        return cls.from_json(read_json(path), str(path))


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

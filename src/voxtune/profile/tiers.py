"""One tier of counters, from Nsight Compute's pages into the session: values, what was reached, what is missing."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from voxtune.profile.counters import Carried, Identity, carry_few, carry_full, carry_opcodes
from voxtune.profile.ncucsv import CountedLaunch, read_raw, read_rules
from voxtune.profile.session import Session, frame

COUNTER_TIERS = ("few", "full", "opcodes")
# Share of the kernels' time from which a tier counts as done.
_WANTED = {"few": 0.9999, "full": 0.99, "opcodes": 0.90}


@dataclass(kw_only=True)
class Reading:
    """What a tier's turn left: its pages, the metrics behind the columns, and what the worker told."""

    tier: str
    columns: dict[str, str]
    raw: str
    details: str | None = None
    unknown: list[str] = field(default_factory=list)
    told: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def keep(self, folder: Path) -> None:
        """Writes it down, so that the session can be made again without a GPU."""
        folder.mkdir(parents=True, exist_ok=True)
        rest = {k: v for k, v in vars(self).items() if k not in ("raw", "details")}
        (folder / f"{self.tier}.json").write_text(json.dumps(rest, indent=1))
        (folder / f"{self.tier}-raw.csv.gz").write_bytes(gzip.compress(self.raw.encode(), 6))
        if self.details is not None:
            (folder / f"{self.tier}-details.csv.gz").write_bytes(gzip.compress(self.details.encode(), 6))

    @classmethod
    def kept(cls, folder: Path, tier: str) -> Reading:
        details = folder / f"{tier}-details.csv.gz"
        return cls(
            **json.loads((folder / f"{tier}.json").read_text()),
            raw=gzip.decompress((folder / f"{tier}-raw.csv.gz").read_bytes()).decode(),
            details=gzip.decompress(details.read_bytes()).decode() if details.exists() else None,
        )


def carry(session: Session, reading: Reading, called: dict[int, Identity]) -> tuple[str, dict[int, Identity]]:
    """Fills the session in place; gives a line on it and, after the few, what each row is called by Nsight Compute."""
    tier = reading.tier
    counted = read_raw(reading.raw, reading.columns)
    if reading.details is not None:
        _add_rules(counted, reading.details)
    if tier == "few":
        carried, called = carry_few(session, counted)
    else:
        carried, matched = carry_full(session, counted, called)
        if tier == "opcodes":
            carry_opcodes(session, matched)
    why = _why(reading, carried)
    passes = max((c.passes for c in counted if c.passes), default=None)
    session.meta["tiers"][tier] = {
        "done": why is None,
        "why": why,
        **carried.describe(),
        "seconds": round(reading.seconds, 1),
        "counting_s": reading.told.get("counting_s"),
        "passes": passes,
        "unknown_metrics": reading.unknown,
    }
    _add_timing(session, reading)
    line = (
        f"{tier}: counters on {carried.matched} of {carried.launches} launches, {100 * carried.time_share:.2f} % of kernel "
        f"time; {len(counted)} read in {passes} passes each{f' ({why})' if why else ''}"
    )
    return line, called


def _add_rules(counted: Sequence[CountedLaunch], details: str) -> None:
    rules = read_rules(details)
    for launch in counted:
        if launch.number in rules:
            launch.values["est_speedup_pct"], launch.values["est_rule"] = rules[launch.number]


def _add_timing(session: Session, reading: Reading) -> None:
    """What a step took under the counters; operators run alone are no step."""
    seconds = reading.told.get("counting_s")
    if reading.tier == "few" and seconds is not None:
        row = frame([{"tier": "few", "repeat": 0, "step_ms": 1e3 * seconds}], "timings")
        session.timings = pd.concat([session.timings, row], ignore_index=True)


def _why(reading: Reading, carried: Carried) -> str | None:
    """What is missing of a tier that was read; None when it is whole."""
    reasons = []
    if reading.told.get("interrupted"):
        reasons.append("it was interrupted")
    elif reading.told.get("expired"):
        reasons.append("its time ran out")
    elif not reading.told:
        reasons.append("its worker did not end well")
    failed = reading.told.get("failed")
    if failed and carried.time_share < _WANTED[reading.tier]:
        reasons.append(f"{len(failed)} operators did not run alone, such as: {next(iter(failed.values()))}")
    if carried.time_share < _WANTED[reading.tier]:
        reasons.append(f"counters cover {100 * carried.time_share:.1f} % of kernel time")
    if reading.unknown:
        reasons.append(f"this version of Nsight Compute has no metric for {', '.join(reading.unknown)}")
    return "; ".join(reasons) or None

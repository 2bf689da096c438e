"""Carries counters from Nsight Compute's launches to the launches of the census.

The few counters were read on every launch of one step: they are carried launch by launch, in order. The full set was
read once for each distinct launch: it is carried to all its likes. What does not match stays null and is counted.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from voxtune.profile.align import Key, align, launch_key
from voxtune.profile.ncu import CountedLaunch, read_raw, read_rules
from voxtune.profile.session import Session, frame

Identity = tuple[str, str, str]
# An operator run alone finds other caches than in its step: wider than what tells classes of launches apart.
_ALIKE_FACTOR, _ALIKE_US = 1.6, 4.0


@dataclass
class Carried:
    """How much of what was read found its place."""

    read: int
    matched: int
    launches: int
    time_share: float

    def describe(self) -> dict[str, Any]:
        return {
            "read": self.read,
            "matched": self.matched,
            "launches": self.launches,
            "time_share": round(self.time_share, 5),
        }


def kernel_rows(session: Session, step: int) -> pd.DataFrame:
    launches = session.launches
    return launches[(launches["step"] == step) & (launches["kind"] == "kernel")]


def keys(rows: pd.DataFrame) -> list[Key]:
    return [
        launch_key(name, None if pd.isna(grid) else grid, None if pd.isna(block) else block)
        for name, grid, block in zip(rows["name"], rows["grid"], rows["block"], strict=True)
    ]


def carry_few(session: Session, counted: Sequence[CountedLaunch]) -> tuple[Carried, dict[int, Identity]]:
    """Fills the few counters in place. Also gives, for each matched row, what Nsight Compute calls that launch."""
    called: dict[int, Identity] = {}
    for step in sorted(set(session.launches["step"].dropna())):
        rows = kernel_rows(session, step)
        places = align(keys(rows), [c.key for c in counted])
        matched = {row: counted[place] for row, place in zip(rows.index, places, strict=True) if place is not None}
        _write(session.launches, matched, tier="few")
        called |= {row: launch.identity for row, launch in matched.items()}
    return _carried(session, len(counted), called), called


def carry_full(
    session: Session, counted: Sequence[CountedLaunch], called: dict[int, Identity]
) -> tuple[Carried, dict[int, CountedLaunch]]:
    """Fills the full counters in place, on each launch like one that was read: same kernel and grid, alike in time."""
    by_identity: dict[Identity, list[CountedLaunch]] = {}
    for launch in counted:
        by_identity.setdefault(launch.identity, []).append(launch)
    names = called or _names_by_key(session, counted)
    rows = session.launches
    times = rows["ncu_time_us"].fillna(rows["duration_us"]).to_dict()
    nearest = {row: _nearest(by_identity.get(name, ()), times[row]) for row, name in names.items()}
    matched = {row: launch for row, launch in nearest.items() if launch is not None}
    _write(session.launches, matched, tier="full")
    return _carried(session, len(counted), matched), matched


def _nearest(candidates: Sequence[CountedLaunch], time_us: float) -> CountedLaunch | None:
    """The one closest in time, if it is close at all: one grid may stand for tensors of very different size."""
    timed = [c for c in candidates if c.time_us]
    if not timed:
        return candidates[0] if candidates else None
    best = min(timed, key=lambda c: abs(math.log((c.time_us or 1.0) / max(time_us, 1e-3))))
    low, high = sorted((best.time_us or 0.0, time_us))
    return best if high <= max(_ALIKE_FACTOR * low, low + _ALIKE_US) else None


def carry_opcodes(session: Session, matched: dict[int, CountedLaunch]) -> None:
    """The opcode table, under the census's own names: a mean launch of each name, grid and block.

    Launches of one grid may differ in work: each takes the mix of the one it is like, scaled to its own instructions.
    """
    launches = session.launches
    sums: dict[tuple[Any, ...], dict[str, float]] = {}
    times: dict[tuple[Any, ...], int] = {}
    columns = (launches.loc[list(matched), c] for c in ("name", "grid", "block", "instructions"))
    for launch, name, grid, block, own in zip(matched.values(), *columns, strict=True):
        whole = sum(launch.opcodes.values())
        if not whole:
            continue
        scale = 1.0 if pd.isna(own) else float(own) / whole
        key = (name, grid, block)
        times[key] = times.get(key, 0) + 1
        mix = sums.setdefault(key, {})
        for opcode, executed in launch.opcodes.items():
            mix[opcode] = mix.get(opcode, 0.0) + scale * executed
    rows = [
        {"name": key[0], "grid": key[1], "block": key[2], "opcode": opcode, "executed": executed / times[key]}
        for key, mix in sums.items()
        for opcode, executed in mix.items()
    ]
    session.opcodes = frame(rows, "opcodes")


def _names_by_key(session: Session, counted: Sequence[CountedLaunch]) -> dict[int, Identity]:
    """Without the few counters' order: only where function, grid and block leave no choice on either side."""
    ours: dict[Key, set[str]] = {}
    kernels = session.launches[session.launches["kind"] == "kernel"]
    of_row = dict(zip(kernels.index, keys(kernels), strict=True))
    for row, key in of_row.items():
        ours.setdefault(key, set()).add(kernels.loc[row, "name"])
    theirs: dict[Key, set[Identity]] = {}
    for launch in counted:
        theirs.setdefault(launch.key, set()).add(launch.identity)
    return {
        row: next(iter(theirs[key]))
        for row, key in of_row.items()
        if len(ours[key]) == 1 and len(theirs.get(key, ())) == 1
    }


def _write(launches: pd.DataFrame, matched: dict[int, CountedLaunch], *, tier: str) -> None:
    columns = {name for launch in matched.values() for name in launch.values}
    for column in columns:
        told = {row: launch.values[column] for row, launch in matched.items() if column in launch.values}
        launches.loc[list(told), column] = list(told.values())
    launches.loc[list(matched), "counter_tier"] = tier


def _carried(session: Session, read: int, matched: dict[int, Any]) -> Carried:
    kernels = session.launches[session.launches["kind"] == "kernel"]
    total = float(kernels["duration_us"].sum())
    share = float(kernels.loc[list(matched), "duration_us"].sum()) / total if total else 0.0
    return Carried(read, len(matched), len(kernels), share)


def prove_precision(session: Session, *, claims_fp32: bool) -> dict[str, Any]:
    """Whether the step computed in FP32 alone, by counters: no launch may have kept a tensor core busy.

    `holds` is None where too little was counted to say.
    """
    kernels = session.launches[session.launches["kind"] == "kernel"]
    busy = kernels["tensor_pct"].fillna(0) > 0
    # Where a version knows only the plain tensor metric, it counts HFMA2.MMA too: then the instructions decide.
    if kernels["inst_hmma"].notna().any():
        busy &= ~((kernels["inst_hmma"] == 0) & (kernels["inst_gmma"].fillna(0) == 0)).fillna(False)
    counted = kernels["tensor_pct"].notna()
    total = float(kernels["duration_us"].sum())
    share = float(kernels.loc[counted, "duration_us"].sum()) / total if total else 0.0
    found = bool(busy.any())
    proof: dict[str, Any] = {
        "claim": "fp32" if claims_fp32 else None,
        "holds": None,
        "by": "tensor_pct",
        "launches_counted": int(counted.sum()),
        "launches": len(kernels),
        "time_share": round(share, 5),
        "tensor_launches": int(busy.sum()),
        "tensor_time_share": round(float(kernels.loc[busy, "duration_us"].sum()) / total, 5) if total else 0.0,
        "tensor_kernels": sorted(set(kernels.loc[busy, "name"]))[:10],
    }
    if claims_fp32 and (found or share > 0.999):
        proof["holds"] = not found
    return proof


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

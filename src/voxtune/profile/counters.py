"""Assigns the counters read by Nsight Compute to the launches of the census.

The few counters were read on every launch of one step and are assigned launch by launch, in order. The full set was
read once per distinct launch and is assigned to all launches like it. Launches without a match stay null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from voxtune.errors import optional_import
from voxtune.files import recorded_values, write_file
from voxtune.marks import marked_gzip
from voxtune.profile.align import Key, align, launch_key
from voxtune.profile.ncu import CountedLaunch, page_memory, raw_files, read_raw, read_rules, recorded_page
from voxtune.profile.session import Session, frame
from voxtune.reading import check_memory, gunzip, read_json, reading

with optional_import("profiling"):
    import pandas as pd

Identity = tuple[str, str, str]
# Times within this factor, or this many microseconds, count as equal. Wider than in `align`: an isolated operator finds
# the caches in another state.
_SIMILAR_FACTOR, _SIMILAR_US = 1.6, 4.0
# Utilisation of the tensor pipes, in %, up to which a launch ran no matrix product: FP32 kernels of a few microseconds read 0.01.
TENSOR_PCT = 0.1


@dataclass
class Assignment:
    """How many of the counted launches were matched, and the share of kernel time that they cover."""

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


def assign_few(session: Session, counted: Sequence[CountedLaunch]) -> tuple[Assignment, dict[int, Identity]]:
    """Fills the few counters in place. Also returns Nsight Compute's identity of each matched row."""
    identities: dict[int, Identity] = {}
    for step in sorted(set(session.launches["step"].dropna())):
        rows = kernel_rows(session, step)
        places = align(keys(rows), [c.key for c in counted])
        matched = {row: counted[place] for row, place in zip(rows.index, places, strict=True) if place is not None}
        _write(session.launches, matched, tier="few")
        identities |= {row: launch.identity for row, launch in matched.items()}
    return _assignment(session, len(counted), identities), identities


def assign_full(
    session: Session, counted: Sequence[CountedLaunch], identities: dict[int, Identity]
) -> tuple[Assignment, dict[int, CountedLaunch]]:
    """Fills the full counters in place, on each launch like a counted one: same kernel and grid, similar time."""
    by_identity: dict[Identity, list[CountedLaunch]] = {}
    for launch in counted:
        by_identity.setdefault(launch.identity, []).append(launch)
    identities = identities or _identities_by_key(session, counted)
    rows = session.launches
    times = rows["ncu_time_us"].fillna(rows["duration_us"]).to_dict()
    nearest = {row: _nearest(by_identity.get(i, ()), times[row]) for row, i in identities.items()}
    matched = {row: launch for row, launch in nearest.items() if launch is not None}
    _write(session.launches, matched, tier="full")
    return _assignment(session, len(counted), matched), matched


def _nearest(candidates: Sequence[CountedLaunch], time_us: float) -> CountedLaunch | None:
    """The candidate closest in time, if it is similar: one grid may be used for tensors of very different size."""
    timed = [c for c in candidates if c.time_us]
    if not timed:
        return candidates[0] if candidates else None
    best = min(timed, key=lambda c: abs(math.log((c.time_us or 1.0) / max(time_us, 1e-3))))
    low, high = sorted((best.time_us or 0.0, time_us))
    return best if high <= max(_SIMILAR_FACTOR * low, low + _SIMILAR_US) else None


def assign_opcodes(session: Session, matched: dict[int, CountedLaunch]) -> None:
    """Fills the opcode table: the mean launch of each name (as in the census), grid and block.

    Launches with the same grid may differ in work. Each gets the mix of its match, scaled to its own instructions.
    """
    launches = session.launches
    sums: dict[tuple[Any, ...], dict[str, float]] = {}
    times: dict[tuple[Any, ...], int] = {}
    columns = (launches.loc[list(matched), c] for c in ("name", "grid", "block", "instructions"))
    for launch, name, grid, block, own in zip(matched.values(), *columns, strict=True):
        total = sum(launch.opcodes.values())
        if not total:
            continue
        scale = 1.0 if pd.isna(own) else float(own) / total
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


def _identities_by_key(session: Session, counted: Sequence[CountedLaunch]) -> dict[int, Identity]:
    """Without the order of the few counters: only where function, grid and block are unambiguous on both sides."""
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
        values = {row: launch.values[column] for row, launch in matched.items() if column in launch.values}
        launches.loc[list(values), column] = list(values.values())
    launches.loc[list(matched), "counter_tier"] = tier


def _assignment(session: Session, read: int, matched: dict[int, Any]) -> Assignment:
    kernels = session.launches[session.launches["kind"] == "kernel"]
    total = float(kernels["duration_us"].sum())
    share = float(kernels.loc[list(matched), "duration_us"].sum()) / total if total else 0.0
    return Assignment(read, len(matched), len(kernels), share)


def tensor_use(rows: pd.DataFrame) -> list[bool | None]:
    """Per launch: whether it used tensor cores; None where no counter was read.

    Counts of matrix instructions decide. The pipe's utilisation is used only without them: some versions of Nsight
    Compute include constants loaded by HFMA2.MMA in it.
    """
    counts = rows[["inst_hmma", "inst_gmma"]].astype("float64")
    known, used = counts.notna().any(axis=1), counts.fillna(0).sum(axis=1) > 0
    pct = rows["tensor_pct"].astype("float64")
    return [
        bool(u) if k else None if math.isnan(p) else p > TENSOR_PCT for k, u, p in zip(known, used, pct, strict=True)
    ]


def prove_precision(session: Session, *, claims_fp32: bool) -> dict[str, Any]:
    """Checks by counters whether the step computed in FP32 only: no launch may have used the tensor cores.

    `holds` is None if too few launches were counted to decide.
    """
    kernels = session.launches[session.launches["kind"] == "kernel"]
    use = tensor_use(kernels)
    busy, counted = [u is True for u in use], [u is not None for u in use]
    total = float(kernels["duration_us"].sum())
    share = float(kernels.loc[counted, "duration_us"].sum()) / total if total else 0.0
    used = any(busy)
    proof: dict[str, Any] = {
        "claim": "fp32" if claims_fp32 else None,
        "holds": None,
        "by": "tensor_pct",
        "launches_counted": sum(counted),
        "launches": len(kernels),
        "time_share": round(share, 5),
        "tensor_launches": sum(busy),
        "tensor_time_share": round(float(kernels.loc[busy, "duration_us"].sum()) / total, 5) if total else 0.0,
        "tensor_kernels": sorted(set(kernels.loc[busy, "name"]))[:10],
    }
    if claims_fp32 and (used or share > 0.999):
        proof["holds"] = not used
    return proof


COUNTER_TIERS = ("few", "full", "opcodes")
# Share of kernel time from which a tier counts as done.
REQUIRED = {"few": 0.9999, "full": 0.99, "opcodes": 0.90}


# JSON keys of a saved report that differ from the attribute.
_KEYS = {"result": "told"}
FORMAT = "voxtune-counters/1"


@dataclass(kw_only=True)
class TierReport:
    """The output of a tier: Nsight Compute's pages, the metric of each column, and the worker's result."""

    tier: str
    columns: dict[str, str]
    raw: str
    details: str | None = None
    unknown: list[str] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def save(self, folder: Path, *, overwrite: bool = False) -> None:
        """Writes the report to `folder`, for `voxtune.profile.replay`."""
        rest = {_KEYS.get(k, k): v for k, v in vars(self).items() if k not in ("raw", "details")}
        text = json.dumps(recorded_values({"format": FORMAT, **rest}), indent=1)
        raw, details, about = raw_files(folder, self.tier)
        write_file(raw, marked_gzip(recorded_page(self.raw).encode()), overwrite=overwrite)
        if self.details is not None:
            write_file(details, marked_gzip(recorded_page(self.details).encode()), overwrite=overwrite)
        write_file(about, text, overwrite=overwrite)

    @classmethod
    def load(cls, folder: Path, tier: str) -> TierReport:
        raw, details, path = raw_files(folder, tier)
        rest = read_json(path)
        with reading(path, "recording"):
            return cls(
                **{name: rest[_KEYS.get(name, name)] for name in ("tier", "columns", "unknown", "result", "seconds")},
                raw=_read_page(raw),
                details=_read_page(details) if details.exists() else None,
            )


def _read_page(path: Path) -> str:
    text = gunzip(path, "page of counters").decode()
    check_memory(path, page_memory(text), path.stat().st_size)
    return text


def assign_counters(
    session: Session, report: TierReport, identities: dict[int, Identity]
) -> tuple[str, dict[int, Identity]]:
    """Fills the session in place. Returns a line that describes the result, and the identities of the matched rows."""
    tier = report.tier
    counted = read_raw(report.raw, report.columns)
    if report.details is not None:
        _add_rules(counted, report.details)
    if tier == "few":
        assignment, identities = assign_few(session, counted)
    else:
        assignment, matched = assign_full(session, counted, identities)
        if tier == "opcodes":
            assign_opcodes(session, matched)
    shortfall = _shortfall(report, assignment)
    passes = max((c.passes for c in counted if c.passes), default=None)
    session.meta["tiers"][tier] = {
        "done": shortfall is None,
        "why": shortfall,
        **assignment.describe(),
        "seconds": round(report.seconds, 1),
        "counting_s": report.result.get("counting_s"),
        "passes": passes,
        "unknown_metrics": report.unknown,
    }
    _add_timing(session, report)
    line = (
        f"{tier}: counters on {assignment.matched} of {assignment.launches} launches, "
        f"{100 * assignment.time_share:.2f} % of kernel time; "
        f"{len(counted)} read in {passes} passes each{f' ({shortfall})' if shortfall else ''}"
    )
    return line, identities


def _add_rules(counted: Sequence[CountedLaunch], details: str) -> None:
    rules = read_rules(details)
    for launch in counted:
        if launch.number in rules:
            launch.values["est_speedup_pct"], launch.values["est_rule"] = rules[launch.number]


def _add_timing(session: Session, report: TierReport) -> None:
    """Adds the time of a step under the counters. Isolated operators are not a step."""
    seconds = report.result.get("counting_s")
    if report.tier == "few" and seconds is not None:
        row = frame([{"tier": "few", "repeat": 0, "step_ms": 1e3 * seconds}], "timings")
        session.timings = pd.concat([session.timings, row], ignore_index=True)


def _shortfall(report: TierReport, assignment: Assignment) -> str | None:
    """What is missing in a tier that was read; None if it is complete."""
    reasons = []
    if report.result.get("interrupted"):
        reasons.append("interrupted")
    elif report.result.get("expired"):
        reasons.append("its time ran out")
    elif not report.result:
        reasons.append("its worker failed")
    failed = report.result.get("failed")
    if failed and assignment.time_share < REQUIRED[report.tier]:
        reasons.append(f"{len(failed)} operators did not run in isolation, such as: {next(iter(failed.values()))}")
    if assignment.time_share < REQUIRED[report.tier]:
        reasons.append(f"counters cover {100 * assignment.time_share:.1f} % of kernel time")
    if report.unknown:
        reasons.append(f"this version of Nsight Compute has no metric for {', '.join(report.unknown)}")
    return "; ".join(reasons) or None

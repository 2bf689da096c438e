"""Merges recordings of one step that were made in parts, by several commands.

The parts must be the same step on the same machine: what was set, the software, and every launch in order. What differs is
refused, not averaged. The first part gives the timeline; counters that it lacks come from the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from voxtune.errors import InputError, optional_import
from voxtune.profile import schema
from voxtune.profile.counters import REQUIRED, prove_precision
from voxtune.profile.session import Session

with optional_import("profiling"):
    import pandas as pd

# What must be equal. Compilers and libraries choose kernels, so their versions belong to the step.
SETTINGS = ("workload", "mode", "config", "size", "batch", "device", "cache_control", "clock_control", "flags")
MACHINE = ("gpu", "driver", "torch", "cuda", "cudnn", "triton", "ncu")
# Launches with one signature do the same work if their times are within this factor, or this many microseconds.
SIGNATURE = ("name", "grid", "block", "module_type", "op_shapes")
SIMILAR_FACTOR, SIMILAR_US = 1.6, 4.0
RANK = {"few": 1, "full": 2}
_LAUNCH_COLUMNS = {c.name for c in schema.TABLES["launches"]}
COUNTERS = [c.name for c in schema.COUNTERS if c.name in _LAUNCH_COLUMNS and c.name != "counter_tier"]


def differences(first: Session, other: Session) -> list[str]:
    """Why the sessions are not parts of one recording; empty if they are."""
    out = [_different(key, first.meta.get(key), other.meta.get(key)) for key in SETTINGS]
    environments = (s.meta.get("environment") or {} for s in (first, other))
    left, right = environments
    for key in MACHINE:
        # A part without counters does not know the version of Nsight Compute.
        if key != "ncu" or (left.get(key) and right.get(key)):
            out.append(_different(key, left.get(key), right.get(key)))
    return [reason for reason in out if reason] or _launch_differences(first, other)


def _different(key: str, left: Any, right: Any) -> str:
    return "" if left == right else f"{key} {left!r} and {right!r}"


def _launch_differences(first: Session, other: Session) -> list[str]:
    left, right = _launches(first), _launches(other)
    if len(left) != len(right):
        return [f"steps of {len(left)} and {len(right)} launches"]
    for place, (a, b) in enumerate(zip(left, right, strict=True)):
        if a != b:
            return [f"launch {place}: {a[0][:60]} {a[1]} and {b[0][:60]} {b[1]}"]
    return []


def _launches(session: Session) -> list[tuple[str, ...]]:
    """The launches of the first step."""
    rows = session.launches[session.launches["step"] == session.launches["step"].min()]
    columns = (rows[c].fillna("").astype(str) for c in ("name", "grid", "block", "kind"))
    return list(zip(*columns, strict=True))


def merge_sessions(parts: Sequence[Session]) -> Session:
    """One session with the counters of all parts; InputError if they are not parts of one recording."""
    first, *others = parts
    for other in others:
        reasons = differences(first, other)
        if reasons:
            raise InputError(f"{other.name}: not a part of the same recording: {'; '.join(reasons)}")
    cells = {c: _plain(first.launches[c]) for c in (*COUNTERS, "counter_tier")}
    for other in others:
        _take_counters(cells, first.launches, other.launches)
    _fill_alike(cells, first.launches)
    launches = first.launches.assign(
        **{c: pd.Series(v, index=first.launches.index, dtype=first.launches[c].dtype) for c, v in cells.items()}
    )
    opcodes = pd.concat([p.opcodes for p in parts], ignore_index=True)
    # A launch's opcodes come from the first part that has any of them.
    origin = pd.concat([p.opcodes.assign(part=i)[["name", "grid", "block", "part"]] for i, p in enumerate(parts)])
    earliest = origin.fillna("").groupby(["name", "grid", "block"])["part"].transform("min").to_numpy()
    opcodes = opcodes[origin["part"].to_numpy() == earliest].reset_index(drop=True)
    known = set(first.timings["tier"])
    timings = [first.timings, *(p.timings[~p.timings["tier"].isin(known)] for p in others)]
    meta = {**first.meta, "tiers": _tiers(parts, launches, opcodes), "parts": [_origin(p) for p in _flat(parts)]}
    merged = replace(
        first, meta=meta, launches=launches, opcodes=opcodes, timings=pd.concat(timings, ignore_index=True)
    )
    claim = (first.meta.get("proof") or {}).get("claim")
    merged.meta["proof"] = prove_precision(merged, claims_fp32=claim == "fp32")
    return merged


def _flat(parts: Sequence[Session]) -> list[dict[str, Any]]:
    """The origins of all parts; those of a merged session are its own parts."""
    return [origin for p in parts for origin in (p.meta.get("parts") or [p.meta])]


def _origin(meta: dict[str, Any]) -> dict[str, Any]:
    return {k: meta.get(k) for k in ("command", "created", "commit")}


Cells = dict[str, list[Any]]


def _plain(column: pd.Series[Any]) -> list[Any]:
    """The values as a list, with None for null."""
    return [None if pd.isna(v) else v for v in column.tolist()]


def _take_counters(cells: Cells, rows: pd.DataFrame, other: pd.DataFrame) -> None:
    """Fills counters from the launch at the same place of the other's first step."""
    source = {c: _plain(other[c]) for c in cells}
    origins = _places(other)[0]
    for step in _places(rows):
        for place, row in enumerate(step):
            _take(cells, row, source, origins[place]) if place < len(origins) else None


def _places(rows: pd.DataFrame) -> list[list[int]]:
    """Per step: positions of its launches in order."""
    numbered = rows[["step", "index"]].astype(int).reset_index(drop=True)
    return [group.sort_values("index").index.tolist() for _, group in numbered.groupby("step")]


def _take(cells: Cells, row: int, source: Cells, origin: int) -> None:
    """A higher tier replaces the values of a lower one; otherwise only missing values are taken."""
    better = RANK.get(source["counter_tier"][origin], 0) > RANK.get(cells["counter_tier"][row], 0)
    for column in COUNTERS:
        value = source[column][origin]
        if value is not None and (better or cells[column][row] is None):
            cells[column][row] = value
    if better:
        cells["counter_tier"][row] = source["counter_tier"][origin]


def _fill_alike(cells: Cells, rows: pd.DataFrame) -> None:
    """Gives launches without the full set that of a launch with the same signature and a similar time.

    What was read on the launch itself stays.
    """
    columns = (rows[c].fillna("").astype(str).tolist() for c in SIGNATURE)
    keys, kinds = list(zip(*columns, strict=True)), rows["kind"].tolist()
    times = [max(float(v or 0.0), 1e-3) for v in _plain(rows["duration_us"])]
    counted: dict[tuple[str, ...], list[int]] = {}
    for row, key in enumerate(keys):
        if cells["counter_tier"][row] == "full":
            counted.setdefault(key, []).append(row)
    for row, key in enumerate(keys):
        if cells["counter_tier"][row] == "full" or kinds[row] != "kernel" or key not in counted:
            continue
        best = min((abs(math.log(times[r] / times[row])), r) for r in counted[key])[1]
        low, high = sorted((times[best], times[row]))
        if high <= max(SIMILAR_FACTOR * low, low + SIMILAR_US):
            for column in COUNTERS:
                if cells[column][row] is None:
                    cells[column][row] = cells[column][best]
            cells["counter_tier"][row] = "full"


def _tiers(parts: Sequence[Session], launches: pd.DataFrame, opcodes: pd.DataFrame) -> dict[str, Any]:
    """The state of each tier: sums over parts, and the share of kernel time that the merged counters cover."""
    kernels = launches[launches["kind"] == "kernel"]
    total = float(kernels["duration_us"].sum()) or 1.0
    recorded = set(zip(*(opcodes[c].fillna("") for c in ("name", "grid", "block")), strict=True))
    with_opcodes = [
        k in recorded for k in zip(*(kernels[c].fillna("") for c in ("name", "grid", "block")), strict=True)
    ]
    covered = {
        "few": kernels["counter_tier"].isin(["few", "full"]).fillna(False).to_numpy(bool),
        "full": (kernels["counter_tier"] == "full").fillna(False).to_numpy(bool),
        "opcodes": with_opcodes,
    }
    out: dict[str, Any] = {}
    for tier in dict.fromkeys(t for p in parts for t in p.meta["tiers"]):
        states = [p.meta["tiers"].get(tier) or {} for p in parts]
        if tier not in covered:
            out[tier] = states[0]
            continue
        share = float(kernels.loc[covered[tier], "duration_us"].sum()) / total
        done = share >= REQUIRED[tier] or any(s.get("done") for s in states)
        reasons = [s["why"] for s in states if s.get("why")]
        state: dict[str, Any] = {"done": done, "why": None if done or not reasons else reasons[-1]}
        state |= {
            key: sum(s[key] for s in states if s.get(key) is not None)
            for key in ("read", "seconds", "counting_s")
            if any(s.get(key) is not None for s in states)
        }
        if any(s.get("read") for s in states):
            state |= {"matched": int(sum(covered[tier])), "launches": len(kernels), "time_share": round(share, 5)}
        out[tier] = state
    return out

"""Data movement charged to modules, and which convolutions and matmuls ran on tensor cores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from voxtune.analysis.frame import (
    MOVEMENT,
    OUTSIDE_MODULES,
    family,
    kernels,
    milliseconds,
    module_names,
    numbers,
    share,
    steps,
)
from voxtune.analysis.table import Column, Table
from voxtune.profile.counters import tensor_use

if TYPE_CHECKING:
    import pandas as pd

    from voxtune.profile.session import Session


def layout_ledger(session: Session) -> Table:
    """Layout conversions, padding, casts and copies by kernels, charged to the module that caused them (mean step)."""
    columns = [
        Column("module", kind="text"),
        Column("type", kind="text", doc="class of the module"),
        Column("total_ms", "ms", better="low", digits=3),
        Column("share", "%", "percent", "low", doc="of the device time of the step"),
        *(Column(f"{c}_ms", "ms", better="low", digits=3) for c in MOVEMENT),
        Column("launches", better="low", digits=1),
    ]
    count, kernel_rows = steps(session), kernels(session)
    step = milliseconds(session.launches, count)
    moved = kernel_rows.loc[kernel_rows["class"].isin(MOVEMENT), ["module", "module_type", "class", "duration_us"]]
    rows: list[dict[str, Any]] = []
    for module, group in moved.assign(module=module_names(moved, OUTSIDE_MODULES)).groupby("module"):
        time, kinds = numbers(group, "duration_us") / 1e3 / count, group["class"].to_numpy(str)
        parts = {f"{c}_ms": float(np.nansum(time[kinds == c])) for c in MOVEMENT}
        kind = [t for t in group["module_type"].dropna().unique() if t]
        cells = {"module": str(module), "type": ", ".join(sorted(kind)), "launches": len(group) / count}
        rows.append(cells | parts | {"total_ms": sum(parts.values()), "share": share(sum(parts.values()), step)})
    rows.sort(key=lambda r: -r["total_ms"])
    spent = sum(r["total_ms"] for r in rows)
    notes = [f"Total: {spent:.2f} ms of {step:.2f} ms device time per step ({share(spent, step) or 0:.1f} %)."]
    types: dict[str, float] = {}
    for row in rows:
        types[row["type"] or row["module"]] = types.get(row["type"] or row["module"], 0.0) + row["total_ms"]
    largest = sorted(types.items(), key=lambda item: -item[1])[:4]
    notes += [f"By module type: {', '.join(f'{name} {ms:.2f} ms' for name, ms in largest)}."] if largest else []
    extra = {"total_ms": spent, "step_ms": step, "by_type": types}
    return Table(f"Layout ledger: {session.name}", columns, rows, notes, extra=extra)


def precision_audit(session: Session) -> Table:
    """Convolutions and matmuls by module and phase: on tensor cores or not, from counters and not from kernel names."""
    columns = [
        Column("module", kind="text"),
        Column("phase", kind="text"),
        Column("class", kind="text"),
        Column("ms", "ms", better="low", digits=3),
        Column("launches", digits=1),
        Column("ran_on", kind="text", doc="tensor cores, CUDA cores, both, or not measured"),
        Column("tensor_time", "%", "percent", "none", 1, "share of the measured time of the row"),
        Column("named", kind="text", doc="precision according to the kernel names"),
    ]
    kernel_rows, count = kernels(session), steps(session)
    heavy = kernel_rows[kernel_rows["class"].fillna("").map(family).isin(["convolution", "matmul"])]
    if heavy.empty:
        empty: dict[str, Any] = {"tensor_time_pct": None, "not_measured_pct": 0.0}
        reason = "no convolution or matmul was recorded"
        return Table(f"Precision audit: {session.name}", columns, refused=reason, extra=empty)
    heavy = heavy.assign(
        verdict=tensor_use(heavy), module=module_names(heavy, OUTSIDE_MODULES), phase=heavy["phase"].fillna("")
    )
    rows = [
        _audit(dict(zip(("module", "phase", "class"), map(str, key), strict=True)), group, count)
        for key, group in heavy.groupby(["module", "phase", "class"])
    ]
    rows.sort(key=lambda r: -r["ms"])
    summary = _audit({}, heavy, count)
    known = "not measured" if summary["tensor_time"] is None else f"{summary['tensor_time']:.1f} % on tensor cores"
    notes = [
        f"Of {summary['ms']:.2f} ms in convolutions and matmuls: {known}; {summary['unmeasured']:.1f} % not measured."
    ]
    for row in rows:
        row.pop("unmeasured")
    extra = {"tensor_time_pct": summary["tensor_time"], "not_measured_pct": summary["unmeasured"]}
    return Table(f"Precision audit: {session.name}", columns, rows, notes, extra=extra)


def _audit(cells: dict[str, Any], rows: pd.DataFrame, count: int) -> dict[str, Any]:
    time, verdict = numbers(rows, "duration_us"), list(rows["verdict"])
    on = float(np.nansum([t for t, v in zip(time, verdict, strict=True) if v is True]))
    off = float(np.nansum([t for t, v in zip(time, verdict, strict=True) if v is False]))
    kinds = {v for v in verdict if v is not None}
    ran_on = {(True,): "tensor cores", (False,): "CUDA cores", (False, True): "both"}.get(
        tuple(sorted(kinds)), "not measured"
    )
    total_us = float(np.nansum(time))
    return cells | {
        "ms": total_us / 1e3 / count,
        "launches": len(rows) / count,
        "ran_on": ran_on,
        "tensor_time": share(on, on + off),
        "named": ", ".join(sorted(set(rows["precision"].dropna()))) or None,
        "unmeasured": share(max(0.0, total_us - on - off), total_us) or 0.0,
    }

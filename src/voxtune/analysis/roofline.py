"""Roofline: measured FLOP/s against arithmetic intensity, under the peak rates of the GPU."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from voxtune.analysis.frame import Array, kernels, module_names, numbers, share, short, steps
from voxtune.analysis.table import Column, Table
from voxtune.profile.counters import tensor_use

if TYPE_CHECKING:
    import pandas as pd

    from voxtune.analysis.estimate import Card
    from voxtune.profile.session import Session


def card_of(session: Session) -> Card | None:
    """The datasheet of the session's GPU, or None if it is not in data/cards.json."""
    from voxtune.analysis.estimate import cards

    gpu = re.sub(r"[^a-z0-9]", "", str(session.meta.get("environment", {}).get("gpu", "")).lower())
    if "a100" in gpu:
        return cards()["a100-40" if "40gb" in gpu else "a100-80"]
    matches = [c for k, c in cards().items() if k.replace("-", "") in gpu]
    return matches[0] if matches else None


def flops(rows: pd.DataFrame) -> Array:
    """FLOPs per launch: fadd + fmul + 2 ffma + tensor operations.

    NaN where not measured, and where tensor cores were used but their operations were not counted. If tensor operations
    were counted, missing FP32 counts (the epilogue) are taken as 0.
    """
    add, mul, fma, tensor = (numbers(rows, c) for c in ("fadd", "fmul", "ffma", "tensor_ops"))
    scalar: Array = add + mul + 2 * fma
    total: Array = np.where(np.nan_to_num(tensor) > 0, np.nan_to_num(scalar), scalar) + np.nan_to_num(tensor)
    on_tensor_cores = np.array([use is True for use in tensor_use(rows)], dtype=bool)
    total[on_tensor_cores & (np.nan_to_num(tensor) == 0)] = np.nan
    return total


def roofline(session: Session, by: str = "kernel", top: int = 40) -> Table:
    """By kernel (short name) or module: FLOPs, DRAM bytes, intensity, rate, and percent of the roof."""
    columns = [
        Column(by, kind="text"),
        Column("ms", "ms", better="low", digits=3),
        Column("gflop", "GFLOP", digits=1),
        Column("gb", "GB", digits=2, better="low"),
        Column("intensity", "FLOP/B", digits=2),
        Column("tflops", "TFLOP/s", better="high"),
        Column("gbs", "GB/s", better="high", digits=0),
        Column("roof_tflops", "TFLOP/s", detail=True),
        Column("of_roof", "%", "percent", "high", 1),
        Column("bound", kind="text", doc="the lower ceiling: compute or memory"),
        Column("measured", "%", "percent", "high", 1, detail=True),
    ]
    kernel_rows, count, gpu = kernels(session), steps(session), card_of(session)
    key = [short(str(n)) for n in kernel_rows["name"]] if by == "kernel" else module_names(kernel_rows)
    kernel_rows = kernel_rows.assign(key=key, flops=flops(kernel_rows))
    rows = [_point(str(name), group, count, gpu, by) for name, group in kernel_rows.groupby("key")]
    rows.sort(key=lambda r: -r["ms"])
    title = f"Roofline by {by}: {session.name}"
    if all(r["gflop"] is None for r in rows):
        return Table(title, columns, refused="no FLOP counters were recorded (requires the full counter set)")
    absent = [r for r in rows if r["gflop"] is None]
    rows = [r for r in rows if r["gflop"] is not None]
    notes = ["Rates refer to the time for which both counters were read. Ceilings are peak rates of the datasheet."]
    if absent:
        spent = sum(r["ms"] for r in absent)
        notes.append(f"Left out: {len(absent)} {by}s with {spent:.1f} ms, whose counters were not read.")
    if gpu is None:
        notes.append("This GPU is not in the datasheet table; no ceilings are shown.")
    extra: dict[str, Any] = {"ceilings": None}
    if gpu is not None:
        extra["ceilings"] = {"bandwidth_gbs": gpu.bandwidth_gbs, "fp32": gpu.fp32, "tf32": gpu.tf32, "half": gpu.half}
    return Table(title, columns, rows[:top], notes, extra=extra)


def _point(name: str, rows: pd.DataFrame, count: int, gpu: Card | None, by: str) -> dict[str, Any]:
    time, flop, moved = numbers(rows, "duration_us"), numbers(rows, "flops"), numbers(rows, "dram_bytes")
    measured = ~np.isnan(flop) & ~np.isnan(moved) & ~np.isnan(time)
    cells: dict[str, Any] = {by: name, "ms": float(np.nansum(time)) / 1e3 / count}
    cells["measured"] = share(float(np.nansum(time[measured])), float(np.nansum(time)))
    if not measured.any():
        return cells | {"gflop": None}
    work, size, seconds = float(flop[measured].sum()), float(moved[measured].sum()), float(time[measured].sum()) * 1e-6
    rate = work / seconds / 1e12 if seconds else None
    intensity = work / size if size else None
    cells |= {
        "gflop": work / 1e9 / count,
        "gb": size / 1e9 / count,
        "intensity": intensity,
        "tflops": rate,
        "gbs": size / seconds / 1e9 if seconds else None,
    }
    if gpu is None or intensity is None:
        return cells
    peak, slope = _peak(rows[measured], gpu), intensity * gpu.bandwidth_gbs / 1e3
    roof = min(peak, slope)
    return cells | {"roof_tflops": roof, "of_roof": share(rate, roof), "bound": "compute" if peak < slope else "memory"}


def _peak(rows: pd.DataFrame, gpu: Card) -> float:
    """The peak rate for most of the rows' FLOPs, by the input type of their tensor operations."""
    if np.nansum(numbers(rows, "tensor_ops")) * 2 < numbers(rows, "flops").sum():
        return gpu.fp32
    by_source = {s: float(np.nansum(numbers(rows, f"tensor_ops_{s}"))) for s in ("tf32", "bf16", "fp16")}
    most = max(by_source, key=by_source.__getitem__)
    return (gpu.tf32 if most == "tf32" else gpu.half) or gpu.fp32

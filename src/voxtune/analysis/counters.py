"""Counters per class and overall. Each mean says its weight; what was not measured is None."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from voxtune.analysis.frame import Array, family, geometric_mean, kernels, mean, numbers, share, steps, total
from voxtune.analysis.table import Column, Table

if TYPE_CHECKING:
    import pandas as pd

    from voxtune.profile.session import Session

# Percent of a peak over elapsed time weighs by time; per active cycle by active cycles; per issue by instructions.
# Hit rates would weigh by sectors, which are not recorded: by time.
WEIGHT = {
    "ipc": "cycles_active",
    "tensor_pct": "duration_us",
    "tensor_pipe_pct": "duration_us",
    "fma_pct": "duration_us",
    "alu_pct": "duration_us",
    "sm_pct": "duration_us",
    "memory_pct": "duration_us",
    "l1_hit_pct": "duration_us",
    "l2_hit_pct": "duration_us",
    "dram_pct": "duration_us",
    "warps_active": "cycles_active",
    "occupancy_pct": "cycles_active",
}
UTILISATION = ("tensor_pct", "fma_pct", "alu_pct", "sm_pct")
CACHES = ("l1_hit_pct", "l2_hit_pct", "dram_pct", "memory_pct")
WARPS = ("warps_active", "occupancy_pct")


def weight_of(counter: str) -> str:
    return "instructions" if counter.startswith("stall_") else WEIGHT[counter]


def average(rows: pd.DataFrame, counter: str, *, plain: bool = False) -> float | None:
    """`plain`: every launch weighs the same, however long: the mean that a profiler's table shows."""
    return mean(numbers(rows, counter), None if plain else numbers(rows, weight_of(counter)))


def overall_ipc(session: Session) -> float | None:
    """The seed's: the geometric mean of every launch's IPC."""
    return geometric_mean(numbers(kernels(session), "ipc"))


def counter_table(session: Session, counters: tuple[str, ...], title: str) -> Table:
    """One row a class, then overall; `measured` is the share of that row's time that has all these counters."""
    ran = kernels(session)
    coarse = ran.assign(family=[family(str(c)) for c in ran["class"].fillna("unknown")])
    rows = [_row(str(name), some, counters) for name, some in coarse.groupby("family")]
    rows.sort(key=lambda r: -(r["ms"] or 0))
    rows = [*rows, _row("overall", ran, counters)]
    for row in rows:
        row["ms"] = row["ms"] / steps(session)
    columns = [
        Column("class", kind="text"),
        Column("ms", "ms", better="low", digits=3),
        Column("measured", "%", "percent", "high", 1),
        *(_column(c) for c in counters),
    ]
    weights = sorted({weight_of(c) for c in counters})
    names = {"duration_us": "time", "cycles_active": "active cycles", "instructions": "instructions executed"}
    return Table(f"{title}: {session.name}", columns, rows, [f"Weighted by {', '.join(names[w] for w in weights)}."])


def _row(name: str, rows: pd.DataFrame, counters: tuple[str, ...]) -> dict[str, Any]:
    time = numbers(rows, "duration_us")
    have = np.all([~np.isnan(numbers(rows, c)) for c in counters], axis=0)
    whole = float(np.nansum(time))
    cells: dict[str, Any] = {"class": name, "ms": whole / 1e3, "measured": share(float(np.nansum(time[have])), whole)}
    return cells | {c: average(rows, c) for c in counters}


def _column(counter: str) -> Column:
    if counter.startswith("stall_"):
        return Column(counter, "warps/issue", better="low", digits=3)
    if counter.endswith("_pct"):
        return Column(counter, "%", "percent", "high", 2)
    return Column(counter, "warps" if counter == "warps_active" else "", better="high", digits=2)


def utilisation(session: Session) -> Table:
    """Tensor, FMA (CUDA cores) and integer pipes, and SM throughput."""
    return counter_table(session, UTILISATION, "Pipes and SM throughput")


def caches(session: Session) -> Table:
    return counter_table(session, CACHES, "Caches and DRAM")


def warps(session: Session) -> Table:
    return counter_table(session, (*WARPS, "ipc"), "Active warps and IPC")


def stalls(session: Session) -> Table:
    """Warps stalled an issued instruction, by reason; only reasons that some launch reports."""
    ran = kernels(session)
    found = [c for c in ran.columns if c.startswith("stall_") and not np.isnan(numbers(ran, c)).all()]
    if not found:
        return Table(f"Stalls: {session.name}", [], refused="no stall counter was recorded (the full set is needed)")
    found.sort(key=lambda c: -(average(ran, c) or 0))
    return counter_table(session, tuple(found), "Stalls")


def totals(session: Session) -> dict[str, float | None]:
    """Cycles, instructions and both IPCs of a mean step (a window is one step)."""
    ran, count = kernels(session), steps(session)

    def a_step(values: Array) -> float | None:
        found = total(values)
        return None if found is None else found / count

    return {
        "cycles": a_step(numbers(ran, "cycles")),
        "instructions": a_step(numbers(ran, "instructions")),
        "ipc": overall_ipc(session),
        "ipc_weighted": average(ran, "ipc"),
        "device_ms": a_step(numbers(ran, "duration_us") / 1e3),
    }

"""Counters per kernel class and overall, as weighted means; None where not measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from voxtune.analysis.frame import Array, family, geometric_mean, kernels, mean, numbers, share, steps, total
from voxtune.analysis.roofline import card_of
from voxtune.analysis.table import Column, Table

if TYPE_CHECKING:
    import pandas as pd

    from voxtune.profile.session import Session

# Percent of peak over elapsed time is weighted by time, rates per active cycle by active cycles, stalls per issued
# instruction by instructions. Hit rates should be weighted by sectors, which are not recorded; time is used instead.
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
    """`plain`: the unweighted mean over launches, as in a profiler's table."""
    return mean(numbers(rows, counter), None if plain else numbers(rows, weight_of(counter)))


def kernels_with_dram(session: Session) -> pd.DataFrame:
    """The kernels, with dram_pct from their DRAM traffic, which is counted on every launch, over time and peak bandwidth.

    The profiler's own dram_pct, of the full counter set, stays where the traffic or the GPU's bandwidth is unknown.
    """
    kernel_rows, card = kernels(session), card_of(session)
    if card is None:
        return kernel_rows
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = numbers(kernel_rows, "dram_bytes") / (numbers(kernel_rows, "duration_us") * 1e-6)
    percent = 100 * rate / (card.bandwidth_gbs * 1e9)
    return kernel_rows.assign(dram_pct=np.where(np.isfinite(percent), percent, numbers(kernel_rows, "dram_pct")))


def overall_ipc(session: Session) -> float | None:
    """The geometric mean of the IPC of all launches, as in the paper."""
    return geometric_mean(numbers(kernels(session), "ipc"))


def counter_table(session: Session, counters: tuple[str, ...], title: str) -> Table:
    """One row per class, then overall; `measured` is the share of the row's time for which all counters were read."""
    kernel_rows = kernels_with_dram(session)
    coarse = kernel_rows.assign(family=[family(str(c)) for c in kernel_rows["class"].fillna("unknown")])
    rows = [_row(str(name), group, counters) for name, group in coarse.groupby("family")]
    rows.sort(key=lambda r: -(r["ms"] or 0))
    rows = [*rows, _row("overall", kernel_rows, counters)]
    for row in rows:
        row["ms"] = row["ms"] / steps(session)
    columns = [
        Column("class", kind="text"),
        Column("ms", "ms", better="low", digits=3),
        Column("measured", "%", "percent", "high", 1),
        *(_column(c, detail=place >= MAIN_COUNTERS) for place, c in enumerate(counters)),
    ]
    weights = sorted({weight_of(c) for c in counters})
    names = {"duration_us": "time", "cycles_active": "active cycles", "instructions": "instructions executed"}
    return Table(f"{title}: {session.name}", columns, rows, [f"Weighted by {', '.join(names[w] for w in weights)}."])


def _row(name: str, rows: pd.DataFrame, counters: tuple[str, ...]) -> dict[str, Any]:
    time = numbers(rows, "duration_us")
    measured = np.all([~np.isnan(numbers(rows, c)) for c in counters], axis=0)
    total_us = float(np.nansum(time))
    cells: dict[str, Any] = {"class": name, "ms": total_us / 1e3}
    cells["measured"] = share(float(np.nansum(time[measured])), total_us)
    return cells | {c: average(rows, c) for c in counters}


# Stall reasons are sorted; the page shows those after the first on request.
MAIN_COUNTERS = 6


def _column(counter: str, *, detail: bool) -> Column:
    if counter.startswith("stall_"):
        title = counter.removeprefix("stall_").replace("_", " ")
        return Column(counter, "warps/issue", better="low", digits=3, title=title, detail=detail)
    if counter.endswith("_pct"):
        return Column(counter, "%", "percent", "high", 2)
    return Column(counter, "warps" if counter == "warps_active" else "", better="high", digits=2)


def utilisation(session: Session) -> Table:
    """Utilisation of the tensor, FMA (CUDA cores) and integer pipes, and SM throughput."""
    return counter_table(session, UTILISATION, "Pipe utilisation and SM throughput")


def caches(session: Session) -> Table:
    """Hit rates and throughput. `measured` refers to all four; dram_pct comes from traffic that is counted everywhere."""
    table = counter_table(session, CACHES, "Caches and DRAM")
    covered = share(
        float(np.nansum(numbers(rows := kernels(session), "duration_us")[~np.isnan(numbers(rows, "dram_bytes"))])),
        float(np.nansum(numbers(rows, "duration_us"))),
    )
    table.notes.append(
        f"DRAM throughput: bytes over time and peak bandwidth, from {covered or 0:.1f} % of kernel time."
    )
    return table


def warps(session: Session) -> Table:
    return counter_table(session, (*WARPS, "ipc"), "Active warps and IPC")


def stalls(session: Session) -> Table:
    """Stalled warps per issued instruction, by reason."""
    kernel_rows = kernels(session)
    reasons = [c for c in kernel_rows.columns if c.startswith("stall_") and not np.isnan(numbers(kernel_rows, c)).all()]
    if not reasons:
        return Table(
            f"Stalls: {session.name}", [], refused="no stall counters were recorded (requires the full counter set)"
        )
    reasons.sort(key=lambda c: -(average(kernel_rows, c) or 0))
    return counter_table(session, tuple(reasons), "Stalls")


def totals(session: Session) -> dict[str, float | None]:
    """Cycles, instructions, IPC and kernel time of a mean step."""
    kernel_rows, count = kernels(session), steps(session)

    def per_step(values: Array) -> float | None:
        summed = total(values)
        return None if summed is None else summed / count

    return {
        "cycles": per_step(numbers(kernel_rows, "cycles")),
        "instructions": per_step(numbers(kernel_rows, "instructions")),
        "ipc": overall_ipc(session),
        "ipc_weighted": average(kernel_rows, "ipc"),
        "device_ms": per_step(numbers(kernel_rows, "duration_us") / 1e3),
    }

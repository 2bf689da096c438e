"""DRAM traffic of a step, by kernel class, from bytes counted on every launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from voxtune.analysis.certificate import refusal
from voxtune.analysis.frame import family, kernels, labels, numbers, ratio, share, steps
from voxtune.analysis.roofline import card_of
from voxtune.analysis.table import Column, Table, refuse

if TYPE_CHECKING:
    from voxtune.profile.session import Session

TITLE = "DRAM traffic of a step"
# Columns of the table, and the coarse kernel classes in them. "movement" has the classes of the layout ledger.
PARTS = {
    "convolution": ("convolution",),
    "norm": ("norm",),
    "movement": ("layout", "copy", "cast"),
    "elementwise": ("elementwise",),
    "fused": ("triton",),
}


def traffic(sessions: Sequence[Session], *, across_gpus: bool = False) -> Table:
    """One row per session: GB read and written, mean rate, and the ratio to the first session of the list."""
    columns = [
        Column("session", kind="text"),
        Column("gb", "GB", better="low", digits=1, title="traffic", doc="read and written, mean step, kernels only"),
        Column("ratio", "x", better="low", doc="to the first session"),
        *(Column(f"{p}_gb", "GB", better="low", digits=1, title=p) for p in [*PARTS, "other"]),
        Column("gbs", "GB/s", digits=0, title="mean rate", doc="traffic over kernel time"),
        Column("dram_pct", "%", "percent", digits=1, title="of peak", doc="mean rate over the datasheet's bandwidth"),
        Column("counted", "%", "percent", "high", 1, "share of kernel time with counted bytes", detail=True),
    ]
    reasons = [refusal([sessions[0], s], "few", across_gpus=across_gpus) for s in sessions]
    rows: list[dict[str, Any]] = []
    for label, session, reason in zip(labels(sessions), sessions, reasons, strict=True):
        row = {"session": label} | _of(session)
        rows.append(row | {"ratio": None if reason else ratio(row["gb"], rows[0]["gb"] if rows else row["gb"])})
    if all(r["gb"] is None for r in rows):
        return refuse(TITLE, "no DRAM bytes were recorded (requires counters)", columns)
    notes = ["Bytes that kernels moved to and from DRAM; hits in the caches are not traffic."]
    notes += [f"Ratios refused: {r}" for r in dict.fromkeys(filter(None, reasons))]
    return Table(TITLE, columns, rows, notes)


def _of(session: Session) -> dict[str, Any]:
    rows, count, card = kernels(session), steps(session), card_of(session)
    moved, time = numbers(rows, "dram_bytes"), numbers(rows, "duration_us")
    known = ~np.isnan(moved) & ~np.isnan(time)
    if not known.any():
        return {"gb": None}
    coarse = np.array([family(str(c)) for c in rows["class"].fillna("unknown")], dtype=object).astype(str)
    parts = {
        f"{name}_gb": float(moved[known & np.isin(coarse, members)].sum()) / 1e9 / count
        for name, members in PARTS.items()
    }
    total, seconds = float(moved[known].sum()), float(time[known].sum()) * 1e-6
    rate = total / seconds / 1e9 if seconds else None
    return {
        "gb": total / 1e9 / count,
        **parts,
        "other_gb": max(0.0, total / 1e9 / count - sum(parts.values())),
        "gbs": rate,
        "dram_pct": share(rate, card.bandwidth_gbs) if card else None,
        "counted": share(float(time[known].sum()), float(np.nansum(time))),
    }

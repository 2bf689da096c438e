"""Device memory over a step, by category."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from voxtune.analysis.frame import share
from voxtune.analysis.table import Column, Table

if TYPE_CHECKING:
    import pandas as pd

    from voxtune.profile.session import Session

CATEGORIES = ("weights", "gradients", "optimizer", "activations", "workspace", "inputs", "other")
UNRECORDED = "memory was not recorded"


def allocated_bytes(session: Session) -> pd.DataFrame:
    """Bytes allocated per category (columns) over the first recorded step (index in µs)."""
    rows = session.memory
    rows = rows[rows["step"] == rows["step"].min()].sort_values("time_us", kind="stable")
    # Each row updates one category; the others keep their last value.
    wide = rows.pivot_table(index="time_us", columns="category", values="bytes", aggfunc="last")
    wide = wide.astype(float).ffill().fillna(0.0)
    known = [c for c in CATEGORIES if c in wide.columns]
    return wide[[*known, *(c for c in wide.columns if c not in known)]]


def memory_peak(session: Session) -> Table:
    """Memory per category at the peak of the total, and the peak of each category."""
    columns = [
        Column("category", kind="text"),
        Column("at_peak_gib", "GiB", better="low", digits=3),
        Column("share", "%", "percent", digits=1),
        Column("own_peak_gib", "GiB", better="low", digits=3),
    ]
    title = f"Memory at peak: {session.name}"
    if session.memory.empty:
        return Table(title, columns, refused=UNRECORDED)
    wide = allocated_bytes(session)
    totals = wide.sum(axis=1)
    peak_time = totals.idxmax()
    peak = float(totals.max())
    rows = [
        {"category": str(c), "at_peak_gib": wide.at[peak_time, c] / 2**30, "share": share(float(wide.at[peak_time, c]), peak),
         "own_peak_gib": float(wide[c].max()) / 2**30}
        for c in wide.columns
    ]  # fmt: skip
    rows.sort(key=lambda r: -r["at_peak_gib"])
    notes = [f"Peak: {peak / 2**30:.2f} GiB, {float(peak_time) / 1e3:.1f} ms after the step began on the host."]
    allocator_peak = session.meta.get("peak_bytes")
    if allocator_peak:
        notes.append(f"Peak reported by the allocator over the run: {allocator_peak / 2**30:.2f} GiB.")
    extra = {"peak_bytes": peak, "time_us": float(peak_time)}
    return Table(title, columns, rows, notes, extra=extra)


def memory_timeline(session: Session, points: int = 400) -> Table:
    """GiB per category over the step, reduced to about `points` rows that keep the peaks of the total."""
    title = f"Memory over the step: {session.name}"
    if session.memory.empty:
        return Table(title, [Column("time_ms", "ms")], refused=UNRECORDED)
    wide = allocated_bytes(session)
    totals = wide.sum(axis=1).to_numpy()
    bins = np.array_split(np.arange(len(wide)), min(points, len(wide)))
    keep = [int(b[np.argmax(totals[b])]) for b in bins]
    columns = [
        Column("time_ms", "ms", digits=3),
        *(Column(str(c), "GiB", better="low", digits=3) for c in wide.columns),
    ]
    rows = [
        {"time_ms": float(wide.index[i]) / 1e3} | {str(c): float(wide[c].iloc[i]) / 2**30 for c in wide.columns}
        for i in keep
    ]
    return Table(title, columns, rows)

"""Memory over a step, by what holds it."""

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


def held(session: Session) -> pd.DataFrame:
    """Bytes held by category (columns) at every time of the first recorded step (index, µs)."""
    rows = session.memory
    rows = rows[rows["step"] == rows["step"].min()].sort_values("time_us", kind="stable")
    # A row says what one category holds from then on; the others hold what they held.
    wide = rows.pivot_table(index="time_us", columns="category", values="bytes", aggfunc="last")
    wide = wide.astype(float).ffill().fillna(0.0)
    known = [c for c in CATEGORIES if c in wide.columns]
    return wide[[*known, *(c for c in wide.columns if c not in known)]]


def memory_peak(session: Session) -> Table:
    """What held the memory at the moment of the peak, and each category's own peak."""
    columns = [
        Column("category", kind="text"),
        Column("at_peak_gib", "GiB", better="low", digits=3),
        Column("share", "%", "percent", digits=1),
        Column("own_peak_gib", "GiB", better="low", digits=3),
    ]
    title = f"Memory at its peak: {session.name}"
    if session.memory.empty:
        return Table(title, columns, refused=UNRECORDED)
    wide = held(session)
    totals = wide.sum(axis=1)
    when = totals.idxmax()
    whole = float(totals.max())
    rows = [
        {"category": str(c), "at_peak_gib": wide.at[when, c] / 2**30, "share": share(float(wide.at[when, c]), whole),
         "own_peak_gib": float(wide[c].max()) / 2**30}
        for c in wide.columns
    ]  # fmt: skip
    rows.sort(key=lambda r: -r["at_peak_gib"])
    notes = [f"Peak {whole / 2**30:.2f} GiB, {float(when) / 1e3:.1f} ms into the step."]
    allocated = session.meta.get("peak_bytes")
    if allocated:
        notes.append(f"The allocator's own peak over the run: {allocated / 2**30:.2f} GiB.")
    extra = {"peak_bytes": whole, "time_us": float(when)}
    return Table(title, columns, rows, notes, extra=extra)


def memory_timeline(session: Session, points: int = 400) -> Table:
    """GiB by category over the step, thinned to about `points` rows that keep every peak of the total."""
    title = f"Memory over the step: {session.name}"
    if session.memory.empty:
        return Table(title, [Column("time_ms", "ms")], refused=UNRECORDED)
    wide = held(session)
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

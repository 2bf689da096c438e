"""N configurations side by side, by module or class, though their kernels differ; differences beside the spread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from voxtune.analysis.certificate import refusal, window
from voxtune.analysis.counters import totals
from voxtune.analysis.frame import MODULE_UNKNOWN, OUTSIDE_MODULES, family, labels, module_names, numbers, ratio, share
from voxtune.analysis.step import spread_pct, wall_samples
from voxtune.analysis.table import Column, Table

if TYPE_CHECKING:
    import pandas as pd

    from voxtune.profile.session import Session

RATIOS = ("cycles", "instructions", "ipc", "device_ms")


def compare_modules(sessions: Sequence[Session], depth: int | None = 2) -> Table:
    """By module path cut to `depth` parts (None: whole). The first session is what the others are held against."""
    return _compare(sessions, "module", lambda rows: [_cut(m, depth) for m in module_names(rows)])


def compare_classes(sessions: Sequence[Session]) -> Table:
    return _compare(sessions, "class", lambda rows: [family(str(c)) for c in rows["class"].fillna("unknown")])


def _cut(module: str, depth: int | None) -> str:
    return ".".join(module.split(".")[:depth]) or OUTSIDE_MODULES


def _compare(sessions: Sequence[Session], by: str, key: Any) -> Table:
    names = labels(sessions)
    title = f"By {by}: {', '.join(names)}"
    reason = refusal(sessions, "time")
    if reason:
        return Table(title, [], refused=reason)
    times = [_by_step(s, key) for s in sessions]
    wholes = [sum(float(t.mean()) for t in found.values()) for found in times]
    spreads = [_step_spread(s) for s in sessions]
    columns = [Column(by, kind="text")]
    for i, name in enumerate(names):
        columns += [Column(f"{name} ms", "ms", better="low", digits=3), Column(f"{name} ±", "ms", digits=3)]
        if i:
            columns += [
                Column(f"{name} difference", "ms", better="low", digits=3),
                Column(f"{name} ratio", "x", better="low", digits=2),
                Column(f"{name} beyond spread", kind="bool"),
            ]
    rows = []
    keys = sorted({k for found in times for k in found}, key=lambda k: -max(_mean(f, k) or 0.0 for f in times))
    for k in keys:
        rows.append(
            _compare_row(by, k, names, [(_mean(f, k), _spread(f, k, p)) for f, p in zip(times, spreads, strict=True)])
        )
    total = [
        (whole, whole * (p or 0) / 100 if p is not None else None) for whole, p in zip(wholes, spreads, strict=True)
    ]
    rows.append(_compare_row(by, "all", names, total))
    notes = [
        "Time on the device of a mean step. ± is the larger of a row's own spread over recorded steps and the run's "
        "spread (half of p20 to p80 of whole steps); empty where neither was recorded."
    ]
    if any(MODULE_UNKNOWN in found for found in times):
        notes.append(
            f"{MODULE_UNKNOWN}: a fused kernel does not say which it serves; the other modules of its step are empty."
        )
    return Table(title, columns, rows, notes)


def _compare_row(
    by: str, key: str, names: list[str], cells: Sequence[tuple[float | None, float | None]]
) -> dict[str, Any]:
    row: dict[str, Any] = {by: key}
    base, base_spread = cells[0]
    for i, (name, (ms, spread)) in enumerate(zip(names, cells, strict=True)):
        row |= {f"{name} ms": ms, f"{name} ±": spread}
        if i and ms is not None and base is not None:
            known = [s for s in (spread, base_spread) if s is not None]
            beyond = abs(ms - base) > math.hypot(*known) if len(known) == 2 else None
            row |= {f"{name} difference": ms - base, f"{name} ratio": ratio(ms, base), f"{name} beyond spread": beyond}
    return row


def _by_step(session: Session, key: Any) -> dict[str, np.ndarray[Any, Any]]:
    """ms a step for each key, a value a recorded step."""
    rows = session.launches
    frame = rows[["step"]].assign(key=key(rows), ms=numbers(rows, "duration_us") / 1e3)
    wide: pd.DataFrame = frame.pivot_table(index="key", columns="step", values="ms", aggfunc="sum").fillna(0.0)
    return {str(k): np.asarray(v, dtype=float) for k, v in zip(wide.index, wide.to_numpy(), strict=True)}


def _mean(found: dict[str, np.ndarray[Any, Any]], key: str) -> float | None:
    """None where a compiled step does not say what this module took of it, and for the region itself elsewhere."""
    if key not in found:
        return None if MODULE_UNKNOWN in (*found, key) else 0.0
    return float(found[key].mean())


def _spread(found: dict[str, np.ndarray[Any, Any]], key: str, run_pct: float | None) -> float | None:
    if key not in found:
        return None if MODULE_UNKNOWN in (*found, key) else 0.0
    own = float(np.ptp(found[key]) / 2) if len(found[key]) > 1 else None
    run = None if run_pct is None else float(found[key].mean()) * run_pct / 100
    known = [s for s in (own, run) if s is not None]
    return max(known) if known else None


def _step_spread(session: Session) -> float | None:
    return spread_pct(wall_samples(session)[1])


def normalised(sessions: Sequence[Session]) -> Table:
    """Cycles, instructions, IPC (the seed's geometric mean) and kernel time over those of the first session."""
    title = "Against the first: whole steps"
    reasons = [refusal([sessions[0], s], "few") for s in sessions]
    if all(reasons[1:]) or reasons[0]:
        return Table(title, _ratio_columns(), refused=next(filter(None, reasons)))
    found = [totals(s) for s in sessions]
    rows = [
        {"session": name} | ({} if reason else {f"{k}_ratio": ratio(t[k], found[0][k]) for k in RATIOS})
        for name, t, reason in zip(labels(sessions), found, reasons, strict=True)
    ]
    return Table(title, _ratio_columns(), rows, [f"Refused: {r}" for r in reasons if r])


def side_by_side(sessions: Sequence[Session], name: str = "paper") -> Table:
    """What the seed's window says and what the whole step says. The window's ratios are shown to be seen through."""
    title = f"The {name}'s window and the whole step"
    columns = [
        Column("session", kind="text"),
        Column("window_time_pct", "%", "percent", digits=1, doc="share of the step's kernel time inside the window"),
        *(Column(f"{k}_window", "x baseline", digits=3) for k in RATIOS),
        *(Column(f"{k}_step", "x baseline", digits=3) for k in RATIOS),
    ]
    # A ratio of whole steps is drawn only between sessions that cover theirs: times by the timeline, the rest by counters.
    reasons = [refusal([sessions[0], s], "few") for s in sessions]
    untimed = [refusal([sessions[0], s], "time") for s in sessions]
    whole = [totals(s) for s in sessions]
    cut = [totals(window(s, name)) for s in sessions]
    rows = []
    for i, (label, part, full) in enumerate(zip(labels(sessions), cut, whole, strict=True)):
        row: dict[str, Any] = {"session": label, "window_time_pct": share(part["device_ms"], full["device_ms"])}
        row |= {f"{k}_window": ratio(part[k], cut[0][k]) for k in RATIOS}
        for k in RATIOS:
            refused = (untimed if k == "device_ms" else reasons)[i]
            row[f"{k}_step"] = None if refused else ratio(full[k], whole[0][k])
        rows.append(row)
    notes = [
        "A window is no measure of a step: compare the two halves of this table before believing the first.",
        "The seed counted its window from the start of the process, set-up included; a session holds whole steps only, "
        "so this is the same window of a step.",
    ]
    notes += [f"Whole-step ratios refused: {reason}" for reason in dict.fromkeys(filter(None, reasons))]
    return Table(title, columns, rows, notes)


def _ratio_columns() -> list[Column]:
    doc = {"ipc": "geometric mean of every launch's IPC", "device_ms": "kernel time"}
    return [
        Column("session", kind="text"),
        *(
            Column(f"{k}_ratio", "x", better="none" if k == "ipc" else "low", digits=3, doc=doc.get(k, ""))
            for k in RATIOS
        ),
    ]

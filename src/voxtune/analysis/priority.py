"""Optimisation priorities: the paper's score, a bounded estimate of the gain, and the gain that was achieved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from voxtune.analysis.certificate import refusal
from voxtune.analysis.frame import Array, family, kernels, milliseconds, module_names, numbers, share, short, steps
from voxtune.analysis.table import Column, Table

if TYPE_CHECKING:
    import pandas as pd

    from voxtune.profile.session import Session


def priority(session: Session, by: str = "class") -> Table:
    """By class, kernel or module.

    With T the time of a launch and s its estimated speed-up, clamped to 0..1 (equation 2 of the paper):
    score = sum of T s (equation 1 of the paper); gain = sum of T s / (1 + s), the time saved if the estimate is right.
    The gain is at most the time of the kernel, and at most its headroom.
    """
    columns = [
        Column(by, kind="text"),
        Column("ms", "ms", better="low", digits=3),
        Column("share", "%", "percent"),
        Column("score", "ms", digits=3, doc="as in the paper: duration x estimated speed-up"),
        Column("gain_ms", "ms", digits=3, doc="time saved if the estimate is right"),
        Column("gain_pct", "%", "percent", doc="of the step, at most share", detail=True),
        Column("step_speedup", "x", digits=3, doc="of the whole step (Amdahl's law)", detail=True),
        Column("measured", "%", "percent", "high", 1, "share of the row's time with an estimate"),
        Column("rule", kind="text", doc="Nsight Compute rule with the largest part of the estimate"),
    ]
    kernel_rows, count = keyed(session, by), steps(session)
    step = milliseconds(session.launches, count)
    rows = [_score(str(name), group, count, step, by) for name, group in kernel_rows.groupby("key")]
    title = f"Priority by {by}: {session.name}"
    if all(r["score"] is None for r in rows):
        return Table(
            title, columns, refused="no estimated speed-ups were recorded (requires the rules of Nsight Compute)"
        )
    rows.sort(key=lambda r: -(r["gain_ms"] or 0))
    return Table(
        title, columns, rows, ["Ranked by gain. Estimates come from rules of Nsight Compute, one kernel at a time."]
    )


def keyed(session: Session, by: str) -> pd.DataFrame:
    """Kernels with a `key`: their coarse class, short name, or module."""
    kernel_rows = kernels(session)
    if by == "class":
        return kernel_rows.assign(key=[family(str(c)) for c in kernel_rows["class"].fillna("unknown")])
    if by == "kernel":
        return kernel_rows.assign(key=[short(str(n)) for n in kernel_rows["name"]])
    assert by == "module", by
    return kernel_rows.assign(key=module_names(kernel_rows))


def _score(name: str, rows: pd.DataFrame, count: int, step: float, by: str) -> dict[str, Any]:
    time = numbers(rows, "duration_us") / 1e3 / count
    speedup = np.clip(numbers(rows, "est_speedup_pct") / 100, 0, 1)
    measured, total = ~np.isnan(speedup), float(np.nansum(time))
    cells: dict[str, Any] = {by: name, "ms": total, "share": share(total, step)}
    if not measured.any():
        return cells | {"score": None, "gain_ms": None, "gain_pct": None, "step_speedup": None, "measured": 0.0}
    gain = float(np.nansum(time * np.fmin(speedup / (1 + speedup), headroom(rows))))
    weight = rows.assign(weight=time * speedup).groupby("est_rule")["weight"].sum()
    return cells | {
        "score": float(np.nansum(time * speedup)),
        "gain_ms": gain,
        "gain_pct": share(gain, step),
        "step_speedup": step / (step - gain) if step > gain else None,
        "measured": share(float(np.nansum(time[measured])), total),
        "rule": str(weight.idxmax()) if len(weight) else None,
    }


def headroom(rows: pd.DataFrame) -> Array:
    """1 - max(SM throughput, memory throughput), the most a launch can gain; NaN where not measured.

    Local rules of Nsight Compute do not apply this bound: they estimated 87 % for a convolution at 87 % SM throughput.
    """
    throughput = np.fmax(numbers(rows, "sm_pct"), numbers(rows, "memory_pct"))
    bound: Array = np.clip(1 - throughput / 100, 0, 1)
    return bound


def achieved(before: Session, after: Session, by: str = "class", *, across_gpus: bool = False) -> Table:
    """Estimated and achieved gain of an optimisation, by class or module; negative where it became slower."""
    title = f"Estimated and achieved gain: {before.name} to {after.name}"
    columns = [
        Column(by, kind="text"),
        Column("before_ms", "ms", better="low", digits=3),
        Column("after_ms", "ms", better="low", digits=3),
        Column("score", "ms", digits=3, doc="as in the paper, before"),
        Column("estimated_ms", "ms", digits=3, doc="estimated gain, before"),
        Column("achieved_ms", "ms", better="high", digits=3),
        Column("achieved_of_estimate", "%", "percent", "high", 0),
    ]
    reason = refusal([before, after], "time", across_gpus=across_gpus)
    if reason:
        return Table(title, columns, refused=reason)
    estimates = {r[by]: r for r in priority(before, by).rows}
    old, new = _times(before, by), _times(after, by)
    rows = []
    for key in sorted(old | new, key=lambda k: -abs(old.get(k, 0) - new.get(k, 0))):
        estimate = estimates.get(key, {})
        gained = old.get(key, 0.0) - new.get(key, 0.0)
        cells = {by: key, "before_ms": old.get(key, 0.0), "after_ms": new.get(key, 0.0), "score": estimate.get("score")}
        expected = estimate.get("gain_ms")
        cells |= {"estimated_ms": expected, "achieved_ms": gained, "achieved_of_estimate": share(gained, expected)}
        rows.append(cells)
    notes = [f"Total: {sum(old.values()) - sum(new.values()):.2f} ms of {sum(old.values()):.2f} ms gained."]
    return Table(title, columns, rows, notes)


def _times(session: Session, by: str) -> dict[str, float]:
    count = steps(session)
    return {str(name): milliseconds(group, count) for name, group in keyed(session, by).groupby("key")}

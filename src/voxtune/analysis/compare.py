"""Comparison of configurations by module or kernel class, with differences relative to the run-to-run spread."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from voxtune.analysis.certificate import refusal, window
from voxtune.analysis.counters import totals
from voxtune.analysis.frame import (
    COMPILED,
    MODULE_UNKNOWN,
    OUTSIDE_MODULES,
    family,
    gpu_name,
    labels,
    labels_on_gpu,
    module_names,
    numbers,
    ratio,
    share,
)
from voxtune.analysis.step import spread_pct, wall_samples
from voxtune.analysis.table import Column, Table

if TYPE_CHECKING:
    import pandas as pd

    from voxtune.profile.session import Session

# The page shows the ratios of more sessions on request.
RATIO_COLUMNS = 4
RATIOS = ("cycles", "instructions", "ipc", "device_ms")
QUANTITIES = {"cycles": "cycles", "instructions": "instr.", "ipc": "IPC", "device_ms": "kernel time"}


def compare_modules(sessions: Sequence[Session], depth: int | None = 2, *, across_gpus: bool = False) -> Table:
    """By module path, truncated to `depth` parts (None: full path). The first session is the baseline."""
    return _compare(sessions, "module", lambda rows: [_truncate(m, depth) for m in module_names(rows)], across_gpus)


def compare_classes(sessions: Sequence[Session], *, across_gpus: bool = False) -> Table:
    def key(rows: pd.DataFrame) -> list[str]:
        return [family(str(c)) for c in rows["class"].fillna("unknown")]

    return _compare(sessions, "class", key, across_gpus)


def _truncate(module: str, depth: int | None) -> str:
    return ".".join(module.split(".")[:depth]) or OUTSIDE_MODULES


def _compare(sessions: Sequence[Session], by: str, key: Any, across_gpus: bool) -> Table:
    names = labels(sessions)
    title = f"Time by {by}, {' and '.join(dict.fromkeys(map(gpu_name, sessions)))}"
    reason = refusal(sessions, "time", across_gpus=across_gpus)
    if reason:
        return Table(title, [], refused=reason)
    times = [_by_step(s, key) for s in sessions]
    totals = [sum(float(t.mean()) for t in by_key.values()) for by_key in times]
    spreads = [_step_spread(s) for s in sessions]
    columns = _compare_columns(by, names, labels_on_gpu(sessions))
    rows = []
    incomplete = [_partial(t) for t in times]
    keys = sorted({k for by_key in times for k in by_key}, key=lambda k: -max(_mean(f, k) or 0.0 for f in times))
    for k in keys:
        cells = [(_mean(f, k), _spread(f, k, p)) for f, p in zip(times, spreads, strict=True)]
        rows.append(_compare_row(by, k, names, cells, incomplete))
    overall = [(ms, None if p is None else ms * p / 100) for ms, p in zip(totals, spreads, strict=True)]
    rows.append(_compare_row(by, "all", names, overall, [False] * len(names)))
    notes = [
        "Device time of a mean step. ± is the larger of the row's spread over the recorded steps and the run-to-run spread "
        "(half of p20 to p80 of the step time); empty where neither was recorded."
    ]
    if any(map(_partial, times)):
        notes.append(
            f"{COMPILED} and {MODULE_UNKNOWN}: fused kernels carry no module. In the modules of such a step only convolutions "
            "are counted, so it has no ratios by module."
        )
    return Table(title, columns, rows, notes)


def _compare_columns(by: str, names: list[str], titles: list[str]) -> list[Column]:
    """Times, then ratios; spreads and differences on request."""
    shown = [
        Column(f"{n} ms", "ms", better="low", digits=1, title=title) for n, title in zip(names, titles, strict=True)
    ]
    ratios, rest = [], []
    for i, (name, title) in enumerate(zip(names, titles, strict=True)):
        rest.append(Column(f"{name} ±", "ms", digits=3, title=f"{title} ±", detail=True))
        if i:
            ratios.append(Column(f"{name} ratio", "x", better="low", digits=2, title=f"{title} ratio"))
            rest += [
                Column(f"{name} difference", "ms", "float", "low", 3, title=f"{title} difference", detail=True),
                Column(f"{name} beyond spread", kind="bool", title=f"{title} beyond spread", detail=True),
            ]
    if len(names) > RATIO_COLUMNS:
        ratios = [replace(c, detail=True) for c in ratios]
    return [Column(by, kind="text"), *shown, *ratios, *rest]


def _compare_row(
    by: str,
    key: str,
    names: list[str],
    cells: Sequence[tuple[float | None, float | None]],
    incomplete: Sequence[bool],
) -> dict[str, Any]:
    row: dict[str, Any] = {by: key}
    base, base_spread = cells[0]
    for i, (name, (ms, spread)) in enumerate(zip(names, cells, strict=True)):
        row |= {f"{name} ms": ms, f"{name} ±": spread}
        if i and ms is not None and base is not None and not incomplete[i] and not incomplete[0]:
            known = [s for s in (spread, base_spread) if s is not None]
            beyond = abs(ms - base) > math.hypot(*known) if len(known) == 2 else None
            row |= {f"{name} difference": ms - base, f"{name} ratio": ratio(ms, base), f"{name} beyond spread": beyond}
    return row


def _by_step(session: Session, key: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Time in ms per key, one value per recorded step."""
    rows = session.launches
    frame = rows[["step"]].assign(key=key(rows), ms=numbers(rows, "duration_us") / 1e3)
    wide: pd.DataFrame = frame.pivot_table(index="key", columns="step", values="ms", aggfunc="sum").fillna(0.0)
    return {str(k): np.asarray(v, dtype=float) for k, v in zip(wide.index, wide.to_numpy(), strict=True)}


def _partial(keys: Iterable[str]) -> bool:
    """Whether some time of the step has no module."""
    return any(k.startswith((COMPILED, MODULE_UNKNOWN)) for k in keys)


def _mean(by_key: dict[str, np.ndarray[Any, Any]], key: str) -> float | None:
    """None, not 0, for the modules of a step with fused kernels, whose time is unknown."""
    if key not in by_key:
        return None if _partial([*by_key, key]) else 0.0
    return float(by_key[key].mean())


def _spread(by_key: dict[str, np.ndarray[Any, Any]], key: str, run_pct: float | None) -> float | None:
    if key not in by_key:
        return None if _partial([*by_key, key]) else 0.0
    own = float(np.ptp(by_key[key]) / 2) if len(by_key[key]) > 1 else None
    run = None if run_pct is None else float(by_key[key].mean()) * run_pct / 100
    known = [s for s in (own, run) if s is not None]
    return max(known) if known else None


def _step_spread(session: Session) -> float | None:
    return spread_pct(wall_samples(session)[1])


def normalised(sessions: Sequence[Session], *, across_gpus: bool = False) -> Table:
    """Cycles, instructions, IPC (geometric mean over launches) and kernel time relative to the first session."""
    title = "Relative to the first session, whole step"
    reasons = [refusal([sessions[0], s], "few", across_gpus=across_gpus) for s in sessions]
    if all(reasons[1:]) or reasons[0]:
        return Table(title, _ratio_columns(), refused=next(filter(None, reasons)))
    sums = [totals(s) for s in sessions]
    rows = [
        {"session": name} | ({} if reason else {f"{k}_ratio": ratio(t[k], sums[0][k]) for k in RATIOS})
        for name, t, reason in zip(labels(sessions), sums, reasons, strict=True)
    ]
    return Table(title, _ratio_columns(), rows, [f"Refused: {r}" for r in reasons if r])


def side_by_side(sessions: Sequence[Session], name: str = "paper", *, across_gpus: bool = False) -> Table:
    """Ratios to the first session as a profiling window shows them, and over the whole step."""
    title = f"Profiling window ({name}) vs whole step"
    columns = [
        Column("session", kind="text"),
        Column(
            "window_time_pct", "%", "percent", digits=1, doc="share of the kernel time of the step inside the window"
        ),
        *(
            Column(f"{k}_{view}", "x baseline", digits=3, title=f"{QUANTITIES[k]}, {view}")
            for k in ("device_ms", "cycles", "instructions", "ipc")
            for view in ("window", "step")
        ),
    ]
    # Whole-step ratios require coverage: of the timeline for times, of counters for the rest.
    reasons = [refusal([sessions[0], s], "few", across_gpus=across_gpus) for s in sessions]
    untimed = [refusal([sessions[0], s], "time", across_gpus=across_gpus) for s in sessions]
    step = [totals(s) for s in sessions]
    windowed = [totals(window(s, name)) for s in sessions]
    rows = []
    for i, (label, part, full) in enumerate(zip(labels(sessions), windowed, step, strict=True)):
        row: dict[str, Any] = {"session": label, "window_time_pct": share(part["device_ms"], full["device_ms"])}
        row |= {f"{k}_window": ratio(part[k], windowed[0][k]) for k in RATIOS}
        for k in RATIOS:
            refused = (untimed if k == "device_ms" else reasons)[i]
            row[f"{k}_step"] = None if refused else ratio(full[k], step[0][k])
        rows.append(row)
    notes = [
        "Where the window and the whole step disagree, the launches in the window do not represent the step.",
        "The paper's window starts with the process and includes set-up. Sessions contain complete steps only, so here the "
        "window starts with the first step.",
    ]
    notes += [f"Whole-step ratios refused: {reason}" for reason in dict.fromkeys(filter(None, reasons))]
    return Table(title, columns, rows, notes)


def _ratio_columns() -> list[Column]:
    doc = {"ipc": "geometric mean of the IPC of all launches", "device_ms": "kernel time"}
    return [
        Column("session", kind="text"),
        *(
            Column(f"{k}_ratio", "x", "float", "none" if k == "ipc" else "low", 3, doc.get(k, ""), QUANTITIES[k])
            for k in RATIOS
        ),
    ]

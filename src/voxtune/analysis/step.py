"""The time of a step: wall, device, idle gaps, launch latency, transfers, and the overhead of profiling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from voxtune.analysis.frame import Array, labels, milliseconds, numbers, on_gpu, ratio, short, steps
from voxtune.analysis.table import Column, Table

if TYPE_CHECKING:
    import pandas as pd

    from voxtune.profile.session import Session

DIRECTIONS = ("HtoD", "DtoH", "DtoD")


def wall_samples(session: Session) -> tuple[str, Array]:
    """Wall times of the steps in ms and their source: steps without profiler if recorded, else under torch.profiler."""
    for tier in ("bare", "census"):
        samples = _timings(session, tier)
        if len(samples):
            return tier, samples
    spans = np.array([_span(rows) / 1e3 for _, rows in session.launches.groupby("step")])
    return "timeline", spans[~np.isnan(spans)]


def spread_pct(samples: Array) -> float | None:
    """Run-to-run spread: half of p20 to p80, in percent of the median. None with fewer than three samples."""
    if len(samples) < 3 or not np.median(samples):
        return None
    low, high = np.percentile(samples, [20, 80])
    return float(100 * (high - low) / 2 / np.median(samples))


def busy_us(start: Array, duration: Array) -> float:
    """Length of the union of the intervals: overlapping streams count once."""
    known = ~np.isnan(start) & ~np.isnan(duration)
    order = np.argsort(start[known], kind="stable")
    begin, end = start[known][order], (start + duration)[known][order]
    if not len(begin):
        return 0.0
    busy_until = np.maximum.accumulate(end)
    first = np.concatenate([[begin[0]], np.maximum(begin[1:], busy_until[:-1])])
    return float(np.maximum(end - first, 0).sum())


def step_totals(sessions: Sequence[Session]) -> Table:
    """One row per session; values are those of a mean step."""
    columns = [
        Column("session", kind="text"),
        Column("wall_ms", "ms", better="low", doc="median wall time of a step"),
        Column("spread_pct", "%", "percent", "low", 1, "half of p20 to p80, of the median"),
        Column(
            "wall_from",
            kind="text",
            doc="bare: no profiler; census: under torch.profiler; timeline: first start to last end",
            detail=True,
        ),
        Column("device_ms", "ms", better="low", doc="sum of the durations of all launches"),
        Column("busy_ms", "ms", better="low", doc="time with at least one launch running"),
        Column(
            "idle_ms",
            "ms",
            better="low",
            doc="span of the step minus busy time, at most wall time minus busy time",
            detail=True,
        ),
        Column("idle_pct", "%", "percent", "low", 1),
        Column("host_bound_ms", "ms", better="low", doc="idle before the host issued the next launch", detail=True),
        Column("launches", kind="int", better="low"),
        Column(
            "latency_us",
            "µs",
            better="low",
            doc="median time from launch call to start, on an idle device",
            detail=True,
        ),
        Column("peak_gib", "GiB", better="low"),
    ]
    rows = [_totals(s, label) for s, label in zip(sessions, labels(sessions), strict=True)]
    notes = ["Idle time and launch latency are not defined for sessions recorded on a CPU."]
    return Table("Step time", columns, rows, notes)


def _totals(session: Session, label: str) -> dict[str, Any]:
    source, walls = wall_samples(session)
    count = steps(session)
    peak = session.meta.get("peak_bytes")
    row: dict[str, Any] = {
        "session": label,
        "wall_ms": float(np.median(walls)) if len(walls) else None,
        "spread_pct": spread_pct(walls),
        "wall_from": source,
        "device_ms": milliseconds(session.launches, count),
        "launches": round(len(session.launches) / count),
        "peak_gib": peak / 2**30 if peak else None,
    }
    if not on_gpu(session):
        return row
    parts = [_idle(rows) for _, rows in session.launches.groupby("step")]
    span, busy, host = (float(np.mean([p[i] for p in parts])) / 1e3 for i in range(3))
    latency = np.concatenate([p[3] for p in parts])
    profiled_idle = idle = span - busy
    if source == "bare":
        # The profiler slows the host, which widens gaps: a step without it has at most wall - busy.
        idle = min(profiled_idle, max(0.0, row["wall_ms"] - busy))
    return row | {
        "busy_ms": busy,
        "idle_ms": idle,
        "idle_pct": 100 * idle / (busy + idle) if busy + idle else None,
        "host_bound_ms": host * idle / profiled_idle if profiled_idle else 0.0,
        "latency_us": float(np.median(latency)) if len(latency) else None,
    }


def _idle(rows: pd.DataFrame) -> tuple[float, float, float, Array]:
    """Span, busy and host-bound idle time in µs, and the latencies of launches on an idle device."""
    start, duration, issued = (numbers(rows, c) for c in ("start_us", "duration_us", "launch_us"))
    order = np.argsort(start, kind="stable")
    start, duration, issued = start[order], duration[order], issued[order]
    busy_until = np.maximum.accumulate(np.concatenate([[0.0], np.nan_to_num(start + duration)]))[:-1]
    gap = np.maximum(start - busy_until, 0)
    # Idle until the launch call is host-bound; from the call to the start it is launch latency.
    host = np.clip(issued - busy_until, 0, gap)
    latency = (start - issued)[(issued >= busy_until) & (gap > 0)]
    return _span(rows), busy_us(start, duration), float(np.nansum(host)), latency[~np.isnan(latency)]


def _span(rows: pd.DataFrame) -> float:
    end = numbers(rows, "start_us") + numbers(rows, "duration_us")
    if not (~np.isnan(end)).any():
        return float("nan")
    return float(np.nanmax(end) - min(0.0, np.nanmin(numbers(rows, "start_us"))))


def device_times(session: Session, host_ms: list[float]) -> list[float] | None:
    """The time on the device of moments on the host, in ms: the start of the next launch that the host issues.

    The host runs ahead of the device, by nearly a whole training step. None if launches have no such times, as on a CPU.
    """
    rows = session.launches[session.launches["step"] == session.launches["step"].min()]
    start, duration, issued = (numbers(rows, c) for c in ("start_us", "duration_us", "launch_us"))
    known = ~np.isnan(start) & ~np.isnan(issued)
    if not on_gpu(session) or not known.any():
        return None
    order = np.argsort(issued[known], kind="stable")
    issued, start_of = issued[known][order], np.maximum.accumulate(start[known][order])
    end = float(np.nanmax(start + duration))
    places = np.searchsorted(issued, np.array(host_ms) * 1e3, side="left")
    return [float(t) / 1e3 for t in np.append(start_of, end)[places]]


def gaps(session: Session, top: int = 20) -> Table:
    """Idle time of the device, by the kernel and module that ended each gap."""
    columns = [
        Column("before", kind="text", doc="the launch that ended the gap"),
        Column("module", kind="text"),
        Column("count", kind="int", better="low"),
        Column("idle_ms", "ms", better="low", digits=3),
        Column("host_bound_ms", "ms", better="low", digits=3),
    ]
    title = f"Idle gaps: {session.name}"
    if not on_gpu(session):
        return Table(title, columns, refused="recorded on a CPU, which has no launch queue")
    totals: dict[tuple[str, str], list[float]] = {}
    for _, rows in session.launches.groupby("step"):
        start, duration, issued = (numbers(rows, c) for c in ("start_us", "duration_us", "launch_us"))
        order = np.argsort(start, kind="stable")
        names, modules = rows["name"].to_numpy()[order], rows["module"].fillna("").to_numpy()[order]
        busy_until = np.maximum.accumulate(np.concatenate([[0.0], np.nan_to_num(start + duration)[order]]))[:-1]
        gap = np.maximum(start[order] - busy_until, 0)
        host = np.clip(np.nan_to_num(issued[order] - busy_until), 0, gap)
        for i in np.flatnonzero(gap > 0):
            cell = totals.setdefault((short(str(names[i])), str(modules[i])), [0, 0.0, 0.0])
            cell[0] += 1
            cell[1] += gap[i]
            cell[2] += host[i]
    count = steps(session)
    ranked = sorted(totals.items(), key=lambda item: -item[1][1])[:top]
    rows_out = [
        {"before": k[0], "module": k[1], "count": round(v[0] / count), "idle_ms": v[1] / 1e3 / count,
         "host_bound_ms": v[2] / 1e3 / count}
        for k, v in ranked
    ]  # fmt: skip
    return Table(
        title,
        columns,
        rows_out,
        [
            f"The {top} largest, mean step. Measured under the profiler, which slows the host: without it gaps are shorter."
        ],
    )


def transfers(session: Session) -> Table:
    """Copies between host and device and within the device, mean step."""
    columns = [
        Column("direction", kind="text"),
        Column("copies", kind="int", better="low"),
        Column("mib", "MiB", better="low"),
        Column("ms", "ms", better="low", digits=3),
        Column("gbs", "GB/s", better="high", digits=1),
    ]
    copies = session.launches[session.launches["kind"] == "memcpy"]
    count, rows = steps(session), []
    for direction in DIRECTIONS:
        group = copies[copies["direction"] == direction]
        moved, duration = numbers(group, "bytes"), numbers(group, "duration_us")
        size = None if len(group) and np.isnan(moved).all() else float(np.nansum(moved))
        rows.append(
            {
                "direction": direction,
                "copies": round(len(group) / count),
                "mib": None if size is None else size / 2**20 / count,
                "ms": float(np.nansum(duration)) / 1e3 / count,
                "gbs": size / np.nansum(duration) / 1e3 if size and np.nansum(duration) > 0 else None,
            }
        )
    return Table(
        f"Transfers: {session.name}",
        columns,
        rows,
        ["DtoD counts cudaMemcpy only; copies by kernels are in the layout ledger."],
    )


def overhead(sessions: Sequence[Session]) -> Table:
    """One row per session; empty for tiers that were not recorded."""
    columns = [
        Column("session", kind="text"),
        Column("bare_ms", "ms", doc="median step without profiler"),
        Column("census_ms", "ms", doc="median step under torch.profiler"),
        Column("census_pct", "%", "percent", "low", 1, "slowdown by torch.profiler"),
        Column("few", "s", better="low", digits=1, doc="one step with the few tier's counters on every launch"),
        Column("few_ratio", "x bare", better="low", digits=0),
        Column("few_a_launch", "ms", better="low", digits=1, detail=True),
        Column("full_a_launch", "s", better="low", doc="full counter set, operators run one by one", detail=True),
        Column("opcodes_a_launch", "s", better="low", doc="opcodes, operators run one by one", detail=True),
        Column("turns", "s", better="low", digits=1, doc="GPU time of all counter tiers, set-up included"),
    ]
    rows = [_row(s, label) for s, label in zip(sessions, labels(sessions), strict=True)]
    notes = [
        "Counters are read in a separate process. No time in this report comes from it.",
        "For the full set and for opcodes each launch is replayed in several passes; its memory is restored before each.",
    ]
    return Table("Profiling overhead", columns, rows, notes)


def _row(session: Session, label: str) -> dict[str, Any]:
    bare, census = (_median(_timings(session, tier)) for tier in ("bare", "census"))
    row: dict[str, Any] = {"session": label, "bare_ms": bare, "census_ms": census}
    slowdown = ratio(census, bare)
    row["census_pct"] = None if slowdown is None else 100 * (slowdown - 1)
    tiers = {name: t for name, t in session.meta["tiers"].items() if isinstance(t, dict) and t.get("counting_s")}
    per_launch = {name: ratio(t["counting_s"], t.get("read")) for name, t in tiers.items()}
    if "few" in tiers:
        row["few"] = tiers["few"]["counting_s"]
        row["few_ratio"] = ratio(1e3 * row["few"], bare)
        row["few_a_launch"] = None if per_launch["few"] is None else 1e3 * per_launch["few"]
    row |= {f"{name}_a_launch": per_launch[name] for name in ("full", "opcodes") if name in per_launch}
    seconds = [t["seconds"] for t in tiers.values() if t.get("seconds") is not None]
    return row | {"turns": sum(seconds) if seconds else None}


def _timings(session: Session, tier: str) -> Array:
    samples = numbers(session.timings[session.timings["tier"] == tier], "step_ms")
    return samples[~np.isnan(samples)]


def _median(samples: Array) -> float | None:
    return float(np.median(samples)) if len(samples) else None

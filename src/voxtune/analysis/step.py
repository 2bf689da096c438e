"""A step by the clock: time on the device, gaps in which it idled, launches and what they cost, transfers."""

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
    """The step's wall times in ms and where they come from: bare steps where recorded, else under the census."""
    for tier in ("bare", "census"):
        found = numbers(session.timings[session.timings["tier"] == tier], "step_ms")
        found = found[~np.isnan(found)]
        if len(found):
            return tier, found
    spans = np.array([_span(rows) / 1e3 for _, rows in session.launches.groupby("step")])
    return "timeline", spans[~np.isnan(spans)]


def spread_pct(samples: Array) -> float | None:
    """Run-to-run spread: half the distance from p20 to p80, in percent of the median. None below three samples."""
    if len(samples) < 3 or not np.median(samples):
        return None
    low, high = np.percentile(samples, [20, 80])
    return float(100 * (high - low) / 2 / np.median(samples))


def busy_us(start: Array, duration: Array) -> float:
    """Length of the union of intervals: two streams at work at once count once."""
    known = ~np.isnan(start) & ~np.isnan(duration)
    order = np.argsort(start[known], kind="stable")
    begin, end = start[known][order], (start + duration)[known][order]
    if not len(begin):
        return 0.0
    reach = np.maximum.accumulate(end)
    first = np.concatenate([[begin[0]], np.maximum(begin[1:], reach[:-1])])
    return float(np.maximum(end - first, 0).sum())


def step_totals(sessions: Sequence[Session]) -> Table:
    """One row a session, all figures a mean step."""
    columns = [
        Column("session", kind="text"),
        Column("wall_ms", "ms", better="low", doc="median wall time of a step"),
        Column("spread_pct", "%", "percent", "low", 1, "half of p20 to p80 over the median"),
        Column(
            "wall_from", kind="text", doc="bare: no profiler; census: under torch.profiler; timeline: from its ends"
        ),
        Column("device_ms", "ms", better="low", doc="sum of all launches"),
        Column("busy_ms", "ms", better="low", doc="union of all launches: some work was on the device"),
        Column("idle_ms", "ms", better="low", doc="step's span less busy; no more than a bare step leaves"),
        Column("idle_pct", "%", "percent", "low", 1),
        Column("host_bound_ms", "ms", better="low", doc="idle while the next launch had not been asked for"),
        Column("launches", kind="int", better="low"),
        Column("latency_us", "µs", better="low", doc="median of start less request, of launches on an idle device"),
        Column("peak_gib", "GiB", better="low"),
    ]
    rows = [_totals(s, label) for s, label in zip(sessions, labels(sessions), strict=True)]
    notes = ["Idle time and latency are null on a CPU: operators nest, there is no queue."]
    return Table("The step", columns, rows, notes)


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
    seen = idle = span - busy
    if source == "bare":
        # The profiler slows the host: of the gaps on its timeline only what a bare step has room for is the step's own.
        idle = min(seen, max(0.0, row["wall_ms"] - busy))
    return row | {
        "busy_ms": busy,
        "idle_ms": idle,
        "idle_pct": 100 * idle / (busy + idle) if busy + idle else None,
        "host_bound_ms": host * idle / seen if seen else 0.0,
        "latency_us": float(np.median(latency)) if len(latency) else None,
    }


def _idle(rows: pd.DataFrame) -> tuple[float, float, float, Array]:
    """Span, busy and host-bound idle in µs, and the latencies of launches that met an idle device."""
    start, duration, asked = (numbers(rows, c) for c in ("start_us", "duration_us", "launch_us"))
    order = np.argsort(start, kind="stable")
    start, duration, asked = start[order], duration[order], asked[order]
    reach = np.maximum.accumulate(np.concatenate([[0.0], np.nan_to_num(start + duration)]))[:-1]
    gap = np.maximum(start - reach, 0)
    # The device idled because the host was late, up to the request; after it, that is the launch's own latency.
    host = np.clip(asked - reach, 0, gap)
    latency = (start - asked)[(asked >= reach) & (gap > 0)]
    return _span(rows), busy_us(start, duration), float(np.nansum(host)), latency[~np.isnan(latency)]


def _span(rows: pd.DataFrame) -> float:
    end = numbers(rows, "start_us") + numbers(rows, "duration_us")
    if not (~np.isnan(end)).any():
        return float("nan")
    return float(np.nanmax(end) - min(0.0, np.nanmin(numbers(rows, "start_us"))))


def gaps(session: Session, top: int = 20) -> Table:
    """Where the device idled: before which kernel, in which module."""
    columns = [
        Column("before", kind="text", doc="the launch that ended the gap"),
        Column("module", kind="text"),
        Column("count", kind="int", better="low"),
        Column("idle_ms", "ms", better="low", digits=3),
        Column("host_bound_ms", "ms", better="low", digits=3),
    ]
    title = f"Gaps in which the device idled: {session.name}"
    if not on_gpu(session):
        return Table(title, columns, refused="recorded on a CPU: operators nest, there is no queue to run dry")
    found: dict[tuple[str, str], list[float]] = {}
    for _, rows in session.launches.groupby("step"):
        start, duration, asked = (numbers(rows, c) for c in ("start_us", "duration_us", "launch_us"))
        order = np.argsort(start, kind="stable")
        names, modules = rows["name"].to_numpy()[order], rows["module"].fillna("").to_numpy()[order]
        reach = np.maximum.accumulate(np.concatenate([[0.0], np.nan_to_num(start + duration)[order]]))[:-1]
        gap = np.maximum(start[order] - reach, 0)
        host = np.clip(np.nan_to_num(asked[order] - reach), 0, gap)
        for i in np.flatnonzero(gap > 0):
            cell = found.setdefault((short(str(names[i])), str(modules[i])), [0, 0.0, 0.0])
            cell[0] += 1
            cell[1] += gap[i]
            cell[2] += host[i]
    count = steps(session)
    ranked = sorted(found.items(), key=lambda item: -item[1][1])[:top]
    rows_out = [
        {"before": k[0], "module": k[1], "count": round(v[0] / count), "idle_ms": v[1] / 1e3 / count,
         "host_bound_ms": v[2] / 1e3 / count}
        for k, v in ranked
    ]  # fmt: skip
    return Table(
        title,
        columns,
        rows_out,
        [f"The {top} largest, a mean step. Seen under the profiler, which slows the host: a bare step's are shorter."],
    )


def transfers(session: Session) -> Table:
    """Copies between host and device and within the device, a mean step."""
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
        some = copies[copies["direction"] == direction]
        moved, took = numbers(some, "bytes"), numbers(some, "duration_us")
        size = None if len(some) and np.isnan(moved).all() else float(np.nansum(moved))
        rows.append(
            {
                "direction": direction,
                "copies": round(len(some) / count),
                "mib": None if size is None else size / 2**20 / count,
                "ms": float(np.nansum(took)) / 1e3 / count,
                "gbs": size / np.nansum(took) / 1e3 if size and np.nansum(took) > 0 else None,
            }
        )
    return Table(
        f"Transfers: {session.name}", columns, rows, ["DtoD here is cudaMemcpy; copies by kernels are in the ledger."]
    )


def overhead(sessions: Sequence[Session]) -> Table:
    """One row a session; what a tier costs is empty where it was not recorded."""
    columns = [
        Column("session", kind="text"),
        Column("bare_ms", "ms", doc="median of steps without a profiler"),
        Column("census_ms", "ms", doc="median of steps under torch.profiler"),
        Column("census_pct", "%", "percent", "low", 1, "what the census adds to a bare step"),
        Column("few", "s", better="low", digits=1, doc="one step with the few counters on every launch"),
        Column("few_ratio", "x bare", better="low", digits=0),
        Column("few_a_launch", "ms", better="low", digits=1),
        Column("full_a_launch", "s", better="low", doc="the full set, operators run alone"),
        Column("opcodes_a_launch", "s", better="low", doc="opcodes, operators run alone"),
        Column("turns", "s", better="low", digits=1, doc="turns on the GPU of all counters, set-up included"),
    ]
    rows = [_row(s, label) for s, label in zip(sessions, labels(sessions), strict=True)]
    notes = [
        "Counters are read in a process of their own: no time of the step, of a kernel or of a class comes from it.",
        "A launch under the full set or the opcodes is replayed in several passes, with its memory put back before each.",
    ]
    return Table("What profiling costs", columns, rows, notes)


def _row(session: Session, label: str) -> dict[str, Any]:
    bare, census = (_median(session, tier) for tier in ("bare", "census"))
    row: dict[str, Any] = {"session": label, "bare_ms": bare, "census_ms": census}
    slower = ratio(census, bare)
    row["census_pct"] = None if slower is None else 100 * (slower - 1)
    turns = {t: told for t, told in session.meta["tiers"].items() if isinstance(told, dict) and told.get("counting_s")}
    each = {t: ratio(told["counting_s"], told.get("read")) for t, told in turns.items()}
    if "few" in turns:
        row["few"] = turns["few"]["counting_s"]
        row["few_ratio"] = ratio(1e3 * row["few"], bare)
        row["few_a_launch"] = None if each["few"] is None else 1e3 * each["few"]
    row |= {f"{t}_a_launch": each[t] for t in ("full", "opcodes") if t in each}
    spent = [told["seconds"] for told in turns.values() if told.get("seconds") is not None]
    return row | {"turns": sum(spent) if spent else None}


def _median(session: Session, tier: str) -> float | None:
    found = numbers(session.timings[session.timings["tier"] == tier], "step_ms")
    found = found[~np.isnan(found)]
    return float(np.median(found)) if len(found) else None

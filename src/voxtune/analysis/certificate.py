"""Certificate of coverage: how much of its step a session recorded. Ratios between incomplete sessions are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from voxtune.analysis.frame import gpu_name, kernels, numbers, short, text
from voxtune.analysis.mix import opcode_coverage_pct
from voxtune.analysis.table import Column, Table
from voxtune.errors import InputError
from voxtune.profile import schema

if TYPE_CHECKING:
    from voxtune.profile.session import Session

THRESHOLD_PCT = 99.0
PHASES = {"train": ("forward", "backward", "optimizer"), "sample": ("forward",)}
# Name -> (kernels skipped, kernels profiled). "paper": Nsight Compute's options in Ryoo et al., ICPE 2026.
WINDOWS = {"paper": (10, 100)}
Level = Literal["time", "few", "full"]


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """Shares in percent of kernels. `census` lists what is missing from the timeline."""

    few_launches_pct: float
    few_time_pct: float
    full_launches_pct: float
    full_time_pct: float
    phases: tuple[str, ...]
    census: tuple[str, ...] = field(default=())

    def reasons(self, level: Level) -> list[str]:
        """Why the session cannot support ratios of times, of the few counters, or of the full set."""
        reasons = list(self.census)
        reached = {"time": 100.0, "few": self.few_time_pct, "full": self.full_time_pct}[level]
        if reached < THRESHOLD_PCT:
            kind = "full counter set" if level == "full" else "counters"
            reasons.append(f"{kind} on {reached:.1f} % of step time; {THRESHOLD_PCT:g} % required")
        return reasons

    def covers(self, level: Level = "few") -> bool:
        return not self.reasons(level)


def certify(session: Session) -> Certificate:
    kernel_rows = kernels(session)
    time = numbers(kernel_rows, "duration_us")
    tier = text(kernel_rows, "counter_tier")
    few, full = tier.isin(["few", "full"]).to_numpy(bool), (tier == "full").to_numpy(bool)
    phases = tuple(
        p for p in ("forward", "backward", "optimizer", "transfer") if (session.launches["phase"] == p).any()
    )
    return Certificate(
        few_launches_pct=_pct(few.sum(), len(kernel_rows)),
        few_time_pct=_pct(np.nansum(time[few]), np.nansum(time)),
        full_launches_pct=_pct(full.sum(), len(kernel_rows)),
        full_time_pct=_pct(np.nansum(time[full]), np.nansum(time)),
        phases=phases,
        census=tuple(_census(session, phases)),
    )


def tier_shares(session: Session) -> dict[str, float]:
    """Percent of kernel time with the counters of each tier."""
    certified = certify(session)
    opcodes = 0.0 if session.opcodes.empty else opcode_coverage_pct(session) or 0.0
    return {"few": certified.few_time_pct, "full": certified.full_time_pct, "opcodes": opcodes}


def _census(session: Session, phases: tuple[str, ...]) -> list[str]:
    rows, mode = session.launches, session.meta.get("mode")
    if rows.empty:
        return ["no launch was recorded"]
    reasons = []
    if session.meta.get("window"):
        reasons.append(f"only {_describe(session.meta['window'])} of the step")
    missing = [p for p in PHASES.get(str(mode), ("forward",)) if p not in phases]
    if missing:
        reasons.append(f"no {' and no '.join(missing)} phase recorded")
    if rows["step"].isna().any() or (rows["step"] < 0).any():
        reasons.append("launches include set-up")
    sizes = rows.groupby("step")["index"].agg(["min", "max", "nunique"])
    if not session.meta.get("window") and ((sizes["min"] != 0) | (sizes["max"] + 1 != sizes["nunique"])).any():
        reasons.append("launches are missing inside a step")
    counts = sizes["nunique"]
    # Complete steps differ by a few launches at most (a random branch, a fill by the allocator).
    if len(counts) > 1 and counts.min() < 0.95 * counts.max():
        reasons.append(f"steps of {counts.min()} and {counts.max()} launches: one is incomplete")
    return reasons


def certificate(session: Session) -> Table:
    """The certificate as a table; `extra` has covers (counters), covers_time (timeline only) and the reasons."""
    certified = certify(session)
    window = session.meta.get("window")
    rows: list[dict[str, Any]] = [
        _check(
            "kernels with the small counter set, by time",
            certified.few_time_pct,
            certified.few_time_pct >= THRESHOLD_PCT,
        ),
        _check("kernels with the small counter set, by launches", certified.few_launches_pct, None),
        _check(
            "kernels with the full counter set, by time",
            certified.full_time_pct,
            certified.full_time_pct >= THRESHOLD_PCT,
        ),
        _check("kernels with the full counter set, by launches", certified.full_launches_pct, None),
    ]
    census = " ".join(certified.census)
    rows += [
        _check("phases recorded: " + (", ".join(certified.phases) or "none"), None, "phase recorded" not in census),
        _check("set-up excluded", None, "set-up" not in census),
        _check("complete steps", None, not window and "incomplete" not in census and "missing" not in census),
    ]
    columns = [
        Column("check", kind="text"),
        Column("share", "%", "percent", "high", 2),
        Column("passed", kind="bool", better="high"),
    ]
    reasons = certified.reasons("few")
    extra = {
        "covers": not reasons,
        "covers_time": certified.covers("time"),
        "covers_full": certified.covers("full"),
        "reasons": reasons,
        "window": window,
        "threshold_pct": THRESHOLD_PCT,
    }
    notes = ["Copies and fills have no counters and are not part of the shares. Their time is in the transfer table."]
    return Table(f"Certificate of coverage: {session.name}", columns, rows, notes, extra=extra)


def readings(session: Session) -> Table:
    """How the full counter set of each launch was read, one row per signature: kernel, grid, block, module class, shapes.

    Launches that share one reading are weighted by their number and time: the set was read on one of them.
    """
    columns = [
        Column("kernel", kind="text"),
        Column("grid", kind="text"),
        Column("module_type", kind="text", title="module class"),
        Column("shapes", kind="text", detail=True),
        Column("launches", kind="int", doc="of a mean step"),
        Column("read", kind="int", doc="launches on which the full set was read"),
        Column("counted", kind="text", doc="how the counters of these launches were obtained"),
        Column("share", "%", "percent", digits=2, doc="of kernel time"),
    ]
    rows = kernels(session)
    count = max(1, session.launches["step"].nunique())
    full = text(rows, "counter_tier") == "full"
    own = [c.name for c in schema.FULL if c.type == "float64" and c.name in rows.columns]
    values = rows[own].to_numpy(dtype=float, na_value=np.nan)
    keys = ["name", "grid", "block", "module_type", "op_shapes"]
    marked = (
        rows[keys]
        .fillna("")
        .assign(
            us=numbers(rows, "duration_us"),
            reading=[hash(v.tobytes()) if f else None for v, f in zip(values, full, strict=True)],
        )
    )
    total, out = float(np.nansum(marked["us"])) or 1.0, []
    for (name, grid, _, module_type, shapes), group in marked.groupby(keys, sort=False):
        launches, read = round(len(group) / count), group["reading"].dropna().nunique()
        known = int(group["reading"].notna().sum())
        counted = (
            "not counted" if not read else "each launch" if read >= launches else f"weighted: {read} of {launches}"
        )
        if read and known < len(group):
            counted += f", {len(group) - known} of {len(group)} over all steps not counted"
        cells = {"kernel": short(str(name)), "grid": grid, "module_type": module_type, "shapes": shapes}
        share = 100 * float(np.nansum(group["us"])) / total
        out.append(cells | {"launches": launches, "read": min(read, launches), "counted": counted, "share": share})
    out.sort(key=lambda r: -r["share"])
    weighted = sum(r["share"] for r in out if r["counted"].startswith("weighted"))
    once = sum(r["share"] for r in out if r["counted"].startswith("each"))
    notes = [
        f"Full counter set, of kernel time: {once:.1f} % read on each launch, {weighted:.1f} % weighted (read on one launch of "
        "the same kernel, grid, module class and shapes), the rest not counted."
    ]
    title = f"Readings of the full counter set: {session.name}"
    return Table(title, columns, out, notes, extra={"each_pct": once, "weighted_pct": weighted})


def refusal(sessions: Sequence[Session], level: Level, *, across_gpus: bool = False) -> str | None:
    """Why ratios between these sessions are refused, or None if each covers its step, and all have the same GPU.

    `across_gpus` allows ratios between sessions of several GPUs.
    """
    gpus = list(dict.fromkeys(map(gpu_name, sessions)))
    if len(gpus) > 1 and not across_gpus:
        return f"sessions of several GPUs ({', '.join(gpus)}). Ratios across GPUs require --across-gpus."
    for session in sessions:
        reasons = certify(session).reasons(level)
        if reasons:
            return f"{session.name} does not cover its step: {'; '.join(reasons)}. Ratios to it are refused."
    return None


def parse_window(text: str) -> tuple[int, int]:
    """(skip, count) of a named window, or of "SKIP:COUNT"."""
    if text in WINDOWS:
        return WINDOWS[text]
    skip, _, count = text.partition(":")
    if not all(part.isascii() and part.isdigit() and len(part) <= 9 for part in (skip, count)) or int(count) < 1:
        raise InputError(
            f"unknown window {text[:80]!r}; choose from {', '.join(WINDOWS)}, or give SKIP:COUNT such as 10:100"
        )
    return int(skip), int(count)


def window(session: Session, name: str = "paper") -> Session:
    """The session restricted to a profiling window of its first step; "paper" is kernels 11 to 110.

    As in Nsight Compute, the window counts kernels, not copies. The paper's window starts with its process and includes
    set-up, which sessions do not contain.
    """
    skip, count = parse_window(name)
    rows = session.launches
    first = rows[(rows["step"] == rows["step"].min()) & rows["kind"].isin(["kernel", "cpu_op"])].sort_values("index")
    selected = first.iloc[skip : skip + count].reset_index(drop=True)
    mark = {"name": name, "skip": skip, "count": count, "kept": len(selected), "of": len(first)}
    return replace(session, meta={**session.meta, "window": mark}, launches=selected, memory=session.memory.iloc[:0])


def _describe(mark: Any) -> str:
    if isinstance(mark, dict) and "skip" in mark:
        return f"launches {mark['skip'] + 1} to {mark['skip'] + mark.get('kept', mark['count'])}"
    return f"the launches {mark}"


def _check(name: str, pct: float | None, passed: bool | None) -> dict[str, Any]:
    return {"check": name, "share": pct, "passed": passed}


def _pct(part: float, total: float) -> float:
    return float(100 * part / total) if total else 0.0

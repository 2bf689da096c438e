"""Builds the report of sessions: all sections in reading order, with values from voxtune.analysis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from voxtune.analysis.certificate import certify
from voxtune.analysis.certificate import window as cut
from voxtune.analysis.compiled import with_modules
from voxtune.analysis.frame import kernels, labels
from voxtune.analysis.step import step_totals
from voxtune.analysis.table import Table
from voxtune.errors import InputError
from voxtune.report.charts import MODES
from voxtune.report.document import Document, Fact, Section
from voxtune.report.numbers import MISSING, clip, cudnn_version, number
from voxtune.report.sections import comparison, counters, findings, step, summary

if TYPE_CHECKING:
    from voxtune.analysis.table import Table
    from voxtune.profile.session import Session

Make = Callable[[Sequence[str], Sequence["Session"]], Section]

# Sections about each session.
PER_SESSION: tuple[Make, ...] = (
    step.step_time,
    step.mix,
    step.phases,
    step.modules,
    step.timeline,
    findings.ledger,
    findings.precision,
    step.memory,
    findings.roofline,
    counters.instructions,
    counters.ipc,
    counters.pipes,
    counters.caches,
    counters.warps,
    counters.stalls,
    counters.priorities,
    step.components,
)
# Sections about all sessions together, without profiling windows.
ACROSS_SESSIONS: tuple[Make, ...] = (
    comparison.networks,
    comparison.study,
    comparison.advice,
    findings.coverage,
    findings.environment,
)


def build(sessions: Sequence[Session], *, window: str | None = None, across_gpus: bool = False) -> Document:
    """`window` ("paper" or "SKIP:COUNT") adds each session restricted to that profiling window.

    `across_gpus` compares sessions of several GPUs, which are otherwise compared per GPU.
    """
    if not sessions:
        raise InputError("no sessions given; record one with voxtune profile")
    for session in sessions:
        if kernels(session).empty:
            raise InputError(f"session {session.name!r} contains no kernels or operators; record it again")
    sessions = with_modules(sessions)
    complete, names = list(sessions), labels(sessions)
    if window is not None:
        sessions = [view for s in complete for view in (s, _windowed(s, window))]
    all_names = labels(sessions)
    sections = [
        summary.summary(names, complete),
        *(make(all_names, sessions) for make in PER_SESSION),
        comparison.comparison(names, complete, across_gpus=across_gpus),
        comparison.windows(names, complete, across_gpus=across_gpus),
        *(make(names, complete) for make in ACROSS_SESSIONS),
    ]
    return Document(
        title=_title(sessions),
        subtitle=_subtitle(sessions),
        facts=_facts(complete),
        badges=[findings.badge(n, s) for n, s in zip(all_names, sessions, strict=True)],
        coverage=findings.coverage_badges(names, complete),
        sections=sections,
    )


def _windowed(session: Session, name: str) -> Session:
    part = cut(session, name)
    part.meta["name"] = f"{session.name}, {name} window"
    return part


def _values(sessions: Sequence[Session], read: Callable[[dict[str, Any]], Any]) -> list[str]:
    values = (read(s.meta) for s in sessions)
    return list(dict.fromkeys(str(v) for v in values if v not in (None, "")))


def _environment(sessions: Sequence[Session], key: str) -> list[str]:
    return _values(sessions, lambda meta: meta["environment"].get(key))


def _title(sessions: Sequence[Session]) -> str:
    work = " and ".join(_values(sessions, lambda m: m.get("workload") or m["name"]))
    modes = " and ".join(_values(sessions, lambda m: MODES.get(m["mode"], m["mode"])))
    return f"{work}: {modes} step"


def _subtitle(sessions: Sequence[Session]) -> str:
    gpus = " and ".join(_environment(sessions, "gpu")) or "a CPU"
    sizes = " and ".join(_values(sessions, lambda m: _size(m.get("size"))))
    versions = [
        f"{label} {' and '.join(cudnn_version(v) if key == 'cudnn' else v for v in versions)}"
        for key, label in (("torch", "PyTorch"), ("cuda", "CUDA"), ("cudnn", "cuDNN"))
        if (versions := _environment(sessions, key))
    ]
    created = sorted(_values(sessions, lambda m: str(m.get("created") or "")[:10]))
    parts = [f"{len(sessions)} recorded configuration{'s' if len(sessions) > 1 else ''} on {gpus}"]
    parts += [sizes] if sizes else []
    parts += [", ".join(versions)] if versions else []
    parts += (
        [f"recorded {created[0]}" if created[0] == created[-1] else f"recorded {created[0]} to {created[-1]}"]
        if created
        else []
    )
    return "; ".join(parts) + "."


def _size(size: Any) -> str | None:
    return " × ".join(str(v) for v in size) if isinstance(size, list) and size else None


def _facts(sessions: Sequence[Session]) -> list[Fact]:
    """The headline: step times, launches, coverage of counters, peak memory."""
    table = step_totals(sessions)
    facts = _walls(sessions, table)
    launches = sorted({r["launches"] for r in table.rows})
    facts.append(Fact(label="Launches per step", value=_range(launches, 0)))
    covered = [round(certify(s).few_time_pct, 1) for s in sessions]
    some = sorted(c for c in covered if c)
    note = "of step time" if len(some) == len(covered) else f"of step time, in {len(some)} of {len(covered)} sessions"
    share = f"{_range(some, 1)} %" if some else "none"
    facts.append(Fact(label="Small counter set", value=share, note=note if some else _why(sessions)))
    peaks = sorted({r["peak_gib"] for r in table.rows if r["peak_gib"] is not None})
    facts.append(Fact(label="Peak memory", value=f"{_range([float(p) for p in peaks], 1)} GiB" if peaks else MISSING))
    return facts


def _why(sessions: Sequence[Session]) -> str:
    """Why the sessions have no counters."""
    reasons = _values(sessions, lambda m: (m["tiers"].get("few") or {}).get("why"))
    return clip(reasons[0], 90) if reasons else "none were recorded"


def _walls(sessions: Sequence[Session], table: Table) -> list[Fact]:
    """The fastest and the slowest step; the range per mode if both training and sampling were recorded."""
    modes: dict[str, list[dict[str, Any]]] = {}
    for session, row in zip(sessions, table.rows, strict=True):
        if row["wall_ms"] is not None:
            modes.setdefault(session.meta["mode"], []).append(row)
    for rows in modes.values():
        rows.sort(key=lambda r: r["wall_ms"])
    if len(modes) > 1:
        return [
            Fact(
                label=f"{MODES.get(mode, mode).capitalize()} step",
                value=f"{_range([rows[0]['wall_ms'], rows[-1]['wall_ms']], 1)} ms",
                note=f"fastest: {rows[0]['session'].removeprefix(f'{mode} ')}",
            )
            for mode, rows in modes.items()
        ]
    timed = next(iter(modes.values()), [])
    facts = [_wall("Fastest step" if len(timed) > 1 else "Step", timed[0])] if timed else []
    return [*facts, _wall("Slowest step", timed[-1])] if len(timed) > 1 else facts


def _wall(label: str, row: dict[str, Any]) -> Fact:
    spread = "" if row["spread_pct"] is None else f" ± {number(row['spread_pct'], 1)} %"
    return Fact(label=label, value=f"{number(row['wall_ms'], 1)} ms", note=f"{row['session']}{spread}")


def _range(values: Sequence[float | int], digits: int) -> str:
    ends = list(dict.fromkeys(number(v, digits) for v in (values[0], values[-1])))
    return " to ".join(ends)


TITLES = {
    4: "IPC stacks",
    5: "priority scores",
    6: "kernel mix",
    7: "instruction mix",
    8: "kernel mix by configuration",
    9: "instruction mix by configuration",
    10: "pipe utilisation and SM throughput",
    11: "cache hit rates and DRAM",
    12: "active warps",
    13: "stalls",
}


def by_figure(table: Table) -> list[Table]:
    """The study table split into one table per figure of the paper; the last one keeps the notes."""
    if table.refused:
        return [table]
    columns = [c for c in table.columns if c.name != "figure"]
    out = []
    for figure in sorted({r["figure"] for r in table.rows}):
        rows = [{c.name: r[c.name] for c in columns} for r in table.rows if r["figure"] == figure]
        out.append(Table(f"Figure {figure}: {TITLES.get(figure, 'stated in the text')}", columns, rows))
    if out:
        out[-1].notes = list(table.notes)
    return out

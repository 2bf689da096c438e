"""Sections from hardware counters: instructions, IPC, pipes, caches, warps, stalls, priorities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from voxtune.analysis import counters
from voxtune.analysis.mix import PAPER_GROUPS, instruction_mix, ipc_stack
from voxtune.analysis.priority import priority
from voxtune.analysis.traffic import traffic
from voxtune.report.charts import (
    bars_from_rows,
    block,
    coverage_note,
    grouped_bars,
    mode_of,
    not_recorded,
    overview,
    present,
    stacked_bars,
)
from voxtune.report.document import Block, Section
from voxtune.report.figure import Bars, Series
from voxtune.report.palette import CLASSES
from voxtune.report.sections.comparison import comparable

if TYPE_CHECKING:
    from voxtune.analysis.table import Table
    from voxtune.profile.session import Session

OVERALL = {"class": "overall"}
# Names of the parts of DRAM traffic, and the kernel classes that give their colours.
TRAFFIC = (
    ("convolutions", "conv_fprop"),
    ("norms", "norm"),
    ("layout, copies, casts", "layout"),
    ("elementwise", "elementwise"),
    ("fused (Triton)", "triton"),
    ("other", "unknown"),
)


def instructions(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    tables = {n: instruction_mix(s) for n, s in zip(names, sessions, strict=True)}
    pipes = {n: instruction_mix(s, "pipe") for n, s in zip(names, sessions, strict=True)}
    figure = stacked_bars(
        tables, id="instructions-share", title="Instructions by group", key="group", value="share", unit="%"
    )

    def one(session: Session, i: int) -> list[Block]:
        if tables[names[i]].refused:
            return [not_recorded(session, "opcodes", "Opcodes")]
        return [block("instructions", tables[names[i]], i), block("instructions", pipes[names[i]], i, part="pipes")]

    lead = "Executed warp instructions of a step, by group and by execution pipe."
    return overview("instructions", "Instruction mix", lead, [figure], names, sessions, one, "opcodes")


def ipc(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    groups = [f"{k}_ipc" for k in PAPER_GROUPS]
    totals = [counters.totals(s) for s in sessions]
    series = [
        Series(name="geometric mean over launches (as in the paper)", values=[t["ipc"] for t in totals]),
        Series(name="weighted by active cycles", values=[t["ipc_weighted"] for t in totals]),
    ]
    overall = Bars(
        id="ipc-overall", title="Instructions per cycle, overall", labels=list(names), series=series, unit="IPC"
    )
    known = any(v is not None for s in series for v in s.values)

    def one(session: Session, i: int) -> list[Block]:
        table = ipc_stack(session)
        if table.refused:
            return [not_recorded(session, "few", "Cycles and instructions")]
        title = "IPC of the kernels with the most cycles, by instruction group"
        figure = bars_from_rows(
            table, id=f"ipc-{i}", title=title, key="kernel", values=groups, unit="IPC", stacked=True
        )
        for part in figure.series if figure else []:
            part.name = part.name.removesuffix(" ipc")
        return [*present(_recoloured(figure)), block("ipc", table, i, folded=True)]

    lead = "Instructions per cycle and SM. A high IPC does not imply high performance: layout copies reach it too."
    return overview("ipc", "IPC", lead, [overall if known else None], names, sessions, one)


def _recoloured(figure: Bars | None) -> Bars | None:
    if figure is None:
        return None
    parts = [Series(name=s.name, values=s.values) for s in figure.series if any(s.values)]
    return Bars(**{**vars(figure), "series": parts}) if parts else None


def _counter_section(
    id: str,
    title: str,
    lead: str,
    values: Sequence[str],
    unit: str,
    analyse: Callable[[Session], Table],
    names: Sequence[str],
    sessions: Sequence[Session],
    tier: str = "full",
) -> Section:
    """All sessions overall, then each session by kernel class."""
    tables = {n: analyse(s) for n, s in zip(names, sessions, strict=True)}
    heading = _heading(title, names, sessions)
    overall = grouped_bars(tables, id=f"{id}-overall", title=heading, row=OVERALL, values=values, unit=unit)

    def one(session: Session, i: int) -> list[Block]:
        table = tables[names[i]]
        figure = bars_from_rows(
            table, id=f"{id}-{i}", title=f"{title} by kernel class", key="class", values=values, unit=unit, digits=1
        )
        if figure is None:
            return [not_recorded(session, tier, f"{title} counters")]
        return [figure, block(id, table, i, folded=True)]

    return overview(id, title, lead, [overall], names, sessions, one, "full")


def _heading(title: str, names: Sequence[str], sessions: Sequence[Session]) -> str:
    part = "launches with counters" if coverage_note(names, sessions, "full") else "whole step"
    return f"{title}, {part}"


def pipes(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    lead = (
        "Utilisation of the tensor, FMA and integer pipes in percent of peak over elapsed time. Tensor pipe counters are read "
        "on every launch."
    )
    return _counter_section(
        "pipes", "Pipe utilisation", lead, counters.UTILISATION, "%", counters.utilisation, names, sessions, "few"
    )


def caches(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    state = sessions[0].meta.get("cache_control") or "not recorded"
    lead = (
        "Hit rates and DRAM traffic. DRAM throughput comes from bytes counted on every launch. Cache control of the profiler: "
        f"{state}."
    )
    section = _counter_section(
        "caches", "Caches and DRAM", lead, counters.CACHES, "%", counters.caches, names, sessions
    )
    for place, group in enumerate(comparable(sessions).values()):
        table = traffic(group)
        if table.refused:
            continue
        figure = bars_from_rows(
            table,
            id=f"caches-traffic-{place}",
            title=f"DRAM traffic of a step by kernel class: {mode_of(group[0])}",
            key="session",
            values=[c.name for c in table.columns if c.name.endswith("_gb")],
            unit="GB",
            digits=1,
            stacked=True,
        )
        if figure:
            parts = [
                Series(name=n, values=s.values, colour=CLASSES[c])
                for s, (n, c) in zip(figure.series, TRAFFIC, strict=True)
            ]
            figure = Bars(**{**vars(figure), "series": [p for p in parts if any(p.values)], "mode": mode_of(group[0])})
        section.blocks += [*present(figure), block("caches", table, place, part="traffic")]
    return section


def warps(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    lead = "Active warps per SM and active cycle."
    return _counter_section("warps", "Active warps", lead, ("warps_active",), "warps", counters.warps, names, sessions)


def stalls(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    tables = {n: counters.stalls(s) for n, s in zip(names, sessions, strict=True)}
    reasons = list(dict.fromkeys(c.name for t in tables.values() for c in t.columns if c.name.startswith("stall_")))[:8]
    heading = _heading("Stalls", names, sessions)
    figure = grouped_bars(
        tables, id="stalls-overall", title=heading, row=OVERALL, values=reasons, unit="warps per issue"
    )
    if figure:
        figure.stacked, figure.caption = True, "The eight largest stall reasons."

    def one(session: Session, i: int) -> list[Block]:
        table = tables[names[i]]
        if table.refused:
            return [not_recorded(session, "full", "Stall counters")]
        return [block("stalls", table, i)]

    lead = "Stalled warps per issued instruction, by stall reason."
    return overview("stalls", "Stalls", lead, [figure], names, sessions, one, "full")


def priorities(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    def one(session: Session, i: int) -> list[Block]:
        table = priority(session)
        if table.refused:
            return [not_recorded(session, "full", "Estimated speed-ups")]
        figure = bars_from_rows(
            table,
            id=f"priority-{i}",
            title="Score and estimated gain by kernel class",
            key="class",
            values=("score", "gain_ms"),
            unit="ms",
        )
        return [
            *present(figure),
            block("priority", table, i),
            block("priority", priority(session, "kernel"), i, part="kernels"),
        ]

    lead = (
        "The paper's score is duration times estimated speed-up. The gain is the time saved if the estimate is right, bounded "
        "by SM and memory throughput."
    )
    return overview("priority", "Priority scores", lead, [], names, sessions, one)

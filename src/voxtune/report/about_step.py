"""Sections about the step by the clock: its time, what it is made of, where in the network, when, and in what memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from voxtune.analysis.components import component_table, transfer_breakdown
from voxtune.analysis.memory import memory_peak, memory_timeline
from voxtune.analysis.mix import kernel_mix, kernel_shares
from voxtune.analysis.overhead import overhead
from voxtune.analysis.step import gaps, step_totals, transfers
from voxtune.analysis.table import Table
from voxtune.report import raw
from voxtune.report.document import Block, Section
from voxtune.report.figure import Area, Bars, Series, Tree
from voxtune.report.shape import PHASES, apart, block, missing, overview, stacked

if TYPE_CHECKING:
    from voxtune.profile.session import Session

OUTSIDE = "(outside its modules)"


def step_time(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    table = step_totals(sessions)
    return Section(
        id="time",
        title="Step time",
        lead="Median wall time of a whole step; the whisker is the run-to-run spread, half of p20 to p80 either side.",
        blocks=[
            *(b for f in (_walls(table), _busy(table)) if f is not None for b in apart(f, names, sessions)),
            block("time", table),
            block("time", overhead(sessions), part="overhead"),
        ],
    )


def _walls(table: Table) -> Bars | None:
    walls, spreads = table.column("wall_ms"), table.column("spread_pct")
    if all(w is None for w in walls):
        return None
    half = [None if w is None or s is None else w * s / 100 for w, s in zip(walls, spreads, strict=True)]
    low = [None if h is None else w - h for w, h in zip(walls, half, strict=True)]
    high = [None if h is None else w + h for w, h in zip(walls, half, strict=True)]
    series = [Series(name="step", values=walls, low=low, high=high)]
    return Bars(id="time-wall", title="Wall time of a step", labels=table.column("session"), series=series, unit="ms")


def _busy(table: Table) -> Bars | None:
    if all(v is None for v in table.column("idle_ms")):
        return None
    series = [
        Series(name="busy", values=table.column("busy_ms"), colour="#1f5a96"),
        Series(name="idle", values=table.column("idle_ms"), colour="#d55e00"),
    ]
    return Bars(
        id="time-busy",
        title="The device's time: at work and idle",
        labels=table.column("session"),
        series=series,
        unit="ms",
        stacked=True,
    )


def mix(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    tables = {n: kernel_mix(s, by=("class",)) for n, s in zip(names, sessions, strict=True)}
    time = stacked(tables, id="mix-ms", title="Time of a step by class of kernel", key="class", value="ms", unit="ms")
    part = stacked(tables, id="mix-share", title="The same as shares", key="class", value="share", unit="%")

    def one(session: Session, i: int) -> list[Block]:
        return [block("mix", tables[names[i]], i), block("mix", kernel_shares(session), i, part="kernels")]

    lead = "What the device's time goes to. Copies and fills are included."
    return overview("mix", "Kernel mix", lead, [time, part], names, sessions, one)


def phases(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    tables = {n: kernel_mix(s, by=("phase",)) for n, s in zip(names, sessions, strict=True)}
    figure = stacked(
        tables, id="phases-ms", title="Time of a step by phase", key="phase", value="ms", unit="ms", order=PHASES
    )

    def one(session: Session, i: int) -> list[Block]:
        return [block("phases", kernel_mix(session), i)]

    lead = "Forward, backward and optimizer; transfers between host and device stand apart."
    return overview("phases", "Phases", lead, [figure], names, sessions, one)


def modules(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    def one(session: Session, i: int) -> list[Block]:
        by_class, by_module = kernel_mix(session, by=("module", "class")), kernel_mix(session, by=("module",))
        paths = [r["module"] or OUTSIDE for r in by_class.rows]
        rows = [{**r, "module": r["module"] or OUTSIDE} for r in by_module.rows]
        table = Table(f"Time by module: {session.name}", by_module.columns, rows)
        tree = Tree(
            id=f"modules-tree-{i}",
            title="Time by module, its backward included",
            caption="Area is time; colour is the class of kernel. A click opens a module, the path below leads back.",
            paths=paths,
            values=by_class.column("ms"),
            groups=[r["class"] or "unknown" for r in by_class.rows],
        )
        return [tree, block("modules", table, i)]

    lead = "Which part of the network costs what. Each kernel is charged to the module that caused it."
    return overview("modules", "Modules", lead, [], names, sessions, one)


def timeline(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    def one(session: Session, i: int) -> list[Block]:
        figure = raw.timeline(session, f"timeline-{i}")
        if figure is None:
            return [missing(session, "census", "The timeline was")]
        return [figure, block("timeline", gaps(session), i, part="gaps"), block("timeline", transfers(session), i)]

    lead = "Every launch of one step in its order, and the gaps between them."
    return overview("timeline", "Timeline", lead, [], names, sessions, one)


def memory(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    def one(session: Session, i: int) -> list[Block]:
        table = memory_timeline(session)
        if table.refused:
            return [missing(session, "memory", "Memory over the step was")]
        end = _until_the_host_waits(table.column("time_ms"))
        series = [Series(name=c.name, values=table.column(c.name)[:end]) for c in table.columns[1:]]
        title = "Memory over the step, by what holds it"
        caption = "By the clock of the host, which allocates ahead of the device and then waits for it."
        figure = Area(id=f"memory-{i}", title=title, caption=caption, x=table.column("time_ms")[:end], series=series)
        return [figure, block("memory", memory_peak(session), i)]

    lead = "What holds the device's memory, over one step."
    return overview("memory", "Memory", lead, [], names, sessions, one)


def _until_the_host_waits(times: list[float]) -> int:
    """How many moments to draw: a wait longer than all before it, in which nothing changes, would hide the rest."""
    waits = [(b - a, i + 1) for i, (a, b) in enumerate(pairwise(times))]
    longest, at = max(waits, default=(0.0, 0))
    return at if at and longest > times[at - 1] - times[0] and at > len(times) // 2 else len(times)


def components(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    tables = {n: component_table(s) for n, s in zip(names, sessions, strict=True)}
    figure = stacked(
        tables, id="components-share", title="Device time by component", key="component", value="share", unit="%"
    )

    def one(session: Session, i: int) -> list[Block]:
        return [
            block("components", tables[names[i]], i),
            block("components", transfer_breakdown(session), i, part="parts"),
        ]

    lead = "Seconds and calls by what a network is made of, and the step split into functions, transfers and idle time."
    return overview("components", "Components", lead, [figure], names, sessions, one)

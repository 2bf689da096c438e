"""Sections about the step by the clock: its time, what it is made of, where in the network, when, and in what memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from voxtune.analysis.components import component_table, transfer_breakdown
from voxtune.analysis.frame import OUTSIDE_MODULES
from voxtune.analysis.memory import memory_peak, memory_timeline
from voxtune.analysis.mix import kernel_mix, kernel_shares
from voxtune.analysis.step import gaps, overhead, step_totals, transfers
from voxtune.analysis.table import Table
from voxtune.report.charts import PHASES, block, in_order, not_recorded, overview, split_by_mode, stacked_bars
from voxtune.report.document import Block, Section
from voxtune.report.figure import Area, Bars, Series, Timeline, Tree

if TYPE_CHECKING:
    import pandas as pd

    from voxtune.profile.session import Session

# A gap shorter than this is how launches always follow each other.
SHORTEST_GAP_US = 2.0


class Index:
    """Words by number: a name is written into the page once, however many launches have it."""

    def __init__(self, words: list[str] | None = None):
        self.words = list(words or [])
        self._place = {w: i for i, w in enumerate(self.words)}

    def __getitem__(self, word: str) -> int:
        if word not in self._place:
            self._place[word] = len(self.words)
            self.words.append(word)
        return self._place[word]


def first_step(table: pd.DataFrame) -> pd.DataFrame:
    return table[table["step"] == table["step"].min()] if len(table) else table


def step_timeline(session: Session, id: str) -> Timeline | None:
    """The first recorded step. None when no launch has a time."""
    rows = first_step(session.launches).dropna(subset=["start_us", "duration_us"]).sort_values("start_us")
    if rows.empty:
        return None
    classes = rows["class"].fillna("unknown").tolist()
    streams = [_lane(s) for s in rows["stream"].astype(object).tolist()]
    groups, lanes, names, notes = Index(in_order(classes)), Index(), Index(), Index([""])
    columns = (rows[c].tolist() for c in ("start_us", "duration_us", "name", "module", "phase"))
    items = []
    for start, us, name, module, phase, kind, stream in zip(*columns, classes, streams, strict=True):
        note = notes[_note(module, phase)]
        items.append((round(start, 2), round(us, 2), groups[kind], names[_word(name)], note, lanes[stream]))
    # Operators on a CPU nest: no queue runs dry between them.
    gaps = [] if (rows["kind"] == "cpu_op").any() else _gaps(items)
    told = "; the lower lane marks where the device idled" if gaps else ""
    return Timeline(
        id=id,
        title="One step, launch by launch",
        caption=f"{len(items):,} launches of the first recorded step{told}.",
        rows=lanes.words,
        groups=groups.words,
        names=names.words,
        notes=notes.words,
        items=items,
        gaps=gaps,
        length_us=max(start + us for start, us, *_ in items),
    )


def _gaps(items: list[tuple[float, float, int, int, int, int]]) -> list[tuple[float, float]]:
    reach, found = 0.0, []
    for start, us, *_ in items:
        if start - reach > SHORTEST_GAP_US:
            found.append((round(reach, 2), round(start - reach, 2)))
        reach = max(reach, start + us)
    return found


def _lane(stream: Any) -> str:
    return f"stream {stream}" if isinstance(stream, int) else "host"


def _word(value: Any) -> str:
    return value if isinstance(value, str) else "unnamed"


def _note(module: Any, phase: Any) -> str:
    return ", ".join(v for v in (phase, module) if isinstance(v, str) and v)


def step_time(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    table = step_totals(sessions)
    return Section(
        id="time",
        title="Step time",
        lead="Median wall time of a whole step; the whisker is the run-to-run spread, half of p20 to p80 either side.",
        blocks=[
            *(b for f in (_walls(table), _busy(table)) if f is not None for b in split_by_mode(f, names, sessions)),
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
    time = stacked_bars(
        tables, id="mix-ms", title="Time of a step by class of kernel", key="class", value="ms", unit="ms"
    )
    part = stacked_bars(tables, id="mix-share", title="The same as shares", key="class", value="share", unit="%")

    def one(session: Session, i: int) -> list[Block]:
        return [block("mix", tables[names[i]], i), block("mix", kernel_shares(session), i, part="kernels")]

    lead = "What the device's time goes to. Copies and fills are included."
    return overview("mix", "Kernel mix", lead, [time, part], names, sessions, one)


def phases(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    tables = {n: kernel_mix(s, by=("phase",)) for n, s in zip(names, sessions, strict=True)}
    figure = stacked_bars(
        tables, id="phases-ms", title="Time of a step by phase", key="phase", value="ms", unit="ms", order=PHASES
    )

    def one(session: Session, i: int) -> list[Block]:
        return [block("phases", kernel_mix(session), i)]

    lead = "Forward, backward and optimizer; transfers between host and device stand apart."
    return overview("phases", "Phases", lead, [figure], names, sessions, one)


def modules(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    def one(session: Session, i: int) -> list[Block]:
        by_class, by_module = kernel_mix(session, by=("module", "class")), kernel_mix(session, by=("module",))
        paths = [r["module"] or OUTSIDE_MODULES for r in by_class.rows]
        rows = [{**r, "module": r["module"] or OUTSIDE_MODULES} for r in by_module.rows]
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
        figure = step_timeline(session, f"timeline-{i}")
        if figure is None:
            return [not_recorded(session, "census", "The timeline was")]
        return [figure, block("timeline", gaps(session), i, part="gaps"), block("timeline", transfers(session), i)]

    lead = "Every launch of one step in its order, and the gaps between them."
    return overview("timeline", "Timeline", lead, [], names, sessions, one)


def memory(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    def one(session: Session, i: int) -> list[Block]:
        table = memory_timeline(session)
        if table.refused:
            return [not_recorded(session, "memory", "Memory over the step was")]
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
    figure = stacked_bars(
        tables, id="components-share", title="Device time by component", key="component", value="share", unit="%"
    )

    def one(session: Session, i: int) -> list[Block]:
        return [
            block("components", tables[names[i]], i),
            block("components", transfer_breakdown(session), i, part="parts"),
        ]

    lead = "Seconds and calls by what a network is made of, and the step split into functions, transfers and idle time."
    return overview("components", "Components", lead, [figure], names, sessions, one)

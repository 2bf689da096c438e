"""Sections on the time and memory of a step: totals, kernel mix, phases, modules, timeline, memory, components."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from voxtune.analysis.components import component_table, transfer_breakdown
from voxtune.analysis.frame import OUTSIDE_MODULES
from voxtune.analysis.memory import CATEGORIES, memory_peak, memory_timeline
from voxtune.analysis.mix import kernel_mix, kernel_shares
from voxtune.analysis.step import gaps, overhead, step_totals, transfers
from voxtune.analysis.table import Table
from voxtune.report.charts import PHASES, block, in_order, not_recorded, overview, split_by_mode, stacked_bars
from voxtune.report.document import Block, Section
from voxtune.report.figure import Area, Bars, Series, Timeline, Tree

if TYPE_CHECKING:
    import pandas as pd

    from voxtune.profile.session import Session

# Shorter gaps occur between any two launches.
SHORTEST_GAP_US = 2.0


class Index:
    """Numbers strings, so that a name used by many launches is written into the page once."""

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
    """The first recorded step; None if no launch has a time."""
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
        items.append((round(start, 2), round(us, 2), groups[kind], names[_name(name)], note, lanes[stream]))
    # Operators on a CPU have no launch queue.
    gaps = [] if (rows["kind"] == "cpu_op").any() else _gaps(items)
    idle = "; the lower lane shows idle time" if gaps else ""
    return Timeline(
        id=id,
        title="Launches of one step",
        caption=f"{len(items):,} launches of the first recorded step{idle}.",
        rows=lanes.words,
        groups=groups.words,
        names=names.words,
        notes=notes.words,
        items=items,
        gaps=gaps,
        length_us=max(start + us for start, us, *_ in items),
    )


def _gaps(items: list[tuple[float, float, int, int, int, int]]) -> list[tuple[float, float]]:
    busy_until, gaps = 0.0, []
    for start, us, *_ in items:
        if start - busy_until > SHORTEST_GAP_US:
            gaps.append((round(busy_until, 2), round(start - busy_until, 2)))
        busy_until = max(busy_until, start + us)
    return gaps


def _lane(stream: Any) -> str:
    return f"stream {stream}" if isinstance(stream, int) else "host"


def _name(value: Any) -> str:
    return value if isinstance(value, str) else "unnamed"


def _note(module: Any, phase: Any) -> str:
    return ", ".join(v for v in (phase, module) if isinstance(v, str) and v)


def step_time(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    table = step_totals(sessions)
    return Section(
        id="time",
        title="Step time",
        lead="Median wall time of a step. Whiskers: run-to-run spread (plus and minus half of p20 to p80).",
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
        title="Device busy and idle",
        labels=table.column("session"),
        series=series,
        unit="ms",
        stacked=True,
    )


def mix(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    tables = {n: kernel_mix(s, by=("class",)) for n, s in zip(names, sessions, strict=True)}
    time = stacked_bars(tables, id="mix-ms", title="Time of a step by kernel class", key="class", value="ms", unit="ms")
    part = stacked_bars(
        tables, id="mix-share", title="Share of device time by kernel class", key="class", value="share", unit="%"
    )

    def one(session: Session, i: int) -> list[Block]:
        return [block("mix", tables[names[i]], i), block("mix", kernel_shares(session), i, part="kernels")]

    lead = "Device time by kernel class, including copies and fills."
    return overview("mix", "Kernel mix", lead, [time, part], names, sessions, one)


def phases(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    tables = {n: kernel_mix(s, by=("phase",)) for n, s in zip(names, sessions, strict=True)}
    figure = stacked_bars(
        tables, id="phases-ms", title="Time of a step by phase", key="phase", value="ms", unit="ms", order=PHASES
    )

    def one(session: Session, i: int) -> list[Block]:
        return [block("phases", kernel_mix(session), i)]

    lead = "Device time in forward pass, backward pass and optimizer, and in transfers between host and device."
    return overview("phases", "Phases", lead, [figure], names, sessions, one)


def modules(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    def one(session: Session, i: int) -> list[Block]:
        by_class, by_module = kernel_mix(session, by=("module", "class")), kernel_mix(session, by=("module",))
        paths = [r["module"] or OUTSIDE_MODULES for r in by_class.rows]
        rows = [{**r, "module": r["module"] or OUTSIDE_MODULES} for r in by_module.rows]
        table = Table(f"Time by module: {session.name}", by_module.columns, rows)
        tree = Tree(
            id=f"modules-tree-{i}",
            title="Time by module, backward pass included",
            caption="Area: device time. Colour: kernel class. Click a module to zoom in, the path below to zoom out.",
            paths=paths,
            values=by_class.column("ms"),
            groups=[r["class"] or "unknown" for r in by_class.rows],
        )
        return [tree, block("modules", table, i)]

    lead = (
        "Device time by module of the network. Kernels of the backward pass count for the module of their forward pass."
    )
    return overview("modules", "Modules", lead, [], names, sessions, one)


def timeline(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    def one(session: Session, i: int) -> list[Block]:
        figure = step_timeline(session, f"timeline-{i}")
        if figure is None:
            return [not_recorded(session, "census", "Timeline")]
        return [figure, block("timeline", gaps(session), i, part="gaps"), block("timeline", transfers(session), i)]

    lead = "Every launch of one step, and the idle gaps between them."
    return overview("timeline", "Timeline", lead, [], names, sessions, one)


def memory(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    def one(session: Session, i: int) -> list[Block]:
        table = memory_timeline(session)
        if table.refused:
            return [not_recorded(session, "memory", "Memory")]
        end = _before_final_wait(table.column("time_ms"))
        series = [Series(name=c.name, values=table.column(c.name)[:end]) for c in table.columns[1:]]
        title = "Allocated memory by category"
        caption = "Host time: the host allocates ahead of the device. Its final wait for the device is not shown."
        figure = Area(id=f"memory-{i}", title=title, caption=caption, x=table.column("time_ms")[:end], series=series)
        return [figure, block("memory", memory_peak(session), i)]

    peaks = {name: memory_peak(session) for name, session in zip(names, sessions, strict=True)}
    figure = stacked_bars(
        peaks,
        id="memory-peak",
        title="Memory at the peak by category",
        key="category",
        value="at_peak_gib",
        unit="GiB",
        digits=2,
        order=CATEGORIES,
    )
    lead = "Allocated device memory over one step, by category."
    return overview("memory", "Memory", lead, [figure], names, sessions, one)


def _before_final_wait(times: list[float]) -> int:
    """The number of points before the host's final wait, which would compress the rest of the chart."""
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

    lead = "Time and calls by network component, and the split of a step into functions, transfers and idle time."
    return overview("components", "Components", lead, [figure], names, sessions, one)

"""Sections that compare sessions, and the recommended optimisations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from voxtune.analysis.advice import advice as advice_table
from voxtune.analysis.certificate import WINDOWS
from voxtune.analysis.compare import RATIOS, compare_modules, normalised, side_by_side
from voxtune.analysis.efficiency import efficiency
from voxtune.analysis.frame import gpu_name, labels, labels_on_gpu
from voxtune.analysis.priority import achieved
from voxtune.analysis.study import study_table
from voxtune.errors import InputError
from voxtune.report.charts import MODES, NOT_RECORDED, block, overview, present
from voxtune.report.document import Block, Section, Tab, Text
from voxtune.report.figure import Bars, Point, Scatter, Series
from voxtune.report.palette import in_sequence

if TYPE_CHECKING:
    from voxtune.analysis.table import Table
    from voxtune.profile.session import Session

SINGLE = "Only one session of this kind was given; a comparison requires two."
NAMES = {"cycles": "cycles", "instructions": "instructions", "ipc": "IPC", "device_ms": "kernel time"}


def comparable(sessions: Sequence[Session], *, across_gpus: bool = False) -> dict[str, list[Session]]:
    """Sessions grouped by workload, mode and GPU, which can be compared. The baseline comes first in each group.

    `across_gpus`: not by GPU.
    """
    groups: dict[str, list[Session]] = {}
    several = len({s.meta.get("workload") for s in sessions}) > 1
    for session in sessions:
        mode = MODES.get(session.meta["mode"], session.meta["mode"])
        name = f"{session.meta.get('workload')}, {mode}" if several else mode
        if not across_gpus:
            name += f", {gpu_name(session)}"
        groups.setdefault(name, []).append(session)
    return {name: sorted(group, key=lambda s: s.meta["config"] != "baseline") for name, group in groups.items()}


def _per_group(
    sessions: Sequence[Session], make: Callable[[list[Session], int], list[Block]], *, across_gpus: bool = False
) -> list[Tab]:
    groups = comparable(sessions, across_gpus=across_gpus)
    return [Tab(label=name, blocks=make(group, i)) for i, (name, group) in enumerate(groups.items())]


def comparison(names: Sequence[str], sessions: Sequence[Session], *, across_gpus: bool = False) -> Section:
    def one(group: list[Session], i: int) -> list[Block]:
        if len(group) < 2:
            return [Text(text=SINGLE, tone="missing")]
        table = compare_modules(group, across_gpus=across_gpus)
        gains = [
            block("compare", achieved(group[0], s, across_gpus=across_gpus), place, part=f"achieved-{i}")
            for place, s in enumerate(group[1:])
        ]
        for gain in gains:
            gain.folded = not gain.table.refused
        ratios = block("compare", normalised(group, across_gpus=across_gpus), i, part="ratios")
        return [*present(_modules(table, group, i)), block("compare", table, i), ratios, *gains]

    return Section(
        id="compare",
        title="Configurations by module",
        lead="Device time per module for each configuration. The first configuration is the baseline.",
        tabs=_per_group(sessions, one, across_gpus=across_gpus),
    )


def _modules(table: Table, group: Sequence[Session], i: int, top: int = 12) -> Bars | None:
    if table.refused:
        return None
    names = labels(group)
    rows = [r for r in table.rows if r["module"] != "all" and r[f"{names[0]} ms"] is not None][:top]
    series = [
        Series(name=title, values=[r[f"{n} ms"] for r in rows], colour=in_sequence(place))
        for place, (n, title) in enumerate(zip(names, labels_on_gpu(group), strict=True))
    ]
    title = f"Device time by module, {gpus(group)}"
    return Bars(id=f"compare-{i}", title=title, labels=[r["module"] for r in rows], series=series, unit="ms")


def gpus(sessions: Sequence[Session]) -> str:
    return " and ".join(dict.fromkeys(map(gpu_name, sessions)))


def windows(names: Sequence[str], sessions: Sequence[Session], *, across_gpus: bool = False) -> Section:
    skip, count = WINDOWS["paper"]

    def one(group: list[Session], i: int) -> list[Block]:
        if len(group) < 2:
            return [Text(text=SINGLE, tone="missing")]
        table = side_by_side(group, across_gpus=across_gpus)
        return [*present(_window_vs_step(table, group, i)), block("window", table, i)]

    return Section(
        id="window",
        title="Profiling window vs whole step",
        lead=f"Ratios to the baseline from kernels {skip + 1} to {skip + count} only, as profiled in the paper (Ryoo et al., "
        "ICPE 2026), and from every launch of the step. Where they disagree, the window does not represent the step.",
        tabs=_per_group(sessions, one, across_gpus=across_gpus),
    )


def _window_vs_step(table: Table, group: Sequence[Session], i: int) -> Bars | None:
    """Each ratio to the first session, in the window and over the step."""
    titles = labels_on_gpu(group)
    cells = [(r, k) for r in table.rows[1:] for k in RATIOS if k != "ipc"]
    names = [f"{title}: {NAMES[k]}" for title in titles[1:] for k in RATIOS if k != "ipc"]
    series = [
        Series(name="in the window", values=[r[f"{k}_window"] for r, k in cells], colour="#e69f00"),
        Series(name="over the whole step", values=[r[f"{k}_step"] for r, k in cells], colour="#0072b2"),
    ]
    if all(v is None for s in series for v in s.values):
        return None
    title = f"Relative to {titles[0]}, {gpus(group)}"
    return Bars(id=f"window-{i}", title=title, labels=names, series=series, unit="× baseline", mark=1.0)


def networks(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    table = efficiency(sessions)
    figures = [
        _against_time(table, *f) for f in (("ipc", "Instructions per cycle", "IPC"), ("of_half", "Share of peak", "%"))
    ]
    missing = [
        Text(text=f"{title}{NOT_RECORDED} for any session.", tone="missing")
        for figure, title in zip(figures, ("Instructions per cycle", "FLOPs of these networks"), strict=True)
        if figure is None
    ]
    return Section(
        id="networks",
        title="Efficiency against step time",
        lead="Each point is a session: its step time, and how well it uses the GPU. Sessions of several networks can be given "
        "together.",
        blocks=[*present(*figures), *missing, block("networks", table)],
    )


def _against_time(table: Table, column: str, title: str, unit: str) -> Scatter | None:
    points = [
        Point(
            name=r["session"],
            x=r["wall_ms"],
            y=r[column],
            size=1.0,
            group=f"{r['network']}, {MODES.get(r['mode'], r['mode'])}",
        )
        for r in table.rows
        if r["wall_ms"] and r[column]
    ]
    if not points:
        return None
    return Scatter(
        id=f"networks-{column}",
        title=f"{title} against step time",
        caption="Both axes are logarithmic.",
        x_title="step time, ms",
        y_title=unit,
        points=points,
        size_title="sessions",
    )


def study(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    def one(group: list[Session], i: int) -> list[Block]:
        try:
            return [block("study", study_table(group), i)]
        except InputError as error:
            return [Text(text=f"Not shown: {error}.", tone="missing")]

    return Section(
        id="study",
        title="The paper's values",
        lead="Values published for V100, A100 and H100 by figure of the paper, and each recorded GPU in the paper's window and "
        "over the whole step.",
        tabs=_per_group(sessions, one, across_gpus=True),
    )


def advice(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    def one(session: Session, i: int) -> list[Block]:
        table = advice_table(session)
        if not table.rows:
            return [Text(text=" ".join(table.notes))]
        return [block("advice", table, i)]

    lead = "Recommended optimisations with evidence, ranked by estimated gain."
    return overview("advice", "Advice", lead, [], names, sessions, one)

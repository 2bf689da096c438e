"""Figures and sections from tables: which column is the label, which the colour, which the length of a bar."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from voxtune.analysis.frame import OUTSIDE_MODULES
from voxtune.profile.classify import CLASSES
from voxtune.report.document import Block, Section, Tab, TableBlock, Text
from voxtune.report.figure import Bars, Figure, Series

if TYPE_CHECKING:
    from voxtune.analysis.table import Table
    from voxtune.profile.session import Session

NOT_RECORDED = ": not recorded"
MODES = {"train": "training", "sample": "sampling"}
PHASES = ("forward", "backward", "optimizer", "transfer", "other")
# The order of kernel classes in stacked bars and legends: convolutions first, unknown last.
ORDER = (
    *(c for c in CLASSES if c.startswith("conv")),
    *(c for c in CLASSES if not c.startswith("conv") and c != "unknown"),
    "unknown",
)

LABELS = {
    "tensor_pct": "tensor pipes",
    "fma_pct": "FMA pipes (CUDA cores)",
    "alu_pct": "ALU pipes (integer and logic)",
    "sm_pct": "SM throughput",
    "memory_pct": "memory throughput",
    "l1_hit_pct": "L1 hit rate",
    "l2_hit_pct": "L2 hit rate",
    "dram_pct": "DRAM throughput",
    "warps_active": "active warps per SM",
    "occupancy_pct": "occupancy",
    "ipc": "IPC",
}


def label(column: str) -> str:
    return LABELS.get(column) or column.removeprefix("stall_").replace("_", " ")


def in_order(names: Iterable[str], order: Sequence[str] = ORDER) -> list[str]:
    """Sorted by `order` (default: kernel classes); unknown names follow in their given order."""
    place = {name: i for i, name in enumerate(order)}
    return sorted(dict.fromkeys(names), key=lambda n: place.get(n, len(place)))


def stacked_bars(
    tables: dict[str, Table],
    *,
    id: str,
    title: str,
    key: str,
    value: str,
    unit: str,
    caption: str = "",
    digits: int = 1,
    order: Sequence[str] = ORDER,
) -> Bars | None:
    """One bar per session, split by column `key`. None if no session has data."""
    known = {name: t for name, t in tables.items() if not t.refused and t.rows}
    if not known:
        return None
    sums = {name: _sums(t, key, value) for name, t in known.items()}
    parts = in_order((p for s in sums.values() for p in s), order)
    # None where a session was not measured, 0 where it lacks the part.
    series = [Series(name=p, values=[sums[n].get(p, 0.0) if n in sums else None for n in tables]) for p in parts]
    return Bars(
        id=id, title=title, caption=caption, labels=list(tables), series=series, unit=unit, digits=digits, stacked=True
    )


def _sums(table: Table, key: str, value: str) -> dict[str, float]:
    out: dict[str, float] = {}
    for row in table.rows:
        if row[value] is not None:
            name = str(row[key] or "other")
            out[name] = out.get(name, 0.0) + row[value]
    return out


def grouped_bars(
    tables: dict[str, Table],
    *,
    id: str,
    title: str,
    row: dict[str, Any],
    values: Sequence[str],
    unit: str,
    caption: str = "",
    digits: int = 1,
) -> Bars | None:
    """One group of bars per session: columns `values` of the row that matches `row`."""
    cells = {name: _cells(t, row) for name, t in tables.items()}
    series = [Series(name=label(v), values=[cells[n].get(v) for n in tables]) for v in values]
    if all(v is None for s in series for v in s.values):
        return None
    return Bars(id=id, title=title, caption=caption, labels=list(tables), series=series, unit=unit, digits=digits)


def _cells(table: Table, match: dict[str, Any]) -> dict[str, Any]:
    matches = [r for r in table.rows if all(r[k] == v for k, v in match.items())]
    return matches[0] if matches and not table.refused else {}


def bars_from_rows(
    table: Table,
    *,
    id: str,
    title: str,
    key: str,
    values: Sequence[str],
    unit: str,
    caption: str = "",
    digits: int = 2,
    stacked: bool = False,
    top: int = 16,
) -> Bars | None:
    """One bar per row of a table."""
    rows = [r for r in table.rows if any(r[v] is not None for v in values)][:top]
    if table.refused or not rows:
        return None
    series = [Series(name=label(v), values=[r[v] for r in rows]) for v in values]
    labels = [str(r[key] or OUTSIDE_MODULES) for r in rows]
    return Bars(
        id=id, title=title, caption=caption, labels=labels, series=series, unit=unit, digits=digits, stacked=stacked
    )


def block(section: str, table: Table, place: int = 0, *, folded: bool = False, part: str = "table") -> TableBlock:
    return TableBlock(id=f"{section}-{part}-{place}", table=table, folded=folded)


def present(*figures: Figure | None) -> list[Block]:
    return [f for f in figures if f is not None]


def make_tabs(
    names: Sequence[str], sessions: Sequence[Session], make: Callable[[Session, int], list[Block]]
) -> list[Tab]:
    """One tab per session with the blocks that `make` returns."""
    return [
        Tab(label=n, blocks=make(s, i), mode=mode_of(s)) for i, (n, s) in enumerate(zip(names, sessions, strict=True))
    ]


def without_data(tabs: Sequence[Tab]) -> tuple[list[Tab], list[Block]]:
    """The tabs with data, and one line per subject about the sessions without."""
    absent: dict[str, list[tuple[str, str]]] = {}
    left = []
    for tab in tabs:
        missing = [b for b in tab.blocks if isinstance(b, Text) and b.tone == "missing"]
        if not missing or len(missing) < len(tab.blocks):
            left.append(tab)
        for text in missing if tab not in left else ():
            subject, _, reason = text.text.partition(NOT_RECORDED)
            absent.setdefault(subject, []).append((tab.label, reason))
    lines = []
    for subject, sessions in absent.items():
        reasons = {reason for _, reason in sessions}
        where = "" if len(tabs) == 1 else f" in {', '.join(label for label, _ in sessions)}"
        why = reasons.pop() if len(reasons) == 1 else ". The certificate of coverage states the reasons."
        lines.append(Text(text=f"{subject}{NOT_RECORDED}{where}{why}", tone="missing"))
    return left, [*lines]


def mode_of(session: Session) -> str:
    return MODES.get(session.meta["mode"], str(session.meta["mode"]))


def split_by_mode(
    figure: Bars, names: Sequence[str], sessions: Sequence[Session], tier: str | None = None
) -> list[Block]:
    """One figure per mode, since training steps are much longer than sampling steps. `tier`: the source of its values.

    Rows without a value are left out and named in the caption.
    """
    modes = list(dict.fromkeys(str(s.meta["mode"]) for s in sessions))
    out: list[Block] = []
    for mode in modes:
        rows = [i for i, s in enumerate(sessions) if s.meta["mode"] == mode]
        known = [i for i in rows if any(s.values[i] is not None for s in figure.series)]
        if not known:
            continue
        prefix = f"{mode} " if len(modes) > 1 else ""
        title = f"{figure.title}: {MODES.get(mode, mode)}" if len(modes) > 1 else figure.title
        absent = ", ".join(names[i].removeprefix(prefix) for i in rows if i not in known)
        note = coverage_note([names[i].removeprefix(prefix) for i in rows], [sessions[i] for i in rows], tier)
        captions = [figure.caption, note, f"Not measured: {absent}." if absent else ""]
        out.append(
            figure.rows(
                known,
                id=f"{figure.id}-{mode}" if len(modes) > 1 else figure.id,
                title=title,
                labels=[figure.labels[i].removeprefix(prefix) for i in known],
                caption=" ".join(filter(None, captions)),
                mode=MODES.get(mode, mode),
            )
        )
    return out


def overview(
    id: str,
    title: str,
    lead: str,
    figures: Sequence[Bars | None],
    names: Sequence[str],
    sessions: Sequence[Session],
    one: Callable[[Session, int], list[Block]],
    tier: str | None = None,
) -> Section:
    """The usual section: all sessions in one figure per mode, then one tab per session with the blocks of `one`."""
    blocks = [b for f in figures if f is not None for b in split_by_mode(f, names, sessions, tier)]
    tabs, missing = without_data(make_tabs(names, sessions, one))
    return Section(id=id, title=title, lead=lead, blocks=[*blocks, *missing], tabs=tabs)


def coverage_note(names: Sequence[str], sessions: Sequence[Session], tier: str | None) -> str:
    """The share of kernel time that a counter tier covers, per session; empty if it is complete."""
    shares = [(s.meta["tiers"].get(tier) or {}).get("time_share") for s in sessions]
    known = [(n, float(share)) for n, share in zip(names, shares, strict=True) if share]
    if all(share >= 0.99 for _, share in known):
        return ""
    shares_text = ", ".join(f"{name} {100 * share:.0f} %" for name, share in known)
    return f"Counters cover part of the kernel time: {shares_text}."


def not_recorded(session: Session, tier: str, subject: str) -> Text:
    """A message that `subject` was not recorded, and why."""
    tiers = session.meta["tiers"]
    state = tiers.get(tier) or tiers.get("full") or {}
    why = state.get("why") if isinstance(state, dict) else None
    return Text(text=f"{subject}{NOT_RECORDED}{f' ({why})' if why else ''}.", tone="missing")

"""The seed's figures 4 to 13, each as a table from sessions.

Figures 4 to 7 show one session; 8 to 13 hold configurations against the first of `sessions`, which is the baseline.
Ratios are refused between sessions that do not cover their step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from voxtune.analysis.certificate import THRESHOLD_PCT, Level, certify, refusal
from voxtune.analysis.counters import SEED_STALLS, UTILISATION, average, totals
from voxtune.analysis.frame import family, kernels, labels, numbers, ratio, share
from voxtune.analysis.mix import SEED_GROUPS, ipc_stack, kernel_shares, opcode_counts, seed_shares
from voxtune.analysis.priority import priority
from voxtune.analysis.table import Column, Table

if TYPE_CHECKING:
    from voxtune.profile.session import Session

PLAIN = "Plain means over launches are what a profiler's table shows, and probably what the seed shows; those by time "
PLAIN += "are about the step."


def figure_4(session: Session) -> Table:
    """IPC stack bars of the kernels with most cycles."""
    return _titled(ipc_stack(session), "Figure 4: IPC stacks")


def figure_5(session: Session) -> Table:
    """Priority scores, summed by class."""
    return _titled(priority(session, "class"), "Figure 5: priority scores")


def figure_6(session: Session) -> Table:
    """Kernel mix: each kernel's share of kernel time."""
    return _titled(kernel_shares(session), "Figure 6: kernel mix")


def figure_7(session: Session) -> Table:
    """Instruction mix of each class: convolution, elementwise, norm and the rest differ in kind."""
    ran = kernels(session)
    families = [family(str(c)) for c in ran["class"].fillna("unknown")]
    rows: list[dict[str, Any]] = []
    for name, some in ran.assign(family=families).groupby("family"):
        counts = opcode_counts(session, some)
        cells: dict[str, Any] = {"class": name, "instructions": sum(counts.values()) if counts else None}
        rows.append(cells | seed_shares(counts))
    rows.sort(key=lambda r: -(r["instructions"] or 0))
    columns = [Column("class", kind="text"), Column("instructions", better="low", digits=0), *_letters()]
    title = f"Figure 7: instruction mix, {session.name}"
    if all(r["instructions"] is None for r in rows):
        return Table(title, columns, refused="no opcodes were recorded (the full counter set is needed)")
    return Table(title, columns, rows)


def figure_8(sessions: Sequence[Session]) -> Table:
    """Kernel mix of each configuration by class, and cycles, instructions and IPC over the baseline's."""
    classes = _families(sessions)
    columns = [Column("session", kind="text"), *(Column(c, "%", "percent", digits=1) for c in classes)]
    names = ("cycles", "instructions", "ipc")
    columns += [Column(f"{k}_ratio", "x", better="none" if k == "ipc" else "low", digits=3) for k in names]
    reason, found, rows = refusal(sessions, "few"), [totals(s) for s in sessions], []
    for label, session, sums in zip(labels(sessions), sessions, found, strict=True):
        row: dict[str, Any] = {"session": label} | class_shares(session, classes)
        rows.append(row | {f"{k}_ratio": None if reason else ratio(sums[k], found[0][k]) for k in names})
    notes = [f"Ratios refused: {reason}"] if reason else ["Ratios are to the first session, whole steps."]
    return Table("Figure 8: kernel mix by configuration", columns, rows, notes)


def class_shares(session: Session, classes: Sequence[str]) -> dict[str, float | None]:
    """Percent of kernel time by coarse class."""
    ran = kernels(session)
    time, names = (
        numbers(ran, "duration_us"),
        np.array([family(str(c)) for c in ran["class"].fillna("unknown")], dtype=object),
    )
    whole = float(np.nansum(time))
    return {c: share(float(np.nansum(time[names == c])), whole) for c in classes}


def figure_9(sessions: Sequence[Session]) -> Table:
    """Instruction mix of each configuration, all kernels together."""
    rows = [
        {"session": label} | seed_shares(opcode_counts(s)) for label, s in zip(labels(sessions), sessions, strict=True)
    ]
    return Table("Figure 9: instruction mix by configuration", [Column("session", kind="text"), *_letters()], rows)


def figure_10(sessions: Sequence[Session]) -> Table:
    """Tensor, CUDA (FMA) and integer pipes, and SM throughput.

    The tensor pipe stands twice: at matrix products, and as the seed reads it, with constants loaded through it.
    """
    return _means(sessions, ("tensor_pipe_pct", *UTILISATION), "Figure 10: pipe utilisation and SM throughput", "%")


def figure_11(sessions: Sequence[Session]) -> Table:
    """L1 and L2 hit rates, and DRAM bandwidth."""
    return _means(sessions, ("l1_hit_pct", "l2_hit_pct", "dram_pct"), "Figure 11: cache hit rates and DRAM", "%")


def figure_12(sessions: Sequence[Session]) -> Table:
    """Active warps a cycle over the baseline's."""
    return _ratios(sessions, ("warps_active",), "Figure 12: active warps a cycle, relative")


def figure_13(sessions: Sequence[Session]) -> Table:
    """The three stalls of the seed over the baseline's."""
    return _ratios(sessions, SEED_STALLS, "Figure 13: stalls, relative")


def _means(sessions: Sequence[Session], counters: tuple[str, ...], title: str, unit: str) -> Table:
    columns = [Column("session", kind="text")]
    for counter in counters:
        columns += [
            Column(counter, unit, "percent", "high", 2, "weighted by time"),
            Column(f"{counter}_plain", unit, "percent", "high", 2, "every launch weighs the same"),
        ]
    rows: list[dict[str, Any]] = []
    for label, session in zip(labels(sessions), sessions, strict=True):
        ran = kernels(session)
        cells: dict[str, Any] = {"session": label}
        for counter in counters:
            cells |= {counter: average(ran, counter), f"{counter}_plain": average(ran, counter, plain=True)}
        rows.append(cells)
    notes = [PLAIN]
    for label, session in zip(labels(sessions), sessions, strict=True):
        reached = certify(session).full_time_pct
        if 0 < reached < THRESHOLD_PCT:
            notes.append(
                f"{label}: means are over the {reached:.1f} % of kernel time that was read, not over the step."
            )
    return Table(title, columns, rows, notes)


def _ratios(sessions: Sequence[Session], counters: tuple[str, ...], title: str, level: Level = "full") -> Table:
    columns = [Column("session", kind="text")]
    for counter in counters:
        columns += [
            Column(counter, digits=3, doc="weighted as docs/analysis.md says"),
            Column(f"{counter}_ratio", "x", digits=3, doc="to the first session"),
            Column(f"{counter}_ratio_plain", "x", digits=3, doc="of plain means over launches"),
        ]
    reason = refusal(sessions, level)
    if reason:
        return Table(title, columns, refused=reason)
    weighted = [[average(kernels(s), c) for c in counters] for s in sessions]
    plain = [[average(kernels(s), c, plain=True) for c in counters] for s in sessions]
    rows: list[dict[str, Any]] = []
    for i, label in enumerate(labels(sessions)):
        cells: dict[str, Any] = {"session": label}
        for j, counter in enumerate(counters):
            cells[counter] = weighted[i][j]
            cells[f"{counter}_ratio"] = ratio(weighted[i][j], weighted[0][j])
            cells[f"{counter}_ratio_plain"] = ratio(plain[i][j], plain[0][j])
        rows.append(cells)
    return Table(title, columns, rows)


def _letters() -> list[Column]:
    return [Column(letter, "%", "percent", digits=1) for letter in SEED_GROUPS]


def _families(sessions: Sequence[Session]) -> list[str]:
    seen: dict[str, float] = {}
    for session in sessions:
        for kernel_class, some in kernels(session).groupby("class"):
            name = family(str(kernel_class))
            seen[name] = seen.get(name, 0.0) + float(np.nansum(numbers(some, "duration_us")))
    return sorted(seen, key=lambda n: -seen[n])


def _titled(table: Table, title: str) -> Table:
    table.title = f"{title}, {table.title.partition(': ')[2]}"
    return table


SINGLE: dict[int, Callable[[Session], Table]] = {4: figure_4, 5: figure_5, 6: figure_6, 7: figure_7}
SEVERAL: dict[int, Callable[[Sequence[Session]], Table]] = {
    8: figure_8,
    9: figure_9,
    10: figure_10,
    11: figure_11,
    12: figure_12,
    13: figure_13,
}

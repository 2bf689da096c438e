"""Generates the tables of docs/results/study.md from the recordings: python -m tests.recordings.study_page"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from voxtune.analysis.certificate import certify
from voxtune.analysis.compare import side_by_side
from voxtune.analysis.ledger import layout_ledger, precision_audit
from voxtune.analysis.mix import kernel_mix
from voxtune.analysis.step import overhead, step_totals
from voxtune.analysis.study import GPUS, study_table
from voxtune.analysis.traffic import PARTS, traffic
from voxtune.cli.report import load
from voxtune.profile.session import Session

PAGE = Path(__file__).parents[2] / "docs" / "results" / "study.md"
MODES = ("train", "sample")
EMPTY = "–"
# Kernel classes shown together; "data movement" has the classes of the layout ledger.
GROUPS: dict[str, tuple[str, ...]] = {
    "forward convolutions": ("conv_fprop",),
    "data gradients": ("conv_dgrad", "conv_backward"),
    "weight gradients": ("conv_wgrad",),
    "norm": ("norm",),
    "data movement": ("layout", "padding", "cast", "copy"),
    "elementwise": ("elementwise",),
    "fused (Triton)": ("triton",),
}


@functools.cache
def sessions(mode: str) -> list[Session]:
    return [s for s in load([], recorded=True) if s.meta["mode"] == mode]


def number(value: float | None, digits: int) -> str:
    return EMPTY if value is None else f"{value:,.{digits}f}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def config(session: Session) -> str:
    return str(session.meta["config"])


def step_table() -> str:
    totals = {m: step_totals(sessions(m)).rows for m in MODES}
    rows = []
    for session, train, sample in zip(sessions("train"), *totals.values(), strict=True):
        cells = [config(session)]
        for row, first in ((train, totals["train"][0]), (sample, totals["sample"][0])):
            cells += [number(row["wall_ms"], 1), number(row["wall_ms"] / first["wall_ms"], 2)]
            cells += [str(row["launches"]), number(row["peak_gib"], 1)]
        rows.append(cells)
    names = [f"{m}: {c}" for m in ("training", "sampling") for c in ("ms", "x baseline", "launches", "GiB")]
    return markdown(["configuration", *names], rows)


def coverage_table() -> str:
    rows = []
    for session in (s for m in MODES for s in sessions(m)):
        tiers, certificate = session.meta["tiers"], certify(session)
        shares = [number(certificate.few_launches_pct, 1), number(certificate.few_time_pct, 1)]
        shares += [number(100 * tiers[t].get("time_share", 0.0), 1) for t in ("full", "opcodes")]
        verdict = "yes" if certificate.covers("few") else "times only"
        rows.append([f"{session.meta['mode']} {config(session)}", *shares, ", ".join(certificate.phases), verdict])
    head = ["session", "few: % of launches", "% of kernel time", "full: % of kernel time", "opcodes: % of kernel time"]
    return markdown([*head, "phases recorded", "covers its step"], rows)


def window_table() -> str:
    rows = []
    for mode in MODES:
        for row, session in zip(side_by_side(sessions(mode)).rows, sessions(mode), strict=True):
            cells = [f"{mode} {config(session)}", number(row["window_time_pct"], 1)]
            for quantity in ("cycles", "instructions", "device_ms"):
                cells += [number(row[f"{quantity}_{view}"], 2) for view in ("window", "step")]
            rows.append(cells)
    pairs = [f"{q}: {v}" for q in ("cycles", "instructions", "kernel time") for v in ("window", "step")]
    return markdown(["session", "window, % of kernel time", *pairs], rows)


def time_table(mode: str) -> str:
    rows = []
    for session in sessions(mode):
        classes = {r["class"]: r["ms"] for r in kernel_mix(session, by=("class",)).rows}
        parts = [sum(classes.get(c, 0.0) for c in group) for group in GROUPS.values()]
        total = sum(classes.values())
        rows.append([config(session), *(number(p, 1) for p in (*parts, total - sum(parts), total))])
    return markdown(["configuration, ms", *GROUPS, "other", "device"], rows)


def ledger_table() -> str:
    rows = []
    for session in (s for m in MODES for s in sessions(m)):
        table = layout_ledger(session)
        kinds = [sum(r[f"{c}_ms"] for r in table.rows) for c in ("layout", "padding", "cast", "copy")]
        by_type = [table.extra["by_type"].get(t, 0.0) for t in ("GroupNorm32", "Conv3d")]
        share = 100 * table.extra["total_ms"] / table.extra["step_ms"]
        cells = [table.extra["total_ms"], share, *kinds, *by_type]
        rows.append([f"{session.meta['mode']} {config(session)}", *(number(c, 1) for c in cells)])
    head = ["session", "ms", "% of device time", "layout", "padding", "cast", "copy", "by GroupNorm32", "by Conv3d"]
    return markdown(head, rows)


def traffic_table() -> str:
    rows = []
    for mode in MODES:
        for row, session in zip(traffic(sessions(mode)).rows, sessions(mode), strict=True):
            cells = [number(row["gb"], 1), number(row["ratio"], 2)]
            cells += [number(row[f"{p}_gb"], 1) for p in (*PARTS, "other")]
            rows.append([f"{mode} {config(session)}", *cells, number(row["dram_pct"], 1), number(row["counted"], 0)])
    parts = ["convolutions", "norms", "layout, copies, casts", "elementwise", "fused (Triton)", "other"]
    return markdown(["session", "GB", "x baseline", *parts, "% of peak rate", "counted, %"], rows)


def precision_table() -> str:
    rows = []
    for session in (s for m in MODES for s in sessions(m)):
        table = precision_audit(session)
        spent = sum(r["ms"] for r in table.rows)
        slow = [r for r in table.rows if r["ran_on"] == "CUDA cores"]
        worst = f"{slow[0]['module']}, {slow[0]['class']}: {number(slow[0]['ms'], 1)} ms" if slow else EMPTY
        proof = {True: "proved", False: "broken", None: EMPTY}[session.meta["proof"]["holds"]]
        cells = [number(spent, 1), number(table.extra["tensor_time_pct"], 1), worst, proof]
        rows.append([f"{session.meta['mode']} {config(session)}", *cells])
    head = ["session", "convolutions and matmuls, ms", "on tensor cores, %", "largest on CUDA cores"]
    return markdown([*head, "FP32"], rows)


def overhead_table() -> str:
    digits = {"bare_ms": 1, "census_ms": 1, "census_pct": 1, "few": 1, "few_ratio": 0, "few_a_launch": 1}
    digits |= {"full_a_launch": 2, "opcodes_a_launch": 2, "turns": 1}
    rows = []
    for mode in MODES:
        for row, session in zip(overhead(sessions(mode)).rows, sessions(mode), strict=True):
            rows.append([f"{mode} {config(session)}", *(number(row[c], d) for c, d in digits.items())])
    head = ["session", "bare, ms", "census, ms", "census adds, %", "few, s", "few, x bare", "few, ms per launch"]
    return markdown([*head, "full, s per launch", "opcodes, s per launch", "all counters, s"], rows)


def figures_table() -> str:
    train, sample = (study_table(sessions(m)).rows for m in MODES)
    rows = []
    for left, right in zip(train, sample, strict=True):
        assert (left["quantity"], left["config"]) == (right["quantity"], right["config"])
        cells = [str(left["figure"]), left["quantity"], left["config"], left["unit"], *(left[g] or EMPTY for g in GPUS)]
        for row in (left, right):
            cells += [short(row["window"]), short(row["step"]), number(row["counted"], 0)]
        rows.append(cells)
    views = [f"{m}: {v}" for m in ("training", "sampling") for v in ("window", "step", "counted, %")]
    return markdown(["figure", "quantity", "configuration", "unit", *GPUS, *views], rows)


def short(value: float | None) -> str:
    return EMPTY if value is None else f"{value:.2e}" if value >= 1e5 else f"{value:.2f}"


TABLES: dict[str, Callable[[], str]] = {
    "step": step_table,
    "coverage": coverage_table,
    "window": window_table,
    "time-train": lambda: time_table("train"),
    "time-sample": lambda: time_table("sample"),
    "ledger": ledger_table,
    "traffic": traffic_table,
    "precision": precision_table,
    "overhead": overhead_table,
    "figures": figures_table,
}


def block(name: str) -> re.Pattern[str]:
    """The lines of the table after its marker."""
    return re.compile(rf"(?<=<!-- table: {name} -->\n)(?:\|.*\n)*")


def main() -> None:
    text = PAGE.read_text()
    for name, make in TABLES.items():
        assert f"<!-- table: {name} -->" in text, f"{PAGE.name}: no marker for the table {name}"
        text = block(name).sub(f"{make()}\n".replace("\\", r"\\"), text)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()

"""Kernel mix (by class, phase and name) and instruction mix (by group and by pipe) of a step."""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from voxtune.analysis.frame import family, kernels, mean, module_names, numbers, share, short, steps, total
from voxtune.analysis.table import Column, Table

if TYPE_CHECKING:
    import pandas as pd

    from voxtune.profile.session import Session


@functools.cache
def _groups() -> dict[str, frozenset[str]]:
    data = json.loads(resources.files("voxtune.analysis").joinpath("data/opcodes.json").read_text())
    return {name: frozenset(stems.split()) for name, stems in data.items() if name != "about"}


def group_of(opcode: str) -> str:
    """tensor, fp32, fp16, fp64, int, convert, memory, move, predicate, control, uniform or other.

    Apart from listed memory and control opcodes, opcodes that start with U run on the uniform datapath, which computes
    addresses and loop counters once per warp. They are not tensor work.
    """
    stem = _stem(opcode)
    for group, members in _groups().items():
        if group != "fma_pipe" and stem in members:
            return group
    return "uniform" if stem.startswith("U") else "other"


def pipe_of(opcode: str) -> str:
    """The execution pipe. IMAD is integer arithmetic, but runs on the FMA pipe."""
    stem = _stem(opcode)
    if stem in _groups()["fma_pipe"]:
        return "fma"
    if stem == "MUFU":
        return "special"
    group = group_of(opcode)
    pipes = {"fp32": "alu", "fp16": "fma", "int": "alu", "predicate": "alu", "convert": "special", "move": "alu"}
    return pipes.get(group, "load/store" if group == "memory" else group)


def _stem(opcode: str) -> str:
    return opcode.partition(".")[0].strip().upper()


# The abbreviations in the figures of the paper (see study.py).
PAPER_GROUPS = {
    "FP": ("fp32", "fp16", "fp64"),
    "INT": ("int", "convert"),
    "LS": ("memory",),
    "MV": ("move",),
    "PRED": ("predicate",),
    "CTRL": ("control",),
    "UD": ("uniform",),
    "TENSOR": ("tensor",),
    "OTHER": ("other",),
}

# The groups of most kernels; the page shows the others on request.
MAIN_GROUPS = ("FP", "INT", "LS", "TENSOR")


def kernel_mix(session: Session, by: tuple[str, ...] = ("class", "phase")) -> Table:
    """Time and launches of a mean step by class and phase (or any columns), copies and fills included."""
    count, rows = steps(session), session.launches
    keys = [module_names(rows) if k == "module" else rows[k].fillna("").tolist() for k in by]
    times: dict[tuple[Any, ...], list[float]] = {}
    for key, time in zip(zip(*keys, strict=True), numbers(rows, "duration_us"), strict=True):
        times.setdefault(key, []).append(0.0 if np.isnan(time) else float(time))
    total_us = float(np.nansum(numbers(rows, "duration_us")))
    out = []
    for key, durations in times.items():
        cells: dict[str, Any] = dict(zip(by, key, strict=True))
        spent = sum(durations)
        out.append(
            cells | {"ms": spent / 1e3 / count, "share": share(spent, total_us), "launches": len(durations) / count}
        )
    columns = [
        *(Column(k, kind="text") for k in by),
        Column("ms", "ms", better="low", digits=3),
        Column("share", "%", "percent", digits=2),
        Column("launches", better="low", digits=_digits(out)),
    ]
    out.sort(key=lambda r: -r["ms"])
    unknown = share(float(np.nansum(numbers(rows[rows["class"] == "unknown"], "duration_us"))), total_us)
    note = f"Kernels of unknown class: {unknown or 0:.2f} % of device time."
    return Table(f"Kernel mix: {session.name}", columns, out, [note])


def _digits(rows: list[dict[str, Any]]) -> int:
    """No decimals if every step has the same number of launches."""
    return 0 if all(float(r["launches"]).is_integer() for r in rows) else 1


def kernel_shares(session: Session, top: int = 12) -> Table:
    """Share of kernel time by short kernel name, without copies and fills, as in the paper."""
    kernel_rows = kernels(session)
    named = kernel_rows.assign(short=[short(str(n)) for n in kernel_rows["name"]])
    total_us, count, out = float(np.nansum(numbers(kernel_rows, "duration_us"))), steps(session), []
    for name, group in named.groupby("short"):
        time = float(np.nansum(numbers(group, "duration_us")))
        classes = sorted(set(group["class"].fillna("unknown")))
        cells = {"kernel": name, "class": ", ".join(classes), "ms": time / 1e3 / count}
        out.append(cells | {"share": share(time, total_us), "launches": len(group) / count})
    out.sort(key=lambda r: -r["ms"])
    columns = [
        Column("kernel", kind="text"),
        Column("class", kind="text"),
        Column("ms", "ms", better="low", digits=3),
        Column("share", "%", "percent"),
        Column("launches", digits=_digits(out)),
    ]
    return Table(f"Share of kernel time by kernel: {session.name}", columns, out[:top])


def opcode_counts(session: Session, rows: pd.DataFrame | None = None) -> dict[str, float] | None:
    """Warp instructions of a mean step by opcode: counts per distinct launch, times its number of launches.

    `rows` selects launches. None if none of them has opcodes.
    """
    kernel_rows = kernels(session) if rows is None else rows
    if session.opcodes.empty or kernel_rows.empty:
        return None
    key = ["name", "grid", "block"]
    launched = kernel_rows.fillna({"grid": "", "block": ""}).groupby(key).size().rename("times").reset_index()
    counts = session.opcodes.fillna({"grid": "", "block": ""}).merge(launched, on=key)
    if counts.empty:
        return None
    executed = numbers(counts, "executed") * counts["times"].to_numpy(float) / steps(session)
    summed: dict[str, float] = {}
    for opcode, value in zip(counts["opcode"], executed, strict=True):
        summed[opcode] = summed.get(opcode, 0.0) + float(np.nan_to_num(value))
    return summed


def opcode_coverage_pct(session: Session) -> float | None:
    """Share of kernel time for which opcodes were recorded."""
    kernel_rows = kernels(session)
    key = ["name", "grid", "block"]
    recorded = set(map(tuple, session.opcodes.fillna({"grid": "", "block": ""})[key].drop_duplicates().to_numpy()))
    hit = np.array(
        [tuple(k) in recorded for k in kernel_rows.fillna({"grid": "", "block": ""})[key].to_numpy()], dtype=bool
    )
    time = numbers(kernel_rows, "duration_us")
    return share(float(np.nansum(time[hit])), float(np.nansum(time))) if len(kernel_rows) else None


def grouped(counts: dict[str, float], by: str = "group") -> dict[str, float]:
    group = {"group": group_of, "pipe": pipe_of}[by]
    out: dict[str, float] = {}
    for opcode, executed in counts.items():
        out[group(opcode)] = out.get(group(opcode), 0.0) + executed
    return out


def paper_shares(counts: dict[str, float] | None) -> dict[str, float | None]:
    """Percent by the paper's instruction groups; all None without opcodes."""
    if not counts or not sum(counts.values()):
        return dict.fromkeys(PAPER_GROUPS)
    groups, total_count = grouped(counts), sum(counts.values())
    return {
        name: 100 * sum(groups.get(g, 0.0) for g in members) / total_count for name, members in PAPER_GROUPS.items()
    }


def instruction_mix(session: Session, by: str = "group") -> Table:
    """Warp instructions of a mean step by instruction group or by execution pipe."""
    title = f"Instruction mix by {by}: {session.name}"
    columns = [
        Column(by, kind="text"),
        Column("instructions", better="low", digits=0),
        Column("share", "%", "percent"),
        Column("opcodes", kind="text", doc="the five most frequent"),
    ]
    counts = opcode_counts(session)
    if counts is None:
        return Table(title, columns, refused="no opcodes were recorded (requires the opcodes tier)")
    total_count, group = sum(counts.values()), {"group": group_of, "pipe": pipe_of}[by]
    rows = []
    for name, executed in sorted(grouped(counts, by).items(), key=lambda i: -i[1]):
        members = sorted((o for o in counts if group(o) == name), key=lambda o: -counts[o])[:5]
        cells = {
            by: name,
            "instructions": executed,
            "share": share(executed, total_count),
            "opcodes": ", ".join(members),
        }
        rows.append(cells)
    covered = opcode_coverage_pct(session) or 0.0
    notes = [f"Counts per distinct launch, times its number of launches. Opcodes cover {covered:.1f} % of kernel time."]
    return Table(title, columns, rows, notes)


def ipc_stack(session: Session, top: int = 8) -> Table:
    """IPC of the kernels with the most cycles, split by instruction group; the parts of a row add up to its IPC."""
    groups = list(PAPER_GROUPS)
    columns = [
        Column("kernel", kind="text"),
        Column("class", kind="text"),
        Column("cycles", better="low", digits=0, doc="elapsed cycles, all launches of a mean step"),
        Column("ipc", digits=2, doc="weighted by active cycles"),
        *(Column(f"{k}_share", "%", "percent", digits=1, title=k, detail=k not in MAIN_GROUPS) for k in groups),
        *(Column(f"{k}_ipc", digits=3, detail=True) for k in groups),
    ]
    kernel_rows = kernels(session)
    named = kernel_rows.assign(short=[short(str(n)) for n in kernel_rows["name"]])
    rows: list[dict[str, Any]] = []
    for name, group in named.groupby("short"):
        cycles = total(numbers(group, "cycles"))
        if cycles is None:
            continue
        ipc = mean(numbers(group, "ipc"), numbers(group, "cycles_active"))
        shares = paper_shares(opcode_counts(session, group))
        parts = {f"{k}_share": v for k, v in shares.items()}
        stack = {f"{k}_ipc": None if v is None or ipc is None else ipc * v / 100 for k, v in shares.items()}
        cells = {"kernel": name, "class": family(str(group["class"].iloc[0])), "cycles": cycles / steps(session)}
        rows.append(cells | {"ipc": ipc} | parts | stack)
    rows.sort(key=lambda r: -r["cycles"])
    title = f"IPC stacks: {session.name}"
    if not rows:
        return Table(title, columns, refused="no cycles were recorded (requires counters)")
    return Table(title, columns, rows[:top], ["UD: uniform datapath (addresses and loop counters); not tensor work."])

"""What a step is made of: kernels by class, phase and name; instructions by group and by pipe."""

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

    Memory and control opcodes that start with U are what they do; any other U-opcode runs on the uniform datapath,
    which computes addresses and loop counters once a warp and is not tensor work.
    """
    stem = _stem(opcode)
    for group, members in _groups().items():
        if group != "fma_pipe" and stem in members:
            return group
    return "uniform" if stem.startswith("U") else "other"


def pipe_of(opcode: str) -> str:
    """The execution pipe. IMAD is integer arithmetic on the FMA pipe: counting it as integer hides what busies FMA."""
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


# The seed's letters, for its figures.
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


def kernel_mix(session: Session, by: tuple[str, ...] = ("class", "phase")) -> Table:
    """Time and launches of a mean step by class and phase (or by any columns); copies and fills included."""
    count, rows = steps(session), session.launches
    words = [module_names(rows) if k == "module" else rows[k].fillna("").tolist() for k in by]
    times: dict[tuple[Any, ...], list[float]] = {}
    for key, time in zip(zip(*words, strict=True), numbers(rows, "duration_us"), strict=True):
        times.setdefault(key, []).append(0.0 if np.isnan(time) else float(time))
    whole = float(np.nansum(numbers(rows, "duration_us")))
    out = []
    for key, found in times.items():
        cells: dict[str, Any] = dict(zip(by, key, strict=True))
        spent = {"ms": sum(found) / 1e3 / count, "share": share(sum(found), whole), "launches": len(found) / count}
        out.append(cells | spent)
    columns = [
        *(Column(k, kind="text") for k in by),
        Column("ms", "ms", better="low", digits=3),
        Column("share", "%", "percent", digits=2),
        Column("launches", better="low", digits=_digits(out)),
    ]
    out.sort(key=lambda r: -r["ms"])
    unknown = share(float(np.nansum(numbers(rows[rows["class"] == "unknown"], "duration_us"))), whole)
    note = f"Of device time, {unknown or 0:.2f} % is in kernels of unknown class."
    return Table(f"Kernel mix: {session.name}", columns, out, [note])


def _digits(rows: list[dict[str, Any]]) -> int:
    """Steps that launch alike have whole numbers of launches in the mean."""
    return 0 if all(float(r["launches"]).is_integer() for r in rows) else 1


def kernel_shares(session: Session, top: int = 12) -> Table:
    """Kernels by short name: their share of kernel time, copies and fills left out, as the seed counts."""
    ran = kernels(session)
    named = ran.assign(short=[short(str(n)) for n in ran["name"]])
    whole, count, out = float(np.nansum(numbers(ran, "duration_us"))), steps(session), []
    for name, some in named.groupby("short"):
        time = float(np.nansum(numbers(some, "duration_us")))
        classes = sorted(set(some["class"].fillna("unknown")))
        cells = {"kernel": name, "class": ", ".join(classes), "ms": time / 1e3 / count}
        out.append(cells | {"share": share(time, whole), "launches": len(some) / count})
    out.sort(key=lambda r: -r["ms"])
    columns = [
        Column("kernel", kind="text"),
        Column("class", kind="text"),
        Column("ms", "ms", better="low", digits=3),
        Column("share", "%", "percent"),
        Column("launches", digits=_digits(out)),
    ]
    return Table(f"Kernels by share of kernel time: {session.name}", columns, out[:top])


def opcode_counts(session: Session, rows: pd.DataFrame | None = None) -> dict[str, float] | None:
    """Warp instructions a mean step by opcode: each distinct launch's counts, times how often it was launched.

    `rows` restricts it to some launches. None when no launch among them has opcodes.
    """
    ran = kernels(session) if rows is None else rows
    if session.opcodes.empty or ran.empty:
        return None
    key = ["name", "grid", "block"]
    launched = ran.fillna({"grid": "", "block": ""}).groupby(key).size().rename("times").reset_index()
    counts = session.opcodes.fillna({"grid": "", "block": ""}).merge(launched, on=key)
    if counts.empty:
        return None
    executed = numbers(counts, "executed") * counts["times"].to_numpy(float) / steps(session)
    summed: dict[str, float] = {}
    for opcode, value in zip(counts["opcode"], executed, strict=True):
        summed[opcode] = summed.get(opcode, 0.0) + float(np.nan_to_num(value))
    return summed


def opcode_coverage_pct(session: Session) -> float | None:
    """Share of kernel time whose opcodes were recorded."""
    ran = kernels(session)
    key = ["name", "grid", "block"]
    have = set(map(tuple, session.opcodes.fillna({"grid": "", "block": ""})[key].drop_duplicates().to_numpy()))
    hit = np.array([tuple(k) in have for k in ran.fillna({"grid": "", "block": ""})[key].to_numpy()], dtype=bool)
    time = numbers(ran, "duration_us")
    return share(float(np.nansum(time[hit])), float(np.nansum(time))) if len(ran) else None


def grouped(counts: dict[str, float], how: str = "group") -> dict[str, float]:
    place = {"group": group_of, "pipe": pipe_of}[how]
    out: dict[str, float] = {}
    for opcode, executed in counts.items():
        out[place(opcode)] = out.get(place(opcode), 0.0) + executed
    return out


def paper_shares(counts: dict[str, float] | None) -> dict[str, float | None]:
    """Percent by the seed's letters; all None when there are no opcodes."""
    if not counts or not sum(counts.values()):
        return dict.fromkeys(PAPER_GROUPS)
    groups, whole = grouped(counts), sum(counts.values())
    return {letter: 100 * sum(groups.get(g, 0.0) for g in members) / whole for letter, members in PAPER_GROUPS.items()}


def instruction_mix(session: Session, how: str = "group") -> Table:
    """Warp instructions of a mean step by group (what they do) or by pipe (where they run)."""
    title = f"Instruction mix by {how}: {session.name}"
    columns = [
        Column(how, kind="text"),
        Column("instructions", better="low", digits=0),
        Column("share", "%", "percent"),
        Column("opcodes", kind="text", doc="the largest five"),
    ]
    counts = opcode_counts(session)
    if counts is None:
        return Table(title, columns, refused="no opcodes were recorded (the full counter set is needed)")
    whole, place = sum(counts.values()), {"group": group_of, "pipe": pipe_of}[how]
    rows = []
    for name, executed in sorted(grouped(counts, how).items(), key=lambda i: -i[1]):
        members = sorted((o for o in counts if place(o) == name), key=lambda o: -counts[o])[:5]
        cells = {how: name, "instructions": executed, "share": share(executed, whole), "opcodes": ", ".join(members)}
        rows.append(cells)
    covered = opcode_coverage_pct(session) or 0.0
    notes = [f"Each distinct launch weighs as often as it is launched; opcodes cover {covered:.1f} % of kernel time."]
    return Table(title, columns, rows, notes)


def ipc_stack(session: Session, top: int = 8) -> Table:
    """IPC of the kernels with most cycles, split by what the instructions do: the parts of a row add up to its IPC."""
    letters = list(PAPER_GROUPS)
    columns = [
        Column("kernel", kind="text"),
        Column("class", kind="text"),
        Column("cycles", better="low", digits=0, doc="elapsed, all launches of a mean step"),
        Column("ipc", digits=2, doc="weighted by active cycles"),
        *(Column(f"{k}_share", "%", "percent", digits=1) for k in letters),
        *(Column(f"{k}_ipc", digits=3) for k in letters),
    ]
    ran = kernels(session)
    named = ran.assign(short=[short(str(n)) for n in ran["name"]])
    rows: list[dict[str, Any]] = []
    for name, some in named.groupby("short"):
        cycles = total(numbers(some, "cycles"))
        if cycles is None:
            continue
        ipc = mean(numbers(some, "ipc"), numbers(some, "cycles_active"))
        shares = paper_shares(opcode_counts(session, some))
        parts = {f"{k}_share": v for k, v in shares.items()}
        stack = {f"{k}_ipc": None if v is None or ipc is None else ipc * v / 100 for k, v in shares.items()}
        cells = {"kernel": name, "class": family(str(some["class"].iloc[0])), "cycles": cycles / steps(session)}
        rows.append(cells | {"ipc": ipc} | parts | stack)
    rows.sort(key=lambda r: -r["cycles"])
    title = f"IPC stacks: {session.name}"
    if not rows:
        return Table(title, columns, refused="no cycles were recorded (counters are needed)")
    return Table(title, columns, rows[:top], ["UD: uniform datapath (addresses, loop counters), not tensor work."])

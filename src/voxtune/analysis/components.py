"""Time and calls by network component, and the split of a step into functions, transfers and idle time.

Both have the form of the tables in the reports that the ladder reproduces (docs/results/ladder.md).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from voxtune.analysis.frame import family, kernels, milliseconds, numbers, on_gpu, share, steps
from voxtune.analysis.step import step_totals
from voxtune.analysis.table import Column, Table

if TYPE_CHECKING:
    import pandas as pd

    from voxtune.profile.session import Session

# The first match on the operator name wins.
_RULES = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("conv pad", r"constant_pad|(?<!\w)pad\b"),
        ("conv", r"conv"),
        ("layer_norm", r"layer_norm"),
        ("group_norm", r"group_norm"),
        ("softmax", r"softmax"),
        ("relu", r"relu|threshold_backward"),
        ("gelu", r"gelu"),
        ("silu", r"silu"),
        ("sigmoid", r"sigmoid"),
        ("upsample", r"upsample|interpolate"),
        ("pixel_shuffle", r"pixel_(un)?shuffle"),
        ("linear", r"addmm|linear"),
        ("matmul", r"\b(mm|bmm|baddbmm|matmul|einsum|_scaled_mm)\b"),
        ("cat", r"\bcat\b"),
        ("copy", r"copy|clone|contiguous|_to_copy"),
        ("optimizer", r"foreach|fused_adam"),
        ("reduce", r"\b(sum|mean|amax|norm)\b"),
        ("add", r"\badd_?\b"),
        ("mul", r"\bmul_?\b"),
    )
)


def component_of(op: str, kernel_class: str, module_type: str = "") -> str:
    if kernel_class == "triton":
        return "fused (Triton)"
    # A GroupNorm with one group is called layer norm in the reports; the class of the module tells them apart.
    if "LayerNorm" in module_type:
        return "layer_norm"
    for name, pattern in _RULES:
        if pattern.search(op):
            return name
    coarse = family(kernel_class)
    return {"convolution": "conv", "norm": "group_norm"}.get(coarse, coarse or "other")


def component_table(session: Session) -> Table:
    """Seconds, calls and share of a mean step. A call is a run of launches by one operator on one module and shape."""
    columns = [
        Column("component", kind="text"),
        Column("seconds", "s", better="low", digits=6),
        Column("share", "%", "percent", digits=2),
        Column("calls", better="low", digits=1),
        Column("launches", better="low", digits=1),
    ]
    count, kernel_rows = steps(session), kernels(session).sort_values(["step", "index"])
    kernel_rows = kernel_rows[kernel_rows["class"].fillna("") != "host"]
    ops, kinds, types = (kernel_rows[c].fillna("") for c in ("op", "class", "module_type"))
    names = [component_of(str(o), str(c), str(t)) for o, c, t in zip(ops, kinds, types, strict=True)]
    kernel_rows = kernel_rows.assign(component=names, first=_first_of_call(kernel_rows))
    total = milliseconds(kernel_rows, count)
    rows: list[dict[str, Any]] = []
    for name, group in kernel_rows.groupby("component"):
        spent = milliseconds(group, count)
        cells = {"component": name, "seconds": spent / 1e3, "share": share(spent, total)}
        rows.append(cells | {"calls": float(group["first"].sum()) / count, "launches": len(group) / count})
    rows.sort(key=lambda r: -r["seconds"])
    notes = ["Consecutive launches of the same operator with the same module and shapes count as one call."]
    return Table(f"Components: {session.name}", columns, rows, notes)


def _first_of_call(rows: pd.DataFrame) -> list[bool]:
    if rows.empty:
        return []
    key = rows[["step", "op", "module", "op_shapes", "phase"]].astype("string").fillna("")
    # On a CPU each row is one call.
    changed = (key != key.shift(fill_value="none")).any(axis=1) | (rows["kind"] == "cpu_op")
    return [bool(c) for c in changed]


def transfer_breakdown(session: Session) -> Table:
    """A step split into convolution, other functions, transfers in each direction and idle time."""
    columns = [
        Column("part", kind="text"),
        Column("ms", "ms", better="low", digits=3),
        Column("share", "%", "percent", digits=1),
    ]
    count, kernel_rows = steps(session), kernels(session)
    conv = np.array([family(str(c)) == "convolution" for c in kernel_rows["class"].fillna("")], dtype=bool)
    time = numbers(kernel_rows, "duration_us") / 1e3 / count
    copies = session.launches[session.launches["kind"] == "memcpy"]

    def copied(directions: list[str]) -> float:
        return milliseconds(copies[copies["direction"].isin(directions)], count)

    parts: list[tuple[str, float | None]] = [
        ("convolution", float(np.nansum(time[conv]))),
        ("other functions", float(np.nansum(time[~conv]))),
        ("transfer to the GPU", copied(["HtoD"])),
        ("transfer to the CPU", copied(["DtoH"])),
        ("copies within the GPU", copied(["DtoD"])),
        ("fills", milliseconds(session.launches[session.launches["kind"] == "memset"], count)),
        ("idle", step_totals([session]).rows[0]["idle_ms"] if on_gpu(session) else None),
    ]
    total = sum(ms for _, ms in parts if ms is not None)
    rows = [{"part": name, "ms": ms, "share": share(ms, total)} for name, ms in parts]
    return Table(f"Transfer breakdown: {session.name}", columns, rows, ["Mean step; overlapping launches count twice."])

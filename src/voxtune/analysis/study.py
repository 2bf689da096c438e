"""The Med-DDPM profiling paper, reproduced: its published values beside this GPU, in its window and over the whole step.

"The paper" in this package: Ryoo et al., Performance Analysis and Optimization of 3D Generative Diffusion Models across
GPU Architectures, ICPE 2026, doi 10.1145/3777884.3797012. It profiled kernels 11 to 110 of a training run.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from voxtune.analysis.certificate import Level, refusal, window
from voxtune.analysis.counters import average, totals
from voxtune.analysis.frame import family, kernels, numbers, ratio, share, short, steps, total
from voxtune.analysis.mix import kernel_shares, opcode_counts, paper_shares
from voxtune.analysis.priority import priority
from voxtune.analysis.table import Column, Table
from voxtune.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from voxtune.profile.session import Session

CONFIGS = ("baseline", "tf32", "channels_last", "tf32+channels_last")
GPUS = ("V100", "A100", "H100")
NAMES = {"baseline": "Baseline", "tf32": "OPT1", "channels_last": "OPT2", "tf32+channels_last": "OPT12"}


@functools.cache
def paper() -> dict[str, Any]:
    """The values stated in the paper and how they were measured."""
    return json.loads(resources.files("voxtune.analysis").joinpath("data/paper.json").read_text())


def value_text(fact: dict[str, Any]) -> str:
    """A published value as text: a number, a range, or a bound."""
    if "low" in fact:
        return f"{fact['low']:g} to {fact['high']:g}"
    return f"{fact.get('bound', '')}{fact['value']:g}"


def study_table(sessions: Sequence[Session]) -> Table:
    """One row per quantity and configuration. Sessions are matched by config; a baseline session is required."""
    by_config = _by_config(sessions)
    columns = [
        Column("figure", kind="int"),
        Column("quantity", kind="text"),
        Column("config", kind="text"),
        Column("unit", kind="text"),
        *(Column(gpu, kind="text", doc="as published") for gpu in GPUS),
        Column("window", digits=3, doc="this GPU, kernels 11 to 110, unweighted mean over launches"),
        Column("step_plain", digits=3, doc="this GPU, whole step, unweighted mean over launches"),
        Column("step", digits=3, doc="this GPU, whole step, weighted mean (see docs/reference/analysis.md)"),
        Column("counted", "%", "percent", "high", 0, "share of kernel time with the counters for the step's value"),
    ]
    views = {c: _views(s) for c, s in by_config.items()}
    levels: tuple[Level, ...] = ("few", "full")
    refused = {level: {c: refusal([s], level) for c, s in by_config.items()} for level in levels}
    rows = []
    for (figure, quantity, config), facts in _grouped().items():
        row: dict[str, Any] = {"figure": figure, "quantity": quantity, "config": config, "unit": facts[0]["unit"]}
        for fact in facts:
            row |= {g: value_text(fact) for g in (GPUS if fact["gpu"] == "all" else (fact["gpu"],))}
        if config in views:
            # Warps and stalls require the full counter set, cycles and instructions the few tier.
            row |= _measured(quantity, config, views, refused["full" if figure in (12, 13) else "few"])
            if row["step"] is not None:
                row["counted"] = counted_pct(by_config[config], quantity.removesuffix("_ratio"))
        rows.append(row)
    # The paper's metric of the tensor pipe includes constants loaded through it: add matrix instructions alone.
    tensor = {"figure": 10, "quantity": "tensor_pct", "unit": "%"}
    for config, session in by_config.items():
        values = _measured("tensor_pct", config, views, refused["few"])
        counted = {"counted": counted_pct(session, "tensor_pct")} if values["step"] is not None else {}
        rows.append(tensor | {"config": config} | values | counted)
    rows.sort(key=lambda r: r["figure"])
    missing = [c for c in CONFIGS if c not in by_config]
    notes = [
        f"The paper: {paper()['source']}",
        "tensor_pipe_pct is the paper's metric and includes constants loaded through the pipe; tensor_pct counts matrix "
        "instructions only.",
        "Ratios over the step are empty where a session does not cover its step. Counted: the share of kernel time with the "
        "counters for the value.",
    ]
    notes += [f"{c}: {reason}" for c, reason in refused["few"].items() if reason]
    notes += [f"not recorded: {', '.join(missing)}"] if missing else []
    return Table(
        "The paper's values and this GPU", columns, rows, notes, extra={"configs": NAMES, "method": paper()["method"]}
    )


def _by_config(sessions: Sequence[Session]) -> dict[str, Session]:
    by_config: dict[str, Session] = {}
    for session in sessions:
        config = str(session.meta.get("config"))
        if config in CONFIGS and config not in by_config:
            by_config[config] = session
    if "baseline" not in by_config:
        given = ", ".join(str(s.meta.get("config")) for s in sessions) or "none"
        raise InputError(f"the study requires a session with configuration baseline; given: {given}")
    return by_config


def _grouped() -> dict[tuple[int, str, str], list[dict[str, Any]]]:
    out: dict[tuple[int, str, str], list[dict[str, Any]]] = {}
    for fact in paper()["facts"]:
        out.setdefault((fact["figure"], fact["quantity"], fact["config"]), []).append(fact)
    return out


View = tuple["Session", bool]


def _views(session: Session) -> dict[str, View]:
    """The launches of each view, and whether its means are unweighted."""
    return {"window": (window(session), True), "step_plain": (session, True), "step": (session, False)}


def _measured(
    quantity: str, config: str, views: dict[str, dict[str, View]], refused: dict[str, str | None]
) -> dict[str, float | None]:
    out: dict[str, float | None] = {}
    for name, (session, plain) in views[config].items():
        if not quantity.endswith("_ratio"):
            out[name] = measure(session, quantity, plain=plain)
            continue
        stem = quantity.removesuffix("_ratio")
        if name != "window" and (refused[config] or refused["baseline"]):
            out[name] = None
            continue
        base, base_plain = views["baseline"][name]
        out[name] = ratio(measure(session, stem, plain=plain), measure(base, stem, plain=base_plain))
    return out


def measure(session: Session, quantity: str, *, plain: bool) -> float | None:
    """One of the paper's quantities in a session or window; None where its counters were not read."""
    if quantity in ("cycles", "instructions", "ipc"):
        return totals(session)["ipc_weighted" if quantity == "ipc" and not plain else quantity]
    if quantity.startswith("priority_rank_"):
        return _rank(session, quantity.removeprefix("priority_rank_"), "score" if plain else "gain_ms")
    if quantity.startswith("dominant_"):
        return _dominant(session, quantity.removeprefix("dominant_"))
    if quantity.endswith("_share"):
        return _share_of(session, quantity.removesuffix("_share").split("_"))
    if quantity.startswith("convolution_"):
        return paper_shares(opcode_counts(session, _of_family(session, "convolution")))[quantity.split("_")[1]]
    return average(kernels(session), quantity, plain=plain)


def counted_pct(session: Session, quantity: str) -> float | None:
    """Percent of kernel time with the counters of a quantity; 100 for shares of time, which require none."""
    if quantity.endswith("_share"):
        return 100.0
    kernel_rows = kernels(session)
    time = numbers(kernel_rows, "duration_us")
    stem, _, kind = quantity.partition("_")
    if quantity.startswith("priority_rank_"):
        measured = ~np.isnan(numbers(kernel_rows, "est_speedup_pct"))
    elif stem in ("convolution", "dominant") and kind not in ("cycles", "ipc"):
        time_share = (session.meta["tiers"].get("opcodes") or {}).get("time_share")
        if time_share is not None:
            return 100.0 * float(time_share)
        known = set(zip(*(session.opcodes[c] for c in ("name", "grid", "block")), strict=True))
        measured = np.array(
            [k in known for k in zip(*(kernel_rows[c] for c in ("name", "grid", "block")), strict=True)], dtype=bool
        )
    else:
        measured = ~np.isnan(numbers(kernel_rows, kind if stem == "dominant" else quantity))
    return share(float(np.nansum(time[measured])), float(np.nansum(time)))


def _share_of(session: Session, names: list[str]) -> float | None:
    """Percent of kernel time. The paper classifies by kernel name: its elementwise includes copies by that kernel."""
    kernel_rows = kernels(session)
    time = numbers(kernel_rows, "duration_us")
    pointwise = np.array(["elementwise_kernel" in short(str(n)) for n in kernel_rows["name"]], dtype=bool)
    coarse = np.array([family(str(c)) for c in kernel_rows["class"].fillna("unknown")], dtype=object)
    hit = (pointwise & ("elementwise" in names)) | (~pointwise & np.isin(coarse.astype(str), names))
    return share(float(np.nansum(time[hit])), float(np.nansum(time)))


def _rank(session: Session, name: str, score: str) -> float | None:
    table = priority(session, "class")
    ranked = sorted((r for r in table.rows if r[score] is not None), key=lambda r: -r[score])
    ranks = [i for i, r in enumerate(ranked, start=1) if r["class"] == name]
    return float(ranks[0]) if ranks else None


def _dominant(session: Session, quantity: str) -> float | None:
    """A quantity of the kernel with the largest share of kernel time."""
    shares = kernel_shares(session, top=1).rows
    if not shares:
        return None
    if quantity == "share":
        return shares[0]["share"]
    kernel_rows = kernels(session)
    rows = kernel_rows[np.array([short(str(n)) == shares[0]["kernel"] for n in kernel_rows["name"]], dtype=bool)]
    measures: dict[str, Callable[[], float | None]] = {
        "cycles": lambda: _per_step(total(numbers(rows, "cycles")), steps(session)),
        "ipc": lambda: average(rows, "ipc"),
    }
    return measures[quantity]() if quantity in measures else paper_shares(opcode_counts(session, rows))[quantity]


def _per_step(value: float | None, count: int) -> float | None:
    return None if value is None else value / count


def _of_family(session: Session, name: str) -> pd.DataFrame:
    kernel_rows = kernels(session)
    return kernel_rows[np.array([family(str(c)) == name for c in kernel_rows["class"].fillna("unknown")], dtype=bool)]

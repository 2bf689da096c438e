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
from voxtune.analysis.counters import average, kernels_with_dram, totals
from voxtune.analysis.frame import family, gpu_name, kernels, numbers, ratio, share, short, steps, total
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


# The views of a GPU: title and explanation of their columns.
VIEWS = {
    "window": ("window", "kernels 11 to 110, unweighted mean over launches"),
    "step_plain": ("step, plain mean", "whole step, unweighted mean over launches"),
    "step": ("step", "whole step, weighted mean (see docs/reference/analysis.md)"),
    "counted": ("counted", "share of kernel time with the counters for the step's value"),
}


def study_table(sessions: Sequence[Session]) -> Table:
    """One row per quantity and configuration, and columns per recorded GPU.

    Sessions are matched by config; a baseline session of each GPU is required. Ratios are those to the same GPU's baseline.
    With several GPUs the names of their columns start with the GPU.
    """
    by_gpu = _by_gpu(sessions)
    columns = [
        Column("figure", kind="int"),
        Column("quantity", kind="text"),
        Column("config", kind="text"),
        Column("unit", kind="text"),
        *(Column(gpu, kind="text", doc="as published") for gpu in GPUS),
        *(c for gpu in by_gpu for c in _gpu_columns(gpu, several=len(by_gpu) > 1)),
    ]
    rows: dict[tuple[int, str, str], dict[str, Any]] = {}
    for (figure, quantity, config), facts in _grouped().items():
        row: dict[str, Any] = {"figure": figure, "quantity": quantity, "config": config, "unit": facts[0]["unit"]}
        for fact in facts:
            row |= {g: value_text(fact) for g in (GPUS if fact["gpu"] == "all" else (fact["gpu"],))}
        rows[figure, quantity, config] = row
    # The paper's metric of the tensor pipe includes constants loaded through it: add matrix instructions alone.
    for config in dict.fromkeys(c for by_config in by_gpu.values() for c in by_config):
        rows[10, "tensor_pct", config] = {"figure": 10, "quantity": "tensor_pct", "unit": "%", "config": config}
    notes = [
        f"The paper: {paper()['source']}",
        "tensor_pipe_pct is the paper's metric and includes constants loaded through the pipe; tensor_pct counts matrix "
        "instructions only.",
        "dram_pct is the DRAM traffic over time and peak bandwidth; where the bandwidth is unknown, the profiler's counter.",
        "Ratios over the step are empty where a session does not cover its step. Counted: the share of kernel time with the "
        "counters for the value.",
    ]
    for gpu, by_config in by_gpu.items():
        prefix = f"{gpu} " if len(by_gpu) > 1 else ""
        for key, cells in _of_gpu(by_config, list(rows)).items():
            rows[key] |= {f"{prefix}{name}": value for name, value in cells.items()}
        notes += [f"{prefix}{c}: {reason}" for c, s in by_config.items() if (reason := refusal([s], "few"))]
        missing = [c for c in CONFIGS if c not in by_config]
        notes += [f"{prefix}not recorded: {', '.join(missing)}"] if missing else []
    ordered = sorted(rows.values(), key=lambda r: r["figure"])
    title = f"The paper's values and {' and '.join(by_gpu)}"
    return Table(title, columns, ordered, notes, extra={"configs": NAMES, "method": paper()["method"]})


def _gpu_columns(gpu: str, *, several: bool) -> list[Column]:
    out = []
    for name, (title, doc) in VIEWS.items():
        percent: dict[str, Any] = {"unit": "%", "kind": "percent", "better": "high", "digits": 0}
        shape = percent if name == "counted" else {"digits": 3}
        # With one GPU the share that was counted stands beside its value.
        detail = name == "step_plain" or (several and name == "counted")
        key = f"{gpu} {name}" if several else name
        out.append(Column(key, doc=f"{gpu}, {doc}", title=f"{gpu} {title}", detail=detail, **shape))
    return out


def _of_gpu(
    by_config: dict[str, Session], keys: Sequence[tuple[int, str, str]]
) -> dict[tuple[int, str, str], dict[str, float | None]]:
    """The views of one GPU, by row."""
    views = {c: _views(s) for c, s in by_config.items()}
    levels: tuple[Level, ...] = ("few", "full")
    refused = {level: {c: refusal([s], level) for c, s in by_config.items()} for level in levels}
    out: dict[tuple[int, str, str], dict[str, float | None]] = {}
    for figure, quantity, config in keys:
        if config not in views:
            continue
        # Warps and stalls require the full counter set, cycles and instructions the few tier.
        cells = _measured(quantity, config, views, refused["full" if figure in (12, 13) else "few"])
        if cells["step"] is not None:
            cells["counted"] = counted_pct(by_config[config], quantity.removesuffix("_ratio"))
        out[figure, quantity, config] = cells
    return out


def _by_gpu(sessions: Sequence[Session]) -> dict[str, dict[str, Session]]:
    """The first session of each GPU and configuration of the paper."""
    by_gpu: dict[str, dict[str, Session]] = {}
    for session in sessions:
        config = str(session.meta.get("config"))
        if config in CONFIGS:
            by_gpu.setdefault(gpu_name(session), {}).setdefault(config, session)
    without = [gpu for gpu, by_config in by_gpu.items() if "baseline" not in by_config]
    if without or not by_gpu:
        given = ", ".join(str(s.meta.get("config")) for s in sessions) or "none"
        where = f" of {', '.join(without)}" if len(by_gpu) > 1 else ""
        raise InputError(f"the study requires a session with configuration baseline{where}; given: {given}")
    return by_gpu


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
    return average(kernels_with_dram(session), quantity, plain=plain)


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
        kernel_rows = kernels_with_dram(session)
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

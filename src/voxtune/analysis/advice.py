"""Recommended optimisations, each with evidence, an estimated gain and the option or pass that implements it.

A gain is the time spent on the problem minus the time that the work itself needs, at most the time of the step. Gains
overlap: applying one changes the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from voxtune.analysis.frame import family, kernels, milliseconds, numbers, on_gpu, steps
from voxtune.analysis.ledger import layout_ledger
from voxtune.analysis.roofline import card_of
from voxtune.analysis.step import step_totals, transfers
from voxtune.analysis.table import Column, Table
from voxtune.profile.counters import tensor_use

if TYPE_CHECKING:
    import pandas as pd

    from voxtune.profile.session import Session

# Smaller gains, in percent of the step, are not reported.
MIN_GAIN_PCT = 1.0


@dataclass(frozen=True, kw_only=True)
class Advice:
    title: str
    evidence: str
    gain_ms: float
    action: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Input of the rules: kernels with their coarse class, and totals of a mean step."""

    session: Session
    rows: pd.DataFrame
    step_ms: float
    count: int
    ledger: Table

    def ms(self, name: str) -> float:
        return milliseconds(self.rows[self.rows["family"] == name], self.count)


def advice(session: Session) -> Table:
    """Ranked by estimated gain."""
    columns = [
        Column("rank", kind="int"),
        Column("advice", kind="text"),
        Column("evidence", kind="text"),
        Column("gain_ms", "ms", better="high"),
        Column("gain_pct", "%", "percent", "high", 1, "of the step"),
        Column("action", kind="text", doc="pass or option that implements it"),
    ]
    facts = _facts(session)
    lines = [line for rule in RULES for line in rule(facts)]
    ranked = [a for a in lines if 100 * a.gain_ms >= MIN_GAIN_PCT * facts.step_ms]
    ranked.sort(key=lambda a: -a.gain_ms)
    rows: list[dict[str, Any]] = [
        {"rank": i, "advice": a.title, "evidence": a.evidence, "gain_ms": min(a.gain_ms, facts.step_ms),
         "gain_pct": min(100.0, 100 * a.gain_ms / facts.step_ms), "action": a.action}
        for i, a in enumerate(ranked, start=1)
    ]  # fmt: skip
    notes = [
        "Gains are estimates for one change at a time. They overlap and do not add up; profile again after each change."
    ]
    if not rows:
        notes.insert(0, f"No optimisation with an estimated gain of at least {MIN_GAIN_PCT:g} % of the step.")
    return Table(f"Advice: {session.name}", columns, rows, notes)


def _facts(session: Session) -> Facts:
    kernel_rows, count = kernels(session), steps(session)
    rows = kernel_rows.assign(family=[family(str(c)) for c in kernel_rows["class"].fillna("unknown")])
    totals = step_totals([session]).rows[0]
    # Idle time is part of the step.
    step_ms = max(totals["wall_ms"] or 0.0, totals["device_ms"] or 0.0)
    return Facts(session=session, rows=rows, count=count, step_ms=step_ms, ledger=layout_ledger(session))


def _tensor_cores(facts: Facts) -> list[Advice]:
    heavy = facts.rows[facts.rows["family"].isin(["convolution", "matmul"])]
    use = np.array(tensor_use(heavy), dtype=object)
    time = numbers(heavy, "duration_us") / 1e3 / facts.count
    off = float(np.nansum(time[use == False])) if len(use) else 0.0  # noqa: E712 - None is neither
    gpu = card_of(facts.session)
    if not off or gpu is None or gpu.tf32 is None:
        return []
    measured = float(np.nansum(time[[u is not None for u in use]]))
    # Convolutions of these shapes reach about half of the ratio of the peak rates.
    factor = max(1.0, 0.5 * gpu.tf32 / gpu.fp32)
    return [
        Advice(
            title="Run convolutions and matmuls on tensor cores",
            evidence=f"counters show {off:.1f} of {measured:.1f} ms in convolutions and matmuls on CUDA cores",
            gain_ms=off * (1 - 1 / factor),
            action="tf32 pass, or bf16 if the quality gate accepts it",
        )
    ]


def _layout(facts: Facts) -> list[Advice]:
    ledger = facts.ledger
    moved = sum(r["layout_ms"] + r["copy_ms"] + r["padding_ms"] for r in ledger.rows)
    norms = sum(r["total_ms"] for r in ledger.rows if "Norm" in (r["type"] or ""))
    if not moved:
        return []
    largest = ", ".join(str(r["module"]) for r in ledger.rows[:3])
    out = []
    if norms > 0.2 * moved:
        out.append(
            Advice(
                title="Keep channels-last through the norms",
                evidence=f"{norms:.1f} ms of copies are charged to norm modules; largest: {largest}",
                gain_ms=norms,
                action="channels_last and fuse_norm passes (norm and activation fused, channels-last)",
            )
        )
    rest = moved - (norms if out else 0.0)
    if rest > 0:
        out.append(
            Advice(
                title="Use one memory format throughout",
                evidence=f"{rest:.1f} ms in layout conversions, padding and copies by kernels; largest: {largest}",
                gain_ms=rest,
                action="channels_last pass with tensor-core convolutions, which need no conversion of their operands",
            )
        )
    return out


def _casts(facts: Facts) -> list[Advice]:
    spent = sum(r["cast_ms"] for r in facts.ledger.rows)
    if not spent:
        return []
    return [
        Advice(
            title="Store weights and activations in one dtype",
            evidence=f"{spent:.1f} ms in casts",
            gain_ms=spent,
            action="bf16 pass (BF16 weights, FP32 statistics in the fused norms) instead of autocast",
        )
    ]


def _norms(facts: Facts) -> list[Advice]:
    """Gain of a norm limited by DRAM bandwidth; half of its time where DRAM bytes were not measured."""
    spent = facts.ms("norm")
    activations = facts.rows[facts.rows["op"].fillna("").astype(str).str.contains("silu|gelu")]
    extra = milliseconds(activations, facts.count)
    if not spent:
        return []
    rows, gpu = facts.rows[facts.rows["family"] == "norm"], card_of(facts.session)
    moved = numbers(rows, "dram_bytes")
    known = ~np.isnan(moved)
    if gpu is not None and known.any():
        time = float(np.nansum(numbers(rows, "duration_us")[known])) / 1e3 / facts.count
        needed = float(moved[known].sum()) / facts.count / (0.85 * gpu.bandwidth_gbs * 1e9) * 1e3
        gain, basis = max(0.0, time - needed) + extra / 2, f"DRAM traffic requires {needed:.1f} ms"
    else:
        gain, basis = spent / 2 + extra / 2, "DRAM traffic not measured; half assumed"
    return [
        Advice(
            title="Fuse norm and activation",
            evidence=f"norms take {spent:.1f} ms ({basis}), activations another {extra:.1f} ms",
            gain_ms=gain,
            action="fuse_norm pass (norm and activation in one kernel, channels-last)",
        )
    ]


def _elementwise(facts: Facts) -> list[Advice]:
    spent = facts.ms("elementwise") + facts.ms("cat")
    if not spent:
        return []
    return [
        Advice(
            title="Fuse elementwise chains",
            evidence=f"{spent:.1f} ms in elementwise kernels and concatenations, each of which reads and writes memory",
            gain_ms=spent / 2,
            action="epilogue and pointwise passes, or torch.compile",
        )
    ]


def _gaps(facts: Facts) -> list[Advice]:
    if not on_gpu(facts.session):
        return []
    row = step_totals([facts.session]).rows[0]
    if not row["idle_ms"]:
        return []
    return [
        Advice(
            title="Reduce launch gaps",
            evidence=f"idle for {row['idle_ms']:.1f} ms of the step ({row['idle_pct']:.0f} %, {row['launches']} launches), "
            f"{row['host_bound_ms']:.1f} ms of it waiting for the host",
            gain_ms=row["idle_ms"],
            action="cuda_graph pass",
        )
    ]


def _transfers(facts: Facts) -> list[Advice]:
    rows = {r["direction"]: r for r in transfers(facts.session).rows}
    spent = rows["HtoD"]["ms"] + rows["DtoH"]["ms"]
    if not spent:
        return []
    return [
        Advice(
            title="Keep data on the GPU",
            evidence=f"{spent:.2f} ms per step in {rows['HtoD']['copies']} host-to-device and "
            f"{rows['DtoH']['copies']} device-to-host copies",
            gain_ms=spent,
            action="pinned memory and a copy stream in the data loader; schedule and noise on the device in the sampler",
        )
    ]


def _weight_gradients(facts: Facts) -> list[Advice]:
    """A weight gradient has the FLOPs of the forward pass: if it takes far longer, cuDNN chose a slow kernel."""
    time = {c: milliseconds(facts.rows[facts.rows["class"] == c], facts.count) for c in ("conv_fprop", "conv_wgrad")}
    over = time["conv_wgrad"] - 1.5 * time["conv_fprop"]
    if over <= 0 or not time["conv_fprop"]:
        return []
    return [
        Advice(
            title="Autotune the weight-gradient kernels of cuDNN",
            evidence=f"weight gradients take {time['conv_wgrad']:.1f} ms, forward convolutions with the same number of FLOPs "
            f"{time['conv_fprop']:.1f} ms",
            gain_ms=over / 2,
            action="torch.backends.cudnn.benchmark = True, then the tf32 pass",
        )
    ]


RULES: tuple[Callable[[Facts], list[Advice]], ...] = (
    _tensor_cores,
    _layout,
    _casts,
    _norms,
    _elementwise,
    _gaps,
    _transfers,
    _weight_gradients,
)

"""The tuner: climbs a ladder of passes, measures and gates every rung, and keeps what is faster and the same.

A rung adds passes to the best plan so far. It stays if its step is faster than that plan's and the gate lets it through;
otherwise its row says by how much it lost, or which figure refused it, and the climb goes on without it.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from voxtune.errors import InputError
from voxtune.files import one_line
from voxtune.plan.build import Subject
from voxtune.plan.cache import identity
from voxtune.plan.gate import Gate, Trajectory, Verdict, trajectory_of, vary, volume_of
from voxtune.plan.hazards import refuses_half, slow_half
from voxtune.plan.measure import Timing, clocked, measure
from voxtune.plan.passes.base import HALF
from voxtune.plan.plan import Plan, Step
from voxtune.plan.run import Optimized, compilers, kernels_ready

log = logging.getLogger("voxtune")
Say = Callable[[str], None]
# A rung has to win by more than the measurement's own spread.
WORTH = 0.995
# What does not rewrite the graph is left out of the float32 twin that the gate's first question is asked of.
NOT_STRUCTURE = ("strict", "bf16", "fp16", "tf32", "channels_last", "compile", "cuda_graph", "cudnn_benchmark", "heap")


@dataclass(frozen=True)
class Rung:
    """`add` goes onto the best plan so far; `apart` starts from nothing instead, as a rival."""

    name: str
    add: tuple[str, ...]
    apart: bool = False


GPU_LADDER = (
    Rung("tf32", ("tf32",)),
    Rung("channels_last", ("strict", "channels_last"), apart=True),
    Rung("tf32 + channels_last", ("tf32", "channels_last"), apart=True),
    Rung("bf16", ("bf16",), apart=True),
    Rung("bf16 + torch.compile", ("bf16", "channels_last", "cleanup", "compile"), apart=True),
    Rung("fused norms", ("bf16", "channels_last", "cleanup", "sdpa", "time", "fuse_norm"), apart=True),
    Rung("cuDNN autotuning", ("cudnn_benchmark",)),
    Rung("bias, residual, 1x1, upsampling", ("epilogue", "pointwise", "upsample")),
    Rung("stem and head", ("edges",)),
    Rung("own convolutions", ("conv3d",)),
    Rung("CUDA graph", ("cuda_graph",)),
)
CPU_LADDER = (
    Rung("sharing and sdpa", ("cleanup", "sdpa", "time")),
    Rung("channels_last", ("channels_last",)),
    Rung("torch.compile", ("cleanup", "compile"), apart=True),
    Rung("channels_last + torch.compile", ("cleanup", "sdpa", "time", "channels_last", "compile"), apart=True),
    Rung("bf16", ("cleanup", "sdpa", "time", "bf16", "channels_last"), apart=True),
    Rung("memory kept", ("heap",)),
)
# For who has a minute or two: the likeliest together, then what a refusal of the first may have hidden.
CPU_IN_SHORT = (
    Rung("sharing, sdpa, channels_last, memory kept", ("cleanup", "sdpa", "time", "channels_last", "heap")),
    Rung("sharing, sdpa, memory kept", ("cleanup", "sdpa", "time", "heap")),
    Rung("torch.compile", ("cleanup", "compile", "heap"), apart=True),
)


@dataclass
class Row:
    """One line of the waterfall."""

    name: str
    passes: tuple[str, ...]
    timing: Timing | None = None
    verdict: Verdict | None = None
    kept: bool = False
    why: str = ""

    def describe(self) -> dict[str, Any]:
        told: dict[str, Any] = {"name": self.name, "passes": list(self.passes), "kept": self.kept}
        if self.timing is not None:
            told |= {k: None if v is None else round(v, 4) for k, v in asdict(self.timing).items()}
        if self.verdict is not None:
            told |= {"error": self.verdict.error, "passed": self.verdict.passed}
        return told | ({"why": self.why} if self.why else {})


@dataclass
class Tuned:
    """The best plan with its evidence, and every row that was measured, the losers too."""

    plan: Plan
    network: Optimized
    rows: list[Row] = field(default_factory=list)


def precision_of(plan: Plan) -> str:
    return next((p for p in ("bf16", "fp16", "tf32") if p in plan.names), "fp32")


def gate_for(subject: Subject, trajectory: Trajectory | None = None, checks: int = 3) -> Gate:
    model, inputs = subject.model, subject.inputs
    if trajectory is None:
        with torch.no_grad():
            output = volume_of(model(*inputs[0], **inputs[1]))
        trajectory = trajectory_of(inputs, output)
    return Gate(model, vary(inputs, checks), trajectory)


def judge(subject: Subject, network: Optimized, gate: Gate) -> Verdict:
    """Asks the gate about a plan that was built, and about its float32 twin where the graph was rewritten."""
    plan = network.plan
    twin = Plan(tuple(s for s in plan.steps if s.name not in NOT_STRUCTURE))
    # Kernels compile on the processor's cores while the gate computes its references on the GPU.
    with clocked("kernels and references ready"), kernels_ready(network, subject.inputs):
        gate.prepare(precision_of(plan))
        structure = _plainly(subject.build(twin, twin=True)) if twin.steps else None
    with clocked("judged"):
        return gate.judge(network, precision_of(plan), structure)


def _plainly(twin: Optimized) -> Callable[..., Any]:
    """The twin by its operators' references: it asks about the graph. The kernels answer for themselves in the plan's run."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if importlib.util.find_spec("triton") is None:
            return twin(*args, **kwargs)
        from voxtune.kernels.ops import plain_operators

        with plain_operators():
            return twin(*args, **kwargs)

    return call


def first_admitted(subject: Subject, plans: Sequence[Plan], gate: Gate) -> tuple[Optimized, Verdict] | None:
    """The first plan that can be built here and passes the gate; what the others failed by is logged."""
    with compilers(subject.device):
        gate.begin()
        return _first_admitted(subject, plans, gate)


def _first_admitted(subject: Subject, plans: Sequence[Plan], gate: Gate) -> tuple[Optimized, Verdict] | None:
    half = refuses_half(subject.device)
    for plan in plans:
        names = "+".join(plan.names)
        if half is not None and precision_of(plan) in HALF:
            log.warning("plan %s refused: %s", names, half)
            continue
        try:
            network = subject.build(plan)
            verdict = judge(subject, network, gate)
        except Exception as error:  # a kernel that fails here costs this plan; the next one is slower and plainer
            log.warning("plan %s failed: %s: %s", names, type(error).__name__, one_line(error))
            continue
        if verdict.passed:
            return network, verdict
        log.warning("plan %s refused: %s", names, verdict.reason)
    return None


def tune(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    ladder: Sequence[Rung] | None = None,
    trajectory: Trajectory | None = None,
    checks: int = 3,
    seconds: float = math.inf,
    say: Say = lambda _line: None,
) -> Tuned:
    """Climbs `ladder`; no rung is begun after `seconds`. The gate asks on `checks` inputs, and along `trajectory`."""
    began = time.monotonic()
    subject = Subject(model, (tuple(args), kwargs or {}))
    ladder = ladder or (GPU_LADDER if subject.device.type == "cuda" else CPU_LADDER)
    gate = gate_for(subject, trajectory, checks)
    best = _baseline(subject, gate)
    say(_line(best.rows[0]))
    for rung in ladder:
        if time.monotonic() - began > seconds:
            best.rows.append(Row(rung.name, rung.add, why="not tried: the time is up"))
            say(_line(best.rows[-1]))
            continue
        start = () if rung.apart else best.plan.steps
        names = [s.name for s in start]
        clean = tuple(s for s in start if not (s.name == "strict" and "tf32" in rung.add))
        plan = Plan((*clean, *(Step(n) for n in rung.add if n not in names)))
        if not rung.apart and set(plan.names) <= set(best.plan.names):
            continue  # it is part of the best already
        row, network = _try(subject, rung, plan, gate, best.network)
        best.rows.append(row)
        say(_line(row))
        if network is not None:
            best.plan, best.network = plan, network
        del network
        gc.collect()
    best.plan = Plan(best.plan.steps, identity(model, subject.inputs), _evidence(best))
    return best


def _baseline(subject: Subject, gate: Gate) -> Tuned:
    """Float32 as it is: it is the gate's own measure, so what it errs is known there."""
    plan = Plan.of("strict")
    network = subject.build(plan)
    timing = _time(network, subject)
    error = gate.yardstick("fp32")[0]
    verdict = Verdict(math.isfinite(error), None, {"precision": "fp32", "relative": error})
    if not verdict.passed:
        raise InputError("the network's own answer in float32 is not finite: give other inputs, or other weights")
    return Tuned(plan, network, [Row("baseline", plan.names, timing, verdict, kept=True)])


def _try(subject: Subject, rung: Rung, plan: Plan, gate: Gate, best: Optimized) -> tuple[Row, Optimized | None]:
    row = Row(rung.name, plan.names)
    device = subject.device
    half = (refuses_half(device) or slow_half(device.type)) if precision_of(plan) in HALF else None
    if half is not None:
        row.why = half
        return row, None
    try:
        network = subject.build(plan)
        missing = [
            f"{n}: {network.notes[n]}" for n in rung.add if network.notes.get(n, "").startswith("does not apply")
        ]
        if missing:
            row.why = "; ".join(missing)
            return row, None
        row.timing = _time(network, subject)
        if not _faster(network, row.timing, best, subject):
            row.why = "not faster than the best so far"
            return row, None
        row.verdict = judge(subject, network, gate)
    except Exception as error:  # a compiler or kernel that fails costs its own rung, and says so
        row.why = f"{type(error).__name__}: {one_line(error)}"
        return row, None
    row.kept = row.verdict.passed
    row.why = "" if row.kept else f"refused: {row.verdict.reason}"
    return row, network if row.kept else None


def _time(network: Optimized, subject: Subject, **options: Any) -> Timing:
    args, kwargs = subject.inputs
    found = measure(lambda: network(*args, **kwargs), subject.device, **options)
    return found if found.peak_gib is None else replace(found, peak_gib=found.peak_gib + network.runner.graph_gib)


def _faster(network: Optimized, timing: Timing, best: Optimized, subject: Subject) -> bool:
    """Against the best plan measured once more beside it: a machine's speed drifts, and other work may come and go."""
    again = _time(best, subject, repeats=5, seconds=2.0)
    if timing.p50_ms < WORTH * again.p20_ms:
        return True
    if timing.p20_ms > again.p80_ms:
        return False
    once_more = _time(network, subject, repeats=5, seconds=2.0)
    return min(timing.p50_ms, once_more.p50_ms) < WORTH * again.p50_ms


def _line(row: Row) -> str:
    """The waterfall's line: technique, ms, GiB, error, and what became of it."""
    timing, verdict = row.timing, row.verdict
    ms = f"{timing.p50_ms:9.2f} ms" if timing else f"{'-':>12}"
    gib = f"{timing.peak_gib:6.2f} GiB" if timing and timing.peak_gib is not None else f"{'-':>10}"
    error = f"error {verdict.error:.1e}" if verdict and math.isfinite(verdict.error) else " " * 13
    return f"{row.name:42} {ms} {gib}  {error}  {'kept' if row.kept else row.why}"


def _evidence(tuned: Tuned) -> dict[str, Any]:
    kept = next(r for r in reversed(tuned.rows) if r.kept and r.passes == tuned.plan.names)
    figures = kept.verdict.figures if kept.verdict else {}
    return {"gate": figures, "waterfall": [r.describe() for r in tuned.rows]}

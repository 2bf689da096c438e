"""The search for the fastest plan: candidates are timed against the original network as it is called, then gated."""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from voxtune.files import one_line
from voxtune.plan.build import PlanTarget
from voxtune.plan.compete import compete
from voxtune.plan.gate import Gate
from voxtune.plan.hazards import refuses_half, slow_half
from voxtune.plan.kernel_forms import own_convolutions
from voxtune.plan.measure import Timing, clocked, measure
from voxtune.plan.optimized import Optimized
from voxtune.plan.passes import PassStage, Precision, precision_of, select
from voxtune.plan.plan import Plan
from voxtune.plan.run import compilers, kernels_ready
from voxtune.plan.tiling import choose_tiles
from voxtune.plan.tuner import BY_CUDNN, SHARED, WORTH, Say, TuningRow, describe_row, judge
from voxtune.precision import HALF

log = logging.getLogger("voxtune")
Search = Literal["quick", "full", False]
# No further candidate is tried after this time.
QUICK_SECONDS = {"cuda": 20.0, "cpu": 15.0}
# On a CPU, a candidate and its gate take about as long as this many calls of the network, the references as this many.
CPU_CALLS, CPU_REFERENCES = 12, 12
CPU_BUDGET = 25.0
ORIGINAL = "original"
# Of the comparison of own convolutions with cuDNN. A quick search starts it only if this much time is left, for the plan too.
COMPETITION_SECONDS, LEAST_LEFT = {"quick": 4.0, "full": 30.0}, 6.0
# The row that says for which shapes another tile than the kernels' own was faster.
TILES = "tiles of own convolutions"
TIME_OVER = "not tried: the time limit was reached"

# What candidates are composed of. Own convolutions compute in half precision.
_CPU_FUSED = (*SHARED, PassStage.LAYOUT)
_FUSED = (PassStage.LAYOUT, *SHARED, PassStage.NORM, PassStage.FUSION, PassStage.AUTOTUNING)
_OWN = (PassStage.EDGES, PassStage.CONVOLUTION)
FUSED = select(*_FUSED)
_WITH_NORMS = ("own kernels", "fused norms")
_QUICK = (*_WITH_NORMS, "channels-last graph", "graph")
_QUICK_CPU = ("fused", "memory reuse", "sharing")
# Without a search, fastest first; the first one that passes the gate is used.
_UNMEASURED: dict[Precision, tuple[str, ...]] = {
    "bf16": ("own kernels", "fused norms", "fused norms, no graph"),
    "tf32": ("fused norms, no graph", "precision alone"),
}


@dataclass(frozen=True)
class Candidate:
    name: str
    plan: Plan


def candidates(precision: Precision, device: torch.device, search: Search = "quick") -> list[Candidate]:
    """Plans in this precision that are worth a try, the most promising first; without a search, those used unmeasured."""
    if device.type == "cpu":
        plans = {
            "fused": select(precision, *_CPU_FUSED, PassStage.MEMORY),
            "memory reuse": select(precision, PassStage.MEMORY),
            "sharing": select(precision, *SHARED, PassStage.MEMORY),
            "torch.compile": select(precision, PassStage.CLEANUP, PassStage.COMPILER),
        }
        names = {"quick": _QUICK_CPU, "full": tuple(plans)}.get(search or "", ())
    else:
        graph, own = PassStage.CUDA_GRAPH, _OWN if precision in HALF else ()
        compiled = select(precision, PassStage.LAYOUT, PassStage.CLEANUP, PassStage.COMPILER, PassStage.AUTOTUNING)
        plans = {
            "own kernels": select(precision, *_FUSED, *own, graph),
            "fused norms": select(precision, *_FUSED, graph),
            "fused norms, no graph": select(precision, *_FUSED),
            "channels-last graph": select(precision, *SHARED, PassStage.LAYOUT, PassStage.AUTOTUNING, graph),
            "graph": select(precision, *SHARED, PassStage.AUTOTUNING, graph),
            "precision alone": select(precision),
            "torch.compile": compiled,
            "torch.compile, graph": (*compiled, *select(graph)),
        }
        full = (*_QUICK, "torch.compile", "torch.compile, graph")
        unmeasured = _UNMEASURED.get(precision, ("own kernels",))
        names = {"quick": _QUICK, "full": full}.get(search or "", unmeasured)
    return [Candidate(name, Plan.of(*plans[name])) for name in names]


def ready_plans(precisions: Sequence[Precision]) -> list[Plan]:
    """Plans of these precisions for a GPU without a search."""
    return [c.plan for precision in precisions for c in candidates(precision, torch.device("cuda"), False)]


READY = tuple(ready_plans(("bf16", "tf32")))
# Exact, and without a search.
CPU_READY = (Plan.of(*select(*_CPU_FUSED)),)


@dataclass
class Found:
    """The fastest network that passed the gate, which may be the original, and a row for each candidate."""

    network: Optimized
    rows: list[TuningRow] = field(default_factory=list)

    @property
    def original(self) -> bool:
        return not self.network.plan.steps


def fastest(
    target: PlanTarget,
    original: Callable[..., Any],
    precisions: Sequence[Precision],
    gate: Gate,
    search: Search,
    say: Say,
) -> Found:
    """Times `original`, as the caller runs it, and the candidates; gates them from the fastest on.

    Candidates of a later precision are tried only if none of an earlier one is both faster and accepted.
    """
    device = target.device
    started = time.monotonic()
    rows = [TuningRow(ORIGINAL, (), _time(lambda: original(*target.inputs[0], **target.inputs[1]), target), kept=True)]
    say(describe_row(rows[0]))
    assert rows[0].timing is not None
    result = Found(target.original(Plan(())), rows)
    budget = _budget(rows[0].timing, device, search)
    if budget is not None:
        rows[0].why = budget
        say(f"the original network is used: {budget}")
        return result
    with compilers(device):
        gate.begin()
        for precision in precisions:
            tried: list[tuple[TuningRow, Optimized]] = []
            if search == "full":
                report = choose_tiles(target, candidates(precision, device, search)[0].plan)
                if report is not None:
                    rows.append(TuningRow(TILES, (), why=report))
                    say(describe_row(rows[-1]))
            until = started + QUICK_SECONDS[device.type] if search == "quick" else math.inf
            plans, competed = candidates(precision, device, search), False
            for candidate in plans:
                if candidate.name not in _WITH_NORMS and not competed:
                    # Before plans that seldom win: they take the time that is left.
                    competed = True
                    _leave_to_cudnn(target, plans, tried, rows, until, say)
                if time.monotonic() > until:
                    rows.append(TuningRow(candidate.name, candidate.plan.names, why=TIME_OVER))
                    continue
                row, network = _try(target, candidate, rows[0].timing, [n.plan for _, n in tried])
                rows.append(row)
                say(describe_row(row))
                if network is not None:
                    tried.append((row, network))
            if not competed:
                _leave_to_cudnn(target, plans, tried, rows, until, say)
            tried.sort(key=_ms)
            winner = _gated(target, tried, rows[0].timing, gate, say)
            if winner is not None:
                rows[0].kept = False
                return Found(winner, rows)
            tried.clear()
            gc.collect()
    say("the original network is used: no plan was both faster and accepted by the gate")
    return result


def _budget(timing: Timing, device: torch.device, search: Search) -> str | None:
    """Why a quick search on a CPU would take too long, or None."""
    if device.type != "cpu" or search != "quick":
        return None
    seconds = timing.p50_ms / 1e3 * (CPU_REFERENCES + CPU_CALLS)
    if seconds <= CPU_BUDGET:
        return None
    return (
        f'one call takes {timing.p50_ms / 1e3:.1f} s, so a search would take about {seconds:.0f} s; use search="full"'
    )


def _time(call: Callable[[], Any], target: PlanTarget) -> Timing:
    gpu = target.device.type == "cuda"
    with torch.no_grad():
        return measure(
            call, target.device, repeats=20 if gpu else 5, seconds=0.4 if gpu else 1.0, least=3 if gpu else 2
        )


def _try(
    target: PlanTarget, candidate: Candidate, best: Timing, before: Sequence[Plan], of: str = "the original"
) -> tuple[TuningRow, Optimized | None]:
    """Builds and times one candidate; `best` is the timing that it must beat, `of` names what that is."""
    row = TuningRow(candidate.name, candidate.plan.names)
    if precision_of(candidate.plan.names) in HALF:
        row.why = refuses_half(target.device) or slow_half(target.device.type) or ""
        if row.why:
            return row, None
    try:
        network = target.build(candidate.plan)
        row.passes = network.plan.names
        if network.plan in before:
            row.why = "the same passes apply as above"
            return row, None
        with kernels_ready(network, target.inputs):
            pass
        timing = _time(lambda: network(*target.inputs[0], **target.inputs[1]), target)
    except Exception as error:  # a kernel or compiler that fails costs this candidate only
        row.why = f"{type(error).__name__}: {one_line(error)}"
        log.info("%s: %s", candidate.name, row.why)
        return row, None
    if timing.peak_gib is not None:
        timing = replace(timing, peak_gib=timing.peak_gib + network.runner.graph_gib)
    row.timing, row.best = timing, best
    if timing.p50_ms >= WORTH * best.p50_ms:
        row.why = f"not faster than {of}"
        return row, None
    return row, network


def _ms(pair: tuple[TuningRow, Optimized]) -> float:
    timing = pair[0].timing
    return math.inf if timing is None else timing.p50_ms


def _leave_to_cudnn(
    target: PlanTarget,
    known: Sequence[Candidate],
    tried: list[tuple[TuningRow, Optimized]],
    rows: list[TuningRow],
    until: float,
    say: Say,
) -> None:
    """Tries one more plan, whose own convolutions that lose to cuDNN are left to it; it joins `tried` if it is the fastest.

    `tried` are the candidates that were faster than the original. Nothing is started after `until`.
    """
    row, network = max(tried, key=lambda pair: own_convolutions(pair[1]), default=(None, None))
    if row is None or network is None or not own_convolutions(network):
        return
    result = TuningRow(BY_CUDNN, network.plan.names, why=TIME_OVER)
    left = until - time.monotonic()
    if left >= LEAST_LEFT:
        # Some passes found nothing to do beside the own convolutions: they take what is left to cuDNN.
        whole = next(c.plan for c in known if c.name == row.name)
        limit = COMPETITION_SECONDS["quick" if left < math.inf else "full"]
        with clocked("own convolutions compared with cuDNN"):
            competition = compete(network, target.inputs, min(limit, left / 2))
        plan, fastest_network = competition.excepting(whole), min(tried, key=_ms)[1]
        if plan is None:
            result.why = competition.report()
        else:
            if time.monotonic() <= until:
                best = _time(lambda: fastest_network(*target.inputs[0], **target.inputs[1]), target)
                before = [n.plan for _, n in tried]
                result, network = _try(target, Candidate(BY_CUDNN, plan), best, before, "the fastest plan above")
                if network is not None:
                    tried.append((result, network))
            result.note = competition.report()
    rows.append(result)
    say(describe_row(result))


def _gated(
    target: PlanTarget, tried: list[tuple[TuningRow, Optimized]], original: Timing, gate: Gate, say: Say
) -> Optimized | None:
    """The first of these, the fastest first, that the gate accepts."""
    for row, network in tried:
        try:
            row.verdict = judge(target, network, gate)
        except Exception as error:  # an operator that fails for another input of the gate
            row.why = f"{type(error).__name__}: {one_line(error)}"
            continue
        row.kept = row.verdict.passed
        if row.kept:
            assert row.timing is not None
            say(
                f"{row.name}: {original.p50_ms / row.timing.p50_ms:.2f} x as fast as the original, error {row.verdict.error:.1e}"
            )
            return network
        row.why = f"refused: {row.verdict.reason}"
        say(f"{row.name}: {row.why}")
    return None

"""The tuner: climbs a ladder of passes, measures and gates every rung, and keeps what is faster and gives the same result.

A rung adds passes to the best plan so far. It is kept if its step is faster than that plan's, timed side by side, and the gate
accepts it. Otherwise its row states the reason, and the climb continues without it.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from voxtune.errors import InputError
from voxtune.files import one_line
from voxtune.plan.build import PlanTarget
from voxtune.plan.cache import identity
from voxtune.plan.compete import compete
from voxtune.plan.gains import GAIN_SECONDS, gains
from voxtune.plan.gate import FLOAT64_COST, STEPS, Gate, Trajectory, Verdict, trajectory_of, vary, volume_of
from voxtune.plan.hazards import refuses_half, slow_half
from voxtune.plan.kernel_forms import own_convolutions
from voxtune.plan.measure import Timing, clocked, measure
from voxtune.plan.optimized import Optimized
from voxtune.plan.passes import BY_NAME, PassStage, precision_of, select
from voxtune.plan.plan import Plan, Step
from voxtune.plan.run import compilers, kernels_ready
from voxtune.plan.tiling import TILE_SECONDS, choose_tiles
from voxtune.precision import HALF

log = logging.getLogger("voxtune")
Say = Callable[[str], None]
# A rung must win by more than the spread of the measurement.
WORTH = 0.995
# The measurement of a rung ends early if its runs take this much longer than the best plan's.
HOPELESS = 1.3
# Evaluations of a network, for the progress bar: to time it, to time a rung and the best plan beside it, and to time all gains.
TIMED, COMPARED, GAINS = 4, 8, 20
# How `measure` times a plan with `quick`.
QUICK: dict[str, Any] = {"repeats": 2, "least": 2}
BASELINE = Plan.of(*select("fp32"))
SHARED = (PassStage.CLEANUP, PassStage.SHARING)
# The rung, and the search's candidate, whose own convolutions that lose to cuDNN are left to it.
BY_CUDNN = "own kernels, the rest by cuDNN"
# The longest comparison of own convolutions with cuDNN.
COMPETITION_SECONDS = 60.0


@dataclass(frozen=True)
class TunerRung:
    """`add`: names of the passes that are added to the best plan so far, or with `apart` to an empty plan.

    `options` are those of added passes. With `competes`, the own convolutions that lose to cuDNN are left to it.
    """

    name: str
    add: tuple[str, ...]
    apart: bool = False
    options: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    competes: bool = False


GPU_LADDER = (
    TunerRung("tf32", select("tf32")),
    TunerRung("channels_last", select("fp32", PassStage.LAYOUT), apart=True),
    TunerRung("tf32 + channels_last", select("tf32", PassStage.LAYOUT), apart=True),
    TunerRung("bf16", select("bf16"), apart=True),
    TunerRung(
        "bf16 + torch.compile", select("bf16", PassStage.LAYOUT, PassStage.CLEANUP, PassStage.COMPILER), apart=True
    ),
    TunerRung("fused norms", select("bf16", PassStage.LAYOUT, *SHARED, PassStage.NORM), apart=True),
    TunerRung("cuDNN autotuning", select(PassStage.AUTOTUNING)),
    TunerRung("bias, residual, 1x1, upsampling, elementwise", select(PassStage.FUSION)),
    TunerRung("stem and head", select(PassStage.EDGES)),
    TunerRung("own convolutions", select(PassStage.CONVOLUTION)),
    TunerRung("CUDA graph", select(PassStage.CUDA_GRAPH)),
    # Passes that found nothing to do beside the own convolutions take what is left to cuDNN.
    TunerRung(BY_CUDNN, select(PassStage.FUSION), competes=True),
)
CPU_LADDER = (
    TunerRung("sharing and sdpa", select(*SHARED)),
    TunerRung("channels_last", select(PassStage.LAYOUT)),
    TunerRung("torch.compile", select(PassStage.CLEANUP, PassStage.COMPILER), apart=True),
    TunerRung("channels_last + torch.compile", select(*SHARED, PassStage.LAYOUT, PassStage.COMPILER), apart=True),
    TunerRung("bf16", select(*SHARED, "bf16", PassStage.LAYOUT), apart=True),
    TunerRung("memory reuse", select(PassStage.MEMORY)),
)
# For a minute of tuning: float32 passes that need no compiler, the most effective one first.
CPU_IN_SHORT = (
    TunerRung("memory reuse", select(PassStage.MEMORY)),
    TunerRung("sharing and sdpa", select(*SHARED)),
    TunerRung("channels_last", select(PassStage.LAYOUT)),
)


@dataclass
class TuningRow:
    """One row of the tuner's table. `timing` and `best`, the best plan so far timed again beside this rung, decide.

    `note`: how they were timed, if not in the usual way.
    """

    name: str
    passes: tuple[str, ...]
    timing: Timing | None = None
    best: Timing | None = None
    verdict: Verdict | None = None
    kept: bool = False
    why: str = ""
    note: str = ""

    def describe(self) -> dict[str, Any]:
        entry: dict[str, Any] = {"name": self.name, "passes": list(self.passes), "kept": self.kept}
        if self.timing is not None:
            entry |= {k: None if v is None else round(v, 4) for k, v in asdict(self.timing).items()}
        if self.best is not None:
            entry["best_p50_ms"] = round(self.best.p50_ms, 4)
        if self.verdict is not None:
            entry |= {"error": self.verdict.error, "passed": self.verdict.passed}
        return entry | {name: text for name, text in (("why", self.why), ("note", self.note)) if text}


@dataclass
class Tuned:
    """The best plan with its evidence, and a row for every rung."""

    plan: Plan
    network: Optimized
    rows: list[TuningRow] = field(default_factory=list)


class _Work:
    """Reports progress as evaluations of a network, of the number expected."""

    def __init__(self, report: Callable[[int, int], None], total: int):
        self.report, self.total = report, total
        self.done = self.reserved = 0

    @contextmanager
    def job(self, expected: int) -> Iterator[None]:
        """Evaluations inside the block count up to `expected`, which is reached at its end."""
        self.reserved += expected
        yield
        self.done = self.reserved
        self.report(self.done, self.total)

    def tick(self) -> None:
        if self.done < self.reserved:
            self.done += 1
            self.report(self.done, self.total)


def gate_for(
    target: PlanTarget,
    trajectory: Trajectory | None = None,
    checks: int = 3,
    on_call: Callable[[], None] = lambda: None,
    *,
    same: bool = False,
) -> Gate:
    model, inputs = target.model, target.inputs
    if trajectory is None:
        with torch.no_grad():
            output = volume_of(model(*inputs[0], **inputs[1]))
        trajectory = trajectory_of(inputs, output)
    return Gate(model, vary(inputs, checks), trajectory, same=same, on_call=on_call)


def judge(target: PlanTarget, network: Optimized, gate: Gate) -> Verdict:
    """The gate's verdict on a network, and on its float32 twin if the plan has structural passes."""
    plan = network.plan
    twin = Plan(tuple(s for s in plan.steps if BY_NAME[s.name].structural))
    precision = precision_of(plan.names)
    # Kernels compile on the CPU while the GPU computes the gate's references.
    with clocked("kernels and references ready"), kernels_ready(network, target.inputs):
        gate.prepare(precision)
        structure = _by_references(target.build(twin, twin=True)) if twin.steps else None
    with clocked("judged"):
        return gate.judge(network, precision, structure)


def _by_references(twin: Optimized) -> Callable[..., Any]:
    """The twin with its operators' references: it checks the graph. The kernels are checked when the plan itself runs."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if importlib.util.find_spec("triton") is None:
            return twin(*args, **kwargs)
        from voxtune.kernels.ops import plain_operators

        with plain_operators():
            return twin(*args, **kwargs)

    return call


def first_admitted(target: PlanTarget, plans: Sequence[Plan], gate: Gate) -> tuple[Optimized, Verdict] | None:
    """The first plan that can be built on this device and passes the gate; the reasons against the others are logged."""
    with compilers(target.device):
        gate.begin()
        return _first_admitted(target, plans, gate)


def _first_admitted(target: PlanTarget, plans: Sequence[Plan], gate: Gate) -> tuple[Optimized, Verdict] | None:
    no_half = refuses_half(target.device)
    for plan in plans:
        names = "+".join(plan.names)
        if no_half is not None and precision_of(plan.names) in HALF:
            log.warning("plan %s refused: %s", names, no_half)
            continue
        try:
            network = target.build(plan)
            verdict = judge(target, network, gate)
        except Exception as error:  # a kernel that fails costs this plan only; the next one uses fewer kernels
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
    ladder: Sequence[TunerRung] | None = None,
    trajectory: Trajectory | None = None,
    checks: int = 3,
    seconds: float = math.inf,
    gate_last: bool = False,
    quick: bool = False,
    say: Say = lambda _line: None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Tuned:
    """Climbs `ladder`; starts no rung after `seconds`. The gate checks `checks` inputs, and samples along `trajectory`.

    With `quick` every plan is timed by two runs and compared once, for networks whose steps take seconds.

    In the end the best plan is timed without each of its passes (not with `quick`).

    With `gate_last` rungs are kept for their speed, and only the fastest plan is gated in the end; if it is refused, the next
    fastest, down to the baseline. `progress` receives (done, total) evaluations of the network.
    """
    started = time.monotonic()
    target = PlanTarget(model, (tuple(args), kwargs or {}))
    ladder = ladder or (GPU_LADDER if target.device.type == "cuda" else CPU_LADDER)
    references, verdict = (FLOAT64_COST + 1) * checks, 2 * checks + STEPS
    judged = verdict if gate_last else verdict * len(ladder)
    work = _Work(progress, TIMED + references + COMPARED * len(ladder) + judged + (0 if quick else GAINS))
    gate = gate_for(target, trajectory, checks, work.tick)
    with work.job(TIMED + references):
        best = _baseline(target, gate, work.tick, quick)
    say(describe_row(best.rows[0]))
    kept = [(best.rows[0], best.network)]
    for rung in ladder:
        with work.job(COMPARED if gate_last else COMPARED + verdict):
            if time.monotonic() - started > seconds:
                best.rows.append(TuningRow(rung.name, rung.add, why="not tried: the time limit was reached"))
                say(describe_row(best.rows[-1]))
                continue
            plan, note = _extended(best.plan, rung), ""
            if rung.competes:
                left = seconds - (time.monotonic() - started)
                excepting, note = _left_to_cudnn(plan, best.network, target, left)
                if excepting is None:
                    best.rows.append(TuningRow(rung.name, best.plan.names, why=note))
                    say(describe_row(best.rows[-1]))
                    continue
                plan = excepting
            elif not rung.apart and set(plan.names) <= set(best.plan.names):
                continue
            if set(select(PassStage.CONVOLUTION)) & set(rung.add):
                note = choose_tiles(target, plan, min(TILE_SECONDS, seconds - (time.monotonic() - started))) or ""
            row, network = _try(target, rung, plan, None if gate_last else gate, kept[-1], work.tick, quick)
            row.note = "; ".join(filter(None, (note, row.note)))
            best.rows.append(row)
            say(describe_row(row))
            if network is not None:
                best.plan, best.network = network.plan, network
                kept = [*(kept if gate_last else []), (row, network)]
            del network
            gc.collect()
    if gate_last:
        with work.job(verdict):
            _gate_fastest(target, best, kept, gate, say)
    evidence = _evidence(best)
    if not quick:
        left = seconds - (time.monotonic() - started)
        with work.job(GAINS):
            evidence["gains"] = gains(target, best.network, min(GAIN_SECONDS, left), say)
    best.plan = Plan(best.plan.steps, identity(model, target.inputs), evidence)
    return best


def _gate_fastest(
    target: PlanTarget, best: Tuned, kept: list[tuple[TuningRow, Optimized]], gate: Gate, say: Say
) -> None:
    """Gates the plans from the fastest to the slowest and makes the first that passes the best one."""
    for row, network in reversed(kept):
        if row.verdict is None:
            row.verdict = judge(target, network, gate)
            row.kept = row.verdict.passed
            row.why = "" if row.kept else f"refused: {row.verdict.reason}"
            ms = "" if row.timing is None else f"{format_ms(row.timing.p50_ms)} ms, "
            say(f"gate: {row.name}: {ms}error {row.verdict.error:.1e}, {'passed' if row.kept else row.why}")
        if row.kept:
            best.plan, best.network = network.plan, network
            return


def _extended(plan: Plan, rung: TunerRung) -> Plan:
    """The plan with the rung's passes, without those that they exclude."""
    excluded = {name for added in rung.add for name in BY_NAME[added].excludes}
    excluded |= {name for name in plan.names if set(BY_NAME[name].excludes) & set(rung.add)}
    steps = () if rung.apart else tuple(s for s in plan.steps if s.name not in excluded)
    names = [s.name for s in steps]
    return Plan((*steps, *(Step(n, rung.options.get(n, {})) for n in rung.add if n not in names)))


def _left_to_cudnn(plan: Plan, network: Optimized, target: PlanTarget, left: float) -> tuple[Plan | None, str]:
    """The plan that leaves own convolutions that lose to cuDNN, or None; and which of the network's lose, or why none does."""
    if not own_convolutions(network):
        return None, "the best plan has no own convolution"
    competition = compete(network, target.inputs, min(COMPETITION_SECONDS, left))
    return competition.excepting(plan), competition.report()


def _baseline(target: PlanTarget, gate: Gate, on_call: Callable[[], None], quick: bool) -> Tuned:
    """Float32, nothing rewritten. The gate knows its error already."""
    network = target.build(BASELINE)
    timing = _time(network, target, on_call, **(QUICK if quick else {}))
    error = gate.yardstick("fp32")[0]
    verdict = Verdict(math.isfinite(error), None, {"precision": "fp32", "relative": error})
    if not verdict.passed:
        raise InputError("the network's float32 output is not finite; use other inputs or other weights")
    return Tuned(BASELINE, network, [TuningRow("baseline", BASELINE.names, timing, None, verdict, kept=True)])


def _try(
    target: PlanTarget,
    rung: TunerRung,
    plan: Plan,
    gate: Gate | None,
    best: tuple[TuningRow, Optimized],
    on_call: Callable[[], None],
    quick: bool,
) -> tuple[TuningRow, Optimized | None]:
    """Builds, times and gates a rung; without a `gate` it is kept if it is faster."""
    row = TuningRow(rung.name, plan.names)
    device = target.device
    no_half = (refuses_half(device) or slow_half(device.type)) if precision_of(plan.names) in HALF else None
    if no_half is not None:
        row.why = no_half
        return row, None
    try:
        network = target.build(plan)
        row.passes = network.plan.names
        missing = [
            f"{n}: {network.notes[n]}" for n in rung.add if network.notes.get(n, "").startswith("does not apply")
        ]
        if missing:
            row.why = "; ".join(missing)
            return row, None
        _time_both(row, network, best, target, on_call, quick)
        assert row.timing is not None and row.best is not None
        if not _faster(row.timing, row.best):
            row.why = f"not faster than the best so far by {1 - WORTH:.1%}"
            return row, None
        row.verdict = None if gate is None else judge(target, network, gate)
    except Exception as error:  # a compiler or kernel that fails costs its own rung only
        row.why = f"{type(error).__name__}: {one_line(error)}"
        return row, None
    row.kept = row.verdict is None or row.verdict.passed
    row.why = "" if row.verdict is None or row.kept else f"refused: {row.verdict.reason}"
    return row, network if row.kept else None


def _time(network: Optimized, target: PlanTarget, on_call: Callable[[], None], **options: Any) -> Timing:
    args, kwargs = target.inputs

    def call() -> None:
        network(*args, **kwargs)
        on_call()

    timing = measure(call, target.device, **options)
    return timing if timing.peak_gib is None else replace(timing, peak_gib=timing.peak_gib + network.runner.graph_gib)


def _time_both(
    row: TuningRow,
    network: Optimized,
    best: tuple[TuningRow, Optimized],
    target: PlanTarget,
    on_call: Callable[[], None],
    quick: bool,
) -> None:
    """Times a network and then the best one again: a machine's speed drifts, and other work comes and goes.

    The timing of a network that cannot win ends early. Where the two are close, the network is timed a second time and the
    better result counts.
    """
    best_row, best_network = best
    assert best_row.timing is not None, "only a plan that was timed is the best"
    limit = HOPELESS * best_row.timing.p80_ms
    timing = _time(network, target, on_call, **(QUICK if quick else {}), give_up_ms=limit)
    best_timing = _time(best_network, target, on_call, **(QUICK if quick else {"repeats": 5, "seconds": 2.0}))
    close = WORTH * best_timing.p20_ms <= timing.p50_ms and timing.p20_ms <= best_timing.p80_ms
    if close and not quick:
        again = _time(network, target, on_call, repeats=5, seconds=2.0)
        better, other = (again, timing) if again.p50_ms < timing.p50_ms else (timing, again)
        row.note = f"timed twice, the other time {format_ms(other.p50_ms)} ms"
        timing = replace(better, first_s=timing.first_s)
    elif timing.gave_up:
        row.note = f"two runs, both longer than {format_ms(limit)} ms"
    row.timing, row.best = timing, best_timing


def _faster(timing: Timing, best: Timing) -> bool:
    return timing.p50_ms < WORTH * best.p50_ms


def describe_row(row: TuningRow) -> str:
    """The row as text: name, step time, step time of the best so far beside it, memory, error, verdict."""
    return describe_entry(row.describe())


def describe_entry(entry: dict[str, Any]) -> str:
    """`describe_row` for a row that is stored in a plan."""
    ms, gib, best, error = (entry.get(name) for name in ("p50_ms", "peak_gib", "best_p50_ms", "error"))
    parts = (
        f"{entry['name']:32}",
        f"{'-':>12}" if ms is None else f"{format_ms(ms):>9} ms",
        " " * 23 if best is None else f"(best so far {format_ms(best):>9})",
        f"{'-':>10}" if gib is None else f"{gib:6.2f} GiB",
        " " * 14 if error is None or not math.isfinite(error) else f" error {error:.1e}",
    )
    note = f"{entry['note']}; " if "note" in entry else ""
    return f"{' '.join(parts)}  {note}{'kept' if entry['kept'] else entry.get('why', '')}"


def format_ms(ms: float) -> str:
    """Milliseconds with four digits or more, and at least two decimals: the verdicts are about parts of a percent."""
    decimals = 3 - math.floor(math.log10(ms)) if ms > 0 else 2
    return f"{ms:.{min(max(2, decimals), 6)}f}"


def _evidence(tuned: Tuned) -> dict[str, Any]:
    kept = next(r for r in reversed(tuned.rows) if r.kept and r.passes == tuned.plan.names)
    figures = kept.verdict.figures if kept.verdict else {}
    return {"gate": figures, "waterfall": [r.describe() for r in tuned.rows]}

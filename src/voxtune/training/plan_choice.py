"""The choice of a run's plan: candidates are timed as whole training steps, and their gradients are gated, from the fastest on.

On a CPU nothing is measured: plain PyTorch in float32 is the default there. A resumed run uses the plan of its checkpoint.
"""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from voxtune.data.subjects import Source
from voxtune.diffusion import add_noise
from voxtune.errors import InputError
from voxtune.files import one_line
from voxtune.runtime.model import Model
from voxtune.training.checkpoint import Checkpoint
from voxtune.training.config import TrainConfig
from voxtune.training.data import Batch, Loader
from voxtune.training.plan import (
    HALF,
    MeasuredPlan,
    RewrittenForward,
    TrainingPlan,
    TrainingPrecision,
    budget_of,
    made_for,
    resolved_precision,
    rewriting_plan,
    unmeasured_plan,
    zeros,
)
from voxtune.training.plan_step import StepInputs, step_inputs
from voxtune.training.step import Trainer

if TYPE_CHECKING:
    from voxtune.plan.gate import Verdict
    from voxtune.plan.measure import Timing
    from voxtune.plan.training_gate import GateBatch, GradientGate
    from voxtune.plan.tuner import TuningRow

log = logging.getLogger("voxtune")
Say = Callable[[str], None]
# Voxels of a batch whose gradients in float64 take seconds; of larger ones a part is gated.
LARGEST_GATED = {"cuda": 64**3, "cpu": 16**3}
# The gradient of a small layer has few independent errors: those of several batches even out.
GATED_BATCHES = 4
# A plan that these refuse is judged once more, on this many: the error of a layer whose gradient nearly cancels varies by chance.
JUDGED_AGAIN = 16
# Steps before the timed ones: kernels compile, and the step is recorded.
WARM_STEPS = 4
TIMED_STEPS, TIMED_SECONDS = 20, 3.0
# A run that plain PyTorch completes within this time is not worth a search.
SHORT_RUN_SECONDS = 60.0


def choose_plan(
    config: TrainConfig,
    model: Model,
    source: Source,
    device: torch.device,
    say: Say,
    checkpoint: Checkpoint | None = None,
) -> TrainingPlan:
    """The plan of a run; `say` receives what is measured and decided. `model` keeps its weights."""
    model.network.to(device)
    choice = _Choice(config, model, source, device, say)
    if checkpoint is not None and checkpoint.config.requested_plan == config.requested_plan:
        stored = checkpoint.plan
        if stored is not None and stored.name == "voxtune":
            stored = replace(stored, memory_budget=budget_of(config))
        return choice.resumed(stored)
    plan = unmeasured_plan(config, device)
    if plan.name == "voxtune":
        return choice.gated(plan)
    if config.requested_plan != "auto" or device.type == "cpu":
        return replace(plan, made_for=made_for(device))
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        say(
            "the plan is plain PyTorch: plans are not measured in several processes; pass --plan compile for torch.compile"
        )
        return replace(plan, made_for=made_for(device))
    return choice.fastest(plan.precision)


class _Choice:
    def __init__(self, config: TrainConfig, model: Model, source: Source, device: torch.device, say: Say):
        self.config, self.model, self.source, self.device = config, model, source, device
        self._say = say
        self._batches: list[Batch] = []
        self._gates: dict[int, GradientGate] = {}

    def say(self, line: str) -> None:
        self._say(line)
        log.info("%s", line)

    def batches(self, count: int) -> list[Batch]:
        """The first batches of the run."""
        if len(self._batches) < count:
            config = self.config
            loader = Loader(self.source, seed=config.seed, batch=config.batch, start=0, workers=0, pin=self._gpu)
            batches = iter(loader)
            self._batches = [next(batches) for _ in range(count)]
            loader.close()
        return self._batches[:count]

    @property
    def _gpu(self) -> bool:
        return self.device.type == "cuda"

    # A resumed run, and a plan that was requested by name.

    def resumed(self, stored: TrainingPlan | None) -> TrainingPlan:
        """The plan of a checkpoint, or plain PyTorch if it is not possible here."""
        from voxtune.plan.tuner import TuningRow

        if stored is None:  # of a run before there were plans
            autocast = self.config.autocast
            before: TrainingPrecision = "default" if autocast is None or autocast == "none" else autocast
            return replace(unmeasured_plan(self.config, self.device), name=self._old_name(), precision=before)
        here = made_for(self.device)
        reason = self._why_not(stored)
        if reason is None and (stored.name != "voxtune" or stored.made_for == here):
            return stored
        if reason is None:  # evidence is valid only for what it was measured on
            row = TuningRow(stored.label, stored.passes)
            row.verdict = self._judged(stored, row)
            if row.verdict is not None and row.verdict.passed:
                return replace(stored, made_for=here, candidates=())
            reason = row.why or f"refused by the gate: {row.verdict.reason if row.verdict else ''}"
        possible = reason != self._no_precision(stored.precision)
        precision = stored.precision if possible else resolved_precision(self.config, self.device)
        if stored.precision in HALF and not possible and self.config.requested_precision != "auto":
            precision = "fp32"
        plan = TrainingPlan(
            name="baseline", precision=precision, channels_last=self.config.channels_last, made_for=here
        )
        self.say(
            f"the plan of the checkpoint, {stored.describe()}, is not used: {reason}; training by {plan.describe()}"
        )
        return plan

    def _old_name(self) -> Any:
        return "compile" if self.config.compile else "baseline"

    def _why_not(self, plan: TrainingPlan) -> str | None:
        """Why the plan of a checkpoint is not possible on this device, or None."""
        reason = self._no_precision(plan.precision)
        if reason is None and plan.name == "voxtune":
            try:
                RewrittenForward(plan, self.model.network).rewrite(self._zeros())
            except Exception as error:  # what is missing here: a kernel's compiler, an operator, memory
                reason = f"{type(error).__name__}: {one_line(error)}"
        if reason is None and plan.name == "compile":
            from voxtune.plan.hazards import why_no_compiler

            reason = why_no_compiler(self.device)
        return reason

    def _no_precision(self, precision: TrainingPrecision) -> str | None:
        if precision != "bf16":
            return None
        from voxtune.plan.hazards import refuses_half, slow_half

        if not self._gpu:
            return None if self.config.requested_precision == "bf16" else slow_half("cpu")
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            return f"{torch.cuda.get_device_name(self.device)} has no BF16"
        return refuses_half(self.device)

    def _zeros(self) -> tuple[Tensor, ...]:
        return zeros(self.model, self.config.batch)

    def gated(self, plan: TrainingPlan) -> TrainingPlan:
        """The requested plan; InputError if it does not fit, the network cannot be rewritten, or the gate refuses it."""
        within = None if plan.memory_budget is None else self._within_budget(plan)
        try:
            verdict = self._verdict(plan)
        except (ImportError, torch.OutOfMemoryError) as error:
            raise InputError(f"plan voxtune: {one_line(error)}; pass --plan auto or --plan baseline") from error
        if not verdict.passed:
            raise InputError(
                f"plan voxtune: refused by the gate: {verdict.reason}; pass --plan auto or --plan baseline"
            )
        self.say(f"{plan.describe()}: gradient error {verdict.error:.1e} (at most {verdict.figures['limit']:.1e})")
        if within is not None:
            self.say(within)
        row = MeasuredPlan(name=plan.label, kept=True, error=verdict.error)
        return replace(plan, made_for=made_for(self.device), candidates=(row,))

    def _within_budget(self, plan: TrainingPlan) -> str:
        """What the budget costs; InputError if no step fits into it."""
        from voxtune.plan.training_memory import TrainingMemory

        args = self._zeros()
        accumulated = self.config.accumulation > 1
        rewritten = RewrittenForward(plan, self.model.network, accumulated=accumulated).rewrite(args)
        memory, groups = TrainingMemory(rewritten, args, accumulated=accumulated), rewritten.groups
        step, all_kept = memory.step(groups), memory.step()
        line = f"memory budget: a step is estimated to need {step.total / 2**30:.2f} GiB"
        if not groups:
            return f"{line}; nothing is computed twice"
        share = memory.computed_twice(groups)
        return f"{line} instead of {all_kept.total / 2**30:.2f}; {share:.0%} of the forward pass's products are computed twice"

    # The fastest plan.

    def fastest(self, precision: TrainingPrecision) -> TrainingPlan:
        """Times whole steps of every candidate and gates them from the fastest to plain PyTorch, which needs no gate."""
        from voxtune.plan.tuner import TuningRow, describe_row

        rows: list[TuningRow] = []
        timed: list[tuple[float, TuningRow, TrainingPlan]] = []
        exceeded: torch.OutOfMemoryError | None = None
        plans = self._candidates(precision)
        for plan in plans:
            row = TuningRow(plan.label, plan.passes)
            try:
                row.timing = self._timed(plan)
                timed.append((row.timing.p50_ms, row, plan))
            except Exception as error:  # a kernel or compiler that fails costs this candidate only
                row.why = f"{type(error).__name__}: {one_line(error)}"
                # Without its frames, which hold the step's memory.
                exceeded = error.with_traceback(None) if isinstance(error, torch.OutOfMemoryError) else exceeded
                log.info("%s: %s", plan.label, row.why)
            self._release()
            rows.append(row)
            self.say(describe_row(row))
            if plan is plans[0] and row.timing is not None and self._short(row.timing):
                return self._baseline(plan, rows, "the run is too short for a search")
        if not timed:
            raise InputError(f"no plan can train this network here: {rows[0].why}") from exceeded
        reference = next((ms for ms, _, plan in timed if plan.name == "baseline"), math.inf)
        for ms, row, plan in sorted(timed, key=lambda entry: entry[0]):
            if plan.name == "baseline":
                return self._baseline(plan, rows, "no plan was both faster and accepted by the gate")
            row.verdict = self._judged(plan, row)
            if row.verdict is not None and row.verdict.passed:
                row.kept = True
                gain = "" if math.isinf(reference) else f" {reference / ms:.2f} x as fast as plain PyTorch,"
                self.say(f"{row.name}:{gain} gradient error {row.verdict.error:.1e}")
                return self._with_evidence(plan, rows)
            row.why = row.why or f"refused: {row.verdict.reason if row.verdict else ''}"
            self.say(f"{row.name}: {row.why}")
        raise InputError(
            "no plan fits into the memory and is accepted by the gate; use a smaller batch or --plan baseline"
        )

    def _candidates(self, precision: TrainingPrecision) -> list[TrainingPlan]:
        """Plain PyTorch first, as what the others are compared with."""
        last = TrainingPlan(name="baseline", precision=precision, channels_last=True)
        plans = [last] if self.config.channels_last else [replace(last, channels_last=False), last]
        return [*plans, rewriting_plan(precision), replace(last, name="compile")]

    def _short(self, timing: Timing) -> bool:
        seconds = self.config.steps * timing.p50_ms / 1e3
        return min(seconds, 60 * (self.config.minutes or math.inf)) < SHORT_RUN_SECONDS

    def _baseline(self, plan: TrainingPlan, rows: list[TuningRow], why: str) -> TrainingPlan:
        row = next(r for r in rows if r.name == plan.label)
        row.kept = True
        self.say(f"{row.name} is used: {why}")
        return self._with_evidence(plan, rows)

    def _with_evidence(self, plan: TrainingPlan, rows: Sequence[TuningRow]) -> TrainingPlan:
        return replace(plan, made_for=made_for(self.device), candidates=tuple(map(_measured, rows)))

    def _judged(self, plan: TrainingPlan, row: TuningRow) -> Verdict | None:
        try:
            return self._verdict(plan)
        except Exception as error:  # an operator that fails at the gate's size
            row.why = f"{type(error).__name__}: {one_line(error)}"
            return None
        finally:
            self._release()

    def _timed(self, plan: TrainingPlan) -> Timing:
        """Whole steps of a copy of the network, with all that a run does between them; memory is that of the process."""
        from voxtune.plan.measure import Timing, quantiles

        self._release()
        if self._gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        started = time.perf_counter()
        copied = Model(self.model.config, copy.deepcopy(self.model.network))
        trainer = Trainer(self.config, copied, len(self.source), self.device, plan)
        batches = self.batches(self.config.accumulation)
        for _ in range(WARM_STEPS if self._gpu else 1):
            trainer.train_step(batches)
        trainer.settle()
        first, until, times = time.perf_counter() - started, time.perf_counter() + TIMED_SECONDS, list[float]()
        while len(times) < 3 or (len(times) < TIMED_STEPS and time.perf_counter() < until):
            times += self._step_times(trainer, batches)
        if trainer.failure is not None:
            raise trainer.failure
        peak = torch.cuda.max_memory_reserved(self.device) / 2**30 if self._gpu else None
        return Timing(*quantiles(times), first, peak)

    def _step_times(self, trainer: Trainer, batches: list[Batch], count: int = 3) -> list[float]:
        """Milliseconds from the end of one step to the end of the next, while the host runs ahead."""
        if not self._gpu:
            started = time.perf_counter()
            trainer.train_step(batches)
            return [(time.perf_counter() - started) * 1e3]
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        ends[0].record()
        for end in ends[1:]:
            trainer.train_step(batches)
            end.record()
        torch.cuda.synchronize(self.device)
        return [a.elapsed_time(b) for a, b in itertools.pairwise(ends)]

    def _release(self) -> None:
        gc.collect()
        if self._gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    # The gate.

    def _verdict(self, plan: TrainingPlan) -> Verdict:
        from voxtune.plan.training_gate import describe_layers

        verdict = self.gate(plan.precision).judge(_maker(plan))
        if not verdict.passed and "worst" in verdict.figures:
            self.say(f"gate: {plan.label}: {verdict.reason} on {GATED_BATCHES} batches; judging on {JUDGED_AGAIN}")
            verdict = self.gate(plan.precision, JUDGED_AGAIN).judge(_maker(plan))
        if "worst" in verdict.figures:
            self.say(f"gate: {plan.label}: {describe_layers(verdict.figures)}")
        return verdict

    def gate(self, precision: TrainingPrecision, count: int = GATED_BATCHES) -> GradientGate:
        """On the first `count` batches of the run, at the largest size that float64 allows."""
        if count not in self._gates:
            inputs = [
                step_inputs(b, self.config, len(self.model.schedule), self.device, channels_last=False)
                for b in self.batches(count)
            ]
            self._gates[count] = self._fitting_gate(precision, inputs)
        return self._gates[count]

    def _fitting_gate(self, precision: TrainingPrecision, inputs: list[StepInputs]) -> GradientGate:
        from voxtune.plan.training_gate import GradientGate

        reason = ""
        for subjects, size in self._gate_sizes(inputs[0]):
            batches = [self._gate_batch(x, subjects, size) for x in inputs]
            gate = GradientGate(self.model.network, batches, precision)
            try:
                gate.prepare()
            except torch.OutOfMemoryError as error:
                reason = one_line(error)
                del gate
                self._release()
                continue
            whole = (subjects, size) == (self.config.batch, tuple(self.model.config.size))
            by = " x ".join(map(str, size))
            self.say(
                f"gate: gradients of {len(inputs)} batches of {subjects} at {by}{'' if whole else ', parts of the run'}"
            )
            return gate
        raise InputError(f"the gate's references do not fit into the memory ({reason}); pass --plan baseline")

    def _gate_sizes(self, inputs: StepInputs) -> list[tuple[int, tuple[int, ...]]]:
        """(subjects, size of the image), the largest first, down to the smallest that the network accepts."""
        divisor = self.model.config.network.divisor
        count, size = len(inputs.images), tuple(inputs.images.shape[2:])
        sizes = [(count, size)]
        while count > 1 and count * math.prod(size) > LARGEST_GATED[self.device.type]:
            count = 1
            sizes = [(count, size)]
        while all(side % (2 * divisor) == 0 and side >= 4 * divisor for side in size):
            size = tuple(side // 2 for side in size)
            sizes.append((count, size))
        fitting = [s for s in sizes if s[0] * math.prod(s[1]) <= LARGEST_GATED[self.device.type]]
        return fitting or sizes[-1:]

    def _gate_batch(self, inputs: StepInputs, count: int, size: tuple[int, ...]) -> GateBatch:
        """The middle of the first `count` subjects of a batch."""
        from voxtune.plan.training_gate import GateBatch

        starts = [(side - part) // 2 for side, part in zip(inputs.images.shape[2:], size, strict=True)]
        place = (slice(count), slice(None), *(slice(a, a + part) for a, part in zip(starts, size, strict=True)))
        cut = lambda x: x[place].contiguous()  # noqa: E731
        noise, t_N = cut(inputs.noise), inputs.t_N[:count]
        x = add_noise(self.model.schedule, cut(inputs.images), t_N, noise)
        args = (x, t_N) if inputs.conds is None else (x, t_N, cut(inputs.conds))

        def loss(results: list[Tensor]) -> Tensor:
            predicted = results[0]
            wide = torch.promote_types(predicted.dtype, torch.float32)
            error = predicted.to(wide) - noise.to(wide)
            return error.abs().mean() if self.config.loss == "l1" else error.square().mean()

        return GateBatch(args, loss)


def _maker(plan: TrainingPlan) -> Callable[[nn.Module], Callable[..., Any]]:
    """Computes another network by the plan, as the gate requires."""

    def make(network: nn.Module) -> Callable[..., Any]:
        device = next(network.parameters()).device
        forward = plan.forward(network)

        def call(x: Tensor, t_N: Tensor, cond: Tensor | None = None) -> Any:
            with plan.flags(device):
                return forward(x, t_N, cond)

        return call

    return make


def _measured(row: TuningRow) -> MeasuredPlan:
    entry = row.describe()
    figures: dict[str, Any] = {name: entry.get(name) for name in ("p50_ms", "peak_gib", "error")}
    if figures["error"] is not None and not math.isfinite(figures["error"]):
        figures["error"] = None
    return MeasuredPlan(name=row.name, kept=row.kept, why=row.why, **figures)

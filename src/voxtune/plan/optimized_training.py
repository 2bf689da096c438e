"""`optimize(network, inputs, train=True)`: the same parameters, trained by a rewritten network that passed a gate."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from voxtune.errors import InputError
from voxtune.files import one_line
from voxtune.plan.api import to_stderr
from voxtune.plan.build import PlanTarget
from voxtune.plan.gate import Verdict, volumes_of
from voxtune.plan.hazards import refuses_half
from voxtune.plan.measure import Timing, measure
from voxtune.plan.optimized import MAX_VARIANTS, SharesOriginal, precision_in_force, weights_type
from voxtune.plan.passes import Precision
from voxtune.plan.plan import Plan
from voxtune.plan.run import Inputs, Signature
from voxtune.plan.training import TrainingNetwork, training_network, training_passes
from voxtune.plan.training_gate import GateBatch, GradientGate, results_of
from voxtune.plan.tuner import TuningRow, describe_row
from voxtune.plan.weight_gradients import measure_weight_gradients
from voxtune.precision import HALF

log = logging.getLogger("voxtune")
# A plan must be faster than the original by more than the noise of a measurement.
FASTER = 0.98
# Of measuring each call, in so many parts.
SECONDS, ROUNDS = 4.0, 2
# Voxels or pixels of a batch that the gate judges, where the network accepts parts: float64 gradients of larger ones do not fit,
# or take minutes.
LARGEST_GATED = {"cuda": 64**3, "cpu": 16**3}
OWN = "own kernels"


class OptimizedTraining(SharesOriginal):
    """A network whose training steps run by a plan; its parameters, buffers and submodules are the original's.

    The weights are read in every call. Inputs of other sizes are rewritten at their first call. Where a plan does not apply, such
    as under another precision of autocast, the original runs, with one warning.
    """

    def __init__(self, original: nn.Module, plan: Plan, precision: Precision | None, rows: Sequence[TuningRow] = ()):
        """`precision` None: that of the caller, who chose the plan."""
        super().__init__(original)
        self.plan, self.precision, self.rows = plan, precision, list(rows)
        self._networks: OrderedDict[Signature, TrainingNetwork] = OrderedDict()
        self._warned: set[str] = set()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        signature = Signature.of(args, kwargs)
        reason = self._why_original(signature.device)
        if reason is None:
            try:
                network = self._networks.get(signature) or self._new(signature, args, kwargs)
            except InputError as error:
                reason = one_line(error)
            else:
                # The plan's own types are those of its operators.
                with torch.autocast(signature.device.type, enabled=False):
                    return network(*args, **kwargs)
        if reason and reason not in self._warned:
            self._warned.add(reason)
            log.warning("the plan is not used: %s; running the original network", reason)
        return self.original(*args, **kwargs)

    def _why_original(self, device: torch.device) -> str | None:
        """None if the plan runs; an empty reason if the original was the fastest."""
        if not self.plan.steps:
            return ""
        if self.precision is not None:
            current = precision_in_force(weights_type(self.original), device)
            if current != self.precision:
                return f"it was made for {self.precision} and is called in {current}"
        return None

    def _new(self, signature: Signature, args: Sequence[Any], kwargs: dict[str, Any]) -> TrainingNetwork:
        with torch.autocast(signature.device.type, enabled=False):
            network = training_network(self.original, args, kwargs, self.plan)
        return self.add(signature, network)

    def add(self, signature: Signature, network: TrainingNetwork) -> TrainingNetwork:
        while len(self._networks) >= MAX_VARIANTS:
            self._networks.popitem(last=False)
        self._networks[signature] = network
        return network

    @property
    def notes(self) -> dict[str, str]:
        """What each pass did."""
        return next((network.notes for network in self._networks.values()), {})

    def report(self) -> str:
        """What was tried, how long a step took, and what each pass did."""
        title = f"plan: {' + '.join(self.plan.names) or 'the original network'}"
        return "\n".join(
            [*map(describe_row, self.rows), title, *(f"  {name}: {note}" for name, note in self.notes.items())]
        )

    # Copies hold the original and the plan; they are rewritten at their first call.

    def __reduce__(self) -> Any:
        return OptimizedTraining, (self.original, self.plan, self.precision, self.rows)


@dataclass(frozen=True)
class _Step:
    """Forward and backward pass of a call, with a loss that gives every result a gradient."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    weights: list[Tensor]

    def loss(self, results: list[Tensor]) -> Tensor:
        parts = [
            (y * (w.double() if y.dtype == torch.float64 else w).to(y.device)).sum()
            for y, w in zip(results, self.weights, strict=True)
        ]
        return torch.stack(parts).sum()

    def gradients(self, call: Callable[..., Any], parameters: Sequence[Tensor]) -> Callable[[], None]:
        def step() -> None:
            # Not into `.grad`, which belongs to the caller.
            loss = self.loss(results_of(call(*self.args, **self.kwargs)))
            torch.autograd.grad(loss, parameters, allow_unused=True)

        return step


def _step(call: Callable[..., Any], inputs: Inputs) -> _Step:
    args, kwargs = inputs
    output = results_of(call(*args, **kwargs))
    if not output:
        raise InputError("no result of the network requires a gradient: its parameters are frozen")
    random = torch.Generator().manual_seed(0)
    weights = [torch.randn(y.shape, generator=random).to(y.device) / y.shape[1:].numel() ** 0.5 for y in output]
    return _Step(tuple(args), dict(kwargs), weights)


def optimize_training(
    model: nn.Module,
    example_inputs: Sequence[Any] | Tensor,
    plan: str | Path | Plan = "auto",
    *,
    precision: str = "same",
    example_kwargs: dict[str, Any] | None = None,
    say: Callable[[str], None] | None = None,
) -> OptimizedTraining:
    """The faster of the original and of its rewritten form, which must pass the gate; a given `plan` must pass, and is used."""
    args = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
    inputs: Inputs = (args, example_kwargs or {})
    device = PlanTarget(model, inputs).device
    given = {"auto": None, "baseline": Plan(())}.get(str(plan), plan) if not isinstance(plan, Plan) else plan
    chosen = Plan.load(Path(given)) if isinstance(given, str | Path) else given
    return _chosen(model, inputs, chosen, precision, device, say or (to_stderr if device.type == "cpu" else log.info))


def _chosen(
    model: nn.Module,
    inputs: Inputs,
    plan: Plan | None,
    precision: str,
    device: torch.device,
    say: Callable[[str], None],
) -> OptimizedTraining:
    current = precision_in_force(weights_type(model), device)
    chosen = _precision(precision, current, device)
    follows = current if precision == "same" else None
    if plan is not None and not plan.steps:
        return OptimizedTraining(model, plan, None)
    if plan is None and device.type != "cuda":
        say("plans for training need a GPU, where their kernels run: the original network runs")
        return OptimizedTraining(model, Plan(()), None)
    # The plan and the references of its gate have types of their own.
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        rows, network = _tried(model, inputs, plan or Plan.of(*training_passes(chosen)), chosen, device, bool(plan))
    for row in rows:
        say(describe_row(row))
    fast = OptimizedTraining(model, Plan(()) if network is None else Plan.of(*rows[-1].passes), follows, rows)
    if network is not None:
        fast.add(Signature.of(*inputs), network)
    return fast


def _tried(
    model: nn.Module, inputs: Inputs, plan: Plan, precision: Precision, device: torch.device, given: bool
) -> tuple[list[TuningRow], TrainingNetwork | None]:
    """The original and the plan; the rewritten network if it is to be used. A `given` plan is used, or refused by an error."""
    half = HALF.get(precision)

    def as_called(*args: Any, **kwargs: Any) -> Any:
        with nullcontext() if half is None else torch.autocast(device.type, half):
            return model(*args, **kwargs)

    original, row = TuningRow("original", (), kept=True), TuningRow(OWN, plan.names)
    step = _step(as_called, inputs)
    parameters = [p for p in model.parameters() if p.requires_grad]
    network: TrainingNetwork | None = None
    try:
        network = training_network(model, *inputs, plan)
        measure_weight_gradients(network, *inputs)
        row.verdict = _judge(model, inputs, as_called, plan, precision)
        row.why = "" if row.verdict.passed else f"refused by the gate: {row.verdict.reason}"
    except (InputError, RuntimeError) as error:
        row.why = one_line(error)
    if given and row.why:
        raise InputError(f"the plan cannot train this network: {row.why}")
    if network is None or row.why:
        return [original, row], None
    original.timing, row.timing = _timed(
        [step.gradients(as_called, parameters), step.gradients(network, parameters)], device
    )
    row.kept = given or row.timing.p50_ms < FASTER * original.timing.p50_ms
    row.why = "" if row.kept else "not faster than the original"
    original.kept = not row.kept
    return [original, row], network if row.kept else None


def _timed(calls: Sequence[Callable[[], None]], device: torch.device) -> list[Timing]:
    """Each call twice, in turns: what slows the machine for a while slows all of them."""
    rounds = [[measure(call, device, seconds=SECONDS / ROUNDS) for call in calls] for _ in range(ROUNDS)]
    return [min(timings, key=lambda timing: timing.p50_ms) for timings in zip(*rounds, strict=True)]


def _precision(requested: str, current: Precision, device: torch.device) -> Precision:
    if requested == "same":
        return current
    if requested == "auto":
        return "bf16" if device.type == "cuda" and refuses_half(device) is None else current
    if requested in HALF:
        return requested  # type: ignore[return-value]
    raise InputError(
        f"precision {requested!r} in training: choose same, auto, bf16 or fp16; float32 and TF32 follow PyTorch's own flags"
    )


def _judge(
    model: nn.Module, inputs: Inputs, as_called: Callable[..., Any], plan: Plan, precision: Precision
) -> Verdict:
    inputs = gate_inputs(as_called, inputs)
    step = _step(as_called, inputs)

    def rewritten(copied: nn.Module) -> Callable[..., Any]:
        return training_network(copied, *inputs, plan)

    name = "default" if precision == "tf32" else precision
    return GradientGate(model, [GateBatch(step.args, step.loss, step.kwargs)], name).judge(rewritten)


def gate_inputs(call: Callable[..., Any], inputs: Inputs) -> Inputs:
    """The inputs, or the middle of their volumes where these are large: half of each side, as often as the network accepts it."""
    images = [x for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.dim() > 3]
    size = max((tuple(x.shape[2:]) for x in images), key=math.prod, default=())
    if not images:
        return inputs
    largest = LARGEST_GATED[images[0].device.type] / images[0].shape[0]
    while math.prod(size) > largest and all(side % 2 == 0 and side > 2 for side in size):
        part = tuple(side // 2 for side in size)
        smaller = _middle(inputs, size, part)
        try:
            with torch.no_grad():
                results = volumes_of(call(*smaller[0], **smaller[1]))
        except (RuntimeError, ValueError, TypeError, AssertionError, IndexError) as error:
            log.info("the gate judges volumes of %s: smaller ones are refused (%s)", size, one_line(error))
            break
        if not results or not all(bool(torch.isfinite(y).all()) for y in results):
            break
        inputs, size = smaller, part
    return inputs


def _middle(inputs: Inputs, size: tuple[int, ...], part: tuple[int, ...]) -> Inputs:
    """The inputs with the middle of all volumes of `size`."""
    place = (
        slice(None),
        slice(None),
        *(slice((a - b) // 2, (a - b) // 2 + b) for a, b in zip(size, part, strict=True)),
    )

    def cut(x: Tensor) -> Tensor:
        if tuple(x.shape[2:]) != size:
            return x
        memory_format = torch.channels_last_3d if len(size) == 3 else torch.channels_last
        lasting = len(size) < 4 and x.is_contiguous(memory_format=memory_format) and not x.is_contiguous()
        return x[place].contiguous(memory_format=memory_format if lasting else torch.contiguous_format)

    smaller: Inputs = tree_map_only(Tensor, cut, inputs)
    return smaller

"""The plan of a training run: what computes the network, in which precision, and what was measured when it was chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from voxtune.precision import HALF, tf32_allowed
from voxtune.reading import parse_bytes
from voxtune.runtime.model import Model
from voxtune.training.config import TrainConfig
from voxtune.versions import __version__

if TYPE_CHECKING:
    from voxtune.plan.training import TrainingNetwork

PlanName = Literal["baseline", "compile", "voxtune"]
# "default": float32 with PyTorch's own flags of TF32, as the setting autocast none.
TrainingPrecision = Literal["default", "fp32", "tf32", "bf16", "fp16"]
# (noised images, diffusion steps, condition or None) -> prediction
Forward = Callable[[Tensor, Tensor, Tensor | None], Any]


@dataclass(frozen=True, kw_only=True)
class MeasuredPlan:
    """A candidate for the plan of a run: time and memory of a step, and the relative error of its gradient."""

    name: str
    kept: bool
    p50_ms: float | None = None
    peak_gib: float | None = None
    error: float | None = None
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What computes the network of a run; stored in its checkpoints.

    "baseline" is plain PyTorch, "compile" torch.compile, "voxtune" the network rewritten by `passes` for the run's batches; on
    a GPU its step is recorded as a CUDA graph. Of what does not fit into `memory_budget` (bytes), results are computed again in
    the backward pass. `made_for` is the device and the versions that `candidates` were measured with.
    """

    name: PlanName
    precision: TrainingPrecision
    channels_last: bool = False
    passes: tuple[str, ...] = ()
    memory_budget: int | None = None
    made_for: str = ""
    candidates: tuple[MeasuredPlan, ...] = ()

    @property
    def label(self) -> str:
        plain = "autocast" if self.precision in HALF else "plain PyTorch"
        name = {"baseline": plain, "compile": "torch.compile", "voxtune": "voxtune"}[self.name]
        return f"{name}, channels-last" if self.channels_last and self.name != "voxtune" else name

    def describe(self) -> str:
        """The plan in a sentence of the model card."""
        precision = "float32" if self.precision == "default" else self.precision.upper()
        return f"{self.label} in {precision}"

    def autocast(self, device: torch.device) -> Any:
        """Of the original network: for samples, and for the steps of plain PyTorch."""
        half = HALF.get(self.precision)
        return nullcontext() if half is None else torch.autocast(device.type, dtype=half)

    @contextmanager
    def flags(self, device: torch.device) -> Iterator[None]:
        """TF32 as the precision requires, on the device on which kernels are launched and graphs recorded."""
        if device.type == "cpu":
            yield
            return
        allowed = nullcontext() if self.precision == "default" else tf32_allowed(self.precision != "fp32")
        with torch.cuda.device(device), allowed:
            yield

    def placed(self, network: nn.Module, dimensions: int) -> nn.Module:
        """The network with its weights in the plan's memory format, in place."""
        if not self.channels_last or self.name == "voxtune":
            return network
        # A rewritten network packs its weights itself.
        memory_format = torch.channels_last_3d if dimensions == 3 else torch.channels_last
        return network.to(memory_format=memory_format)  # type: ignore[call-overload]

    def forward(self, network: nn.Module, *, accumulated: bool = False) -> Forward:
        """Computes the network by this plan; gradients go to the network's own parameters.

        `accumulated`: a step has several batches, whose gradients are in memory together.
        """
        if self.name == "voxtune":
            return RewrittenForward(self, network, accumulated=accumulated)
        return self._plain(cast(nn.Module, torch.compile(network)) if self.name == "compile" else network)

    def _plain(self, network: nn.Module) -> Forward:
        def forward(x: Tensor, t_N: Tensor, cond: Tensor | None) -> Any:
            with self.autocast(x.device):
                return network(x, t_N, cond)

        return forward


class RewrittenForward:
    """The network rewritten for the shapes of its first call; other shapes run as plain PyTorch in the same precision."""

    def __init__(self, plan: TrainingPlan, network: nn.Module, *, accumulated: bool = False):
        self.plan, self.network, self.accumulated = plan, network, accumulated
        self._plain = plan._plain(network)
        self._rewritten: TrainingNetwork | None = None
        self._shapes: tuple[Any, ...] = ()

    def __call__(self, x: Tensor, t_N: Tensor, cond: Tensor | None) -> Any:
        args = (x, t_N) if cond is None else (x, t_N, cond)
        shapes = tuple(a.shape for a in args)
        if self._rewritten is None:
            from voxtune.plan.weight_gradients import measure_weight_gradients

            self._rewritten, self._shapes = self.rewrite(args), shapes
            measure_weight_gradients(self._rewritten, args)
        return self._rewritten(*args) if shapes == self._shapes else self._plain(x, t_N, cond)

    def rewrite(self, args: tuple[Tensor, ...]) -> TrainingNetwork:
        """InputError if the network cannot be rewritten, or a step does not fit into the budget."""
        from voxtune.plan.plan import Plan
        from voxtune.plan.training import training_network
        from voxtune.plan.training_memory import TrainingMemory

        rewritten = training_network(self.network, args, None, Plan.of(*self.plan.passes))
        if self.plan.memory_budget is not None:
            memory = TrainingMemory(rewritten, args, accumulated=self.accumulated)
            rewritten.recompute(memory.within(self.plan.memory_budget))
        return rewritten


def zeros(model: Model, batch: int) -> tuple[Tensor, ...]:
    """A batch of the run's shapes."""
    network, size, device = model.config.network, model.config.size, model.device
    x = torch.zeros((batch, network.out_channels, *size), device=device)
    t_N = torch.zeros(batch, dtype=torch.int64, device=device)
    if not network.mask_channels:
        return x, t_N
    return x, t_N, torch.zeros((batch, network.mask_channels, *size), device=device)


def rewriting_plan(precision: TrainingPrecision, memory_budget: int | None = None) -> TrainingPlan:
    from voxtune.plan.training import training_passes

    passes = training_passes(cast(Any, "tf32" if precision == "default" else precision))
    return TrainingPlan(
        name="voxtune", precision=precision, channels_last=True, passes=passes, memory_budget=memory_budget
    )


def resolved_precision(config: TrainConfig, device: torch.device) -> TrainingPrecision:
    """The run's precision; by default BF16 on a GPU that has it, and float32 elsewhere."""
    requested = config.requested_precision
    if requested == "tf32" and device.type == "cpu":
        return "fp32"
    if requested != "auto":
        return requested
    if device.type == "cpu":
        return "fp32"
    from voxtune.plan.hazards import refuses_half

    usable = torch.cuda.is_bf16_supported(including_emulation=False) and refuses_half(device) is None
    return "bf16" if usable else "default"


def budget_of(config: TrainConfig) -> int | None:
    return None if config.memory_budget is None else parse_bytes(config.memory_budget, "memory_budget")


def unmeasured_plan(config: TrainConfig, device: torch.device) -> TrainingPlan:
    """The requested plan without any measurement; for "auto" plain PyTorch."""
    precision = resolved_precision(config, device)
    if config.requested_plan == "voxtune":
        return rewriting_plan(precision, budget_of(config))
    name: PlanName = "compile" if config.requested_plan == "compile" else "baseline"
    return TrainingPlan(name=name, precision=precision, channels_last=config.channels_last)


def made_for(device: torch.device) -> str:
    card = "a CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    return f"{card}, torch {torch.__version__}, voxtune {__version__}"

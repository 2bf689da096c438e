"""Estimates step time and peak memory on a GPU that is not available, from tensor shapes and its datasheet.

time = max(host, device), with host = operators x launch time and device = sum over operators of
max(FLOPs / achieved rate, bytes / achieved bandwidth). The constants in data/cards.json are fitted to one H200.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from voxtune.analysis.table import Column, Table
from voxtune.analysis.walk import COPIES, PRODUCTS, Op, Walk, walk
from voxtune.errors import InputError
from voxtune.workloads import NetworkConfig, Workload, build
from voxtune.workloads.segment import SegmentConfig, SegmentUNet

if TYPE_CHECKING:
    from voxtune.plan.step_memory import StepMemory

GB, GIB = 1e9, 2**30
Precision = Literal["fp32", "tf32", "half"]
PARTS = ("baseline", "fp32", "tf32", "bf16", "fp16", "channels_last", "compile", "voxtune")
PLAN_NOTE = "The plan voxtune: memory of a simulated training step; its time and sampling are not estimated."
NOTE = "Estimated from tensor shapes and datasheets with constants fitted to one H200; nothing was executed."
# torch.compile fuses these into neighbouring operators: no launch and no memory traffic of their own.
FUSED_AWAY = {"silu", "silu_backward", "gelu", "gelu_backward", "mul", "relu", "sigmoid", "threshold_backward", *COPIES}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the network runs: precision, memory format, compiled or not; `plan`: rewritten for training, by the plan voxtune."""

    precision: Precision = "fp32"
    channels_last: bool = False
    compiled: bool = False
    plan: bool = False

    @staticmethod
    def parse(text: str) -> Recipe:
        """ "baseline", "tf32", "channels_last", "bf16", "compile", "voxtune", or some joined by "+"."""
        parts = [p.strip() for p in text.split("+")]
        for part in parts:
            if part not in PARTS:
                near = difflib.get_close_matches(part, PARTS, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise InputError(f"unknown configuration {part!r} in {text!r}; choose from {', '.join(PARTS)}{hint}")
        chosen = {"half" if p in ("bf16", "fp16") else p for p in parts} & {"fp32", "tf32", "half"}
        if len(chosen) > 1:
            raise InputError(
                f"configuration {text!r}: {' and '.join(sorted(chosen))} cannot be combined; give one precision"
            )
        plan = "voxtune" in parts
        other = next((part for part in ("baseline", "fp16", "channels_last", "compile") if part in parts), None)
        if plan and other is not None:
            raise InputError(f"configuration {text!r}: voxtune cannot be combined with {other}")
        precision: Any = chosen.pop() if chosen else "half" if plan else "fp32"
        return Recipe(
            precision=precision, channels_last="channels_last" in parts, compiled="compile" in parts, plan=plan
        )


@dataclass(frozen=True, kw_only=True)
class Card:
    """The datasheet of a GPU, rates in TFLOP/s."""

    key: str
    name: str
    source: str
    memory_gb: float
    bandwidth_gbs: float
    fp32: float
    tf32: float | None
    half: float | None
    half_type: str
    sms: int
    clock_mhz: float


@functools.cache
def _data() -> dict[str, Any]:
    return json.loads(resources.files("voxtune.analysis").joinpath("data/cards.json").read_text())


def cards() -> dict[str, Card]:
    return {key: Card(key=key, **values) for key, values in _data()["cards"].items()}


def card(name: str) -> Card:
    known = cards()
    key = name.strip().lower().replace("_", "-")
    key = _data()["aliases"].get(key, key)
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"unknown GPU {name!r}; choose from {', '.join(known)}{hint}")
    return known[key]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One step of a network on a GPU. `bound` is the device time in ms by kernel class."""

    step_ms: float
    device_ms: float
    host_ms: float
    peak_bytes: float
    fits: bool
    bound: dict[str, float]
    notes: tuple[str, ...] = ()


def estimate_step(walked: Walk, gpu: Card, recipe: Recipe, *, train: bool) -> Estimate:
    precision, notes = _supported(gpu, recipe)
    recipe = replace(recipe, precision=precision)
    bound: dict[str, float] = {"convolution": 0.0, "matmul": 0.0, "norm": 0.0, "layout": 0.0, "elementwise": 0.0}
    for op in walked.ops:
        for kind, seconds in _cost(op, gpu, recipe, train=train).items():
            bound[kind] += seconds * 1e3
    if train:
        # Adam reads weight, gradient and both moments, and writes weight and both moments.
        bound["elementwise"] += 7 * 4 * walked.parameter_elements / _bandwidth(gpu) * 1e3
    eff = _data()["efficiency"]["host_us_per_operator"]
    issued = [op for op in walked.ops if not (recipe.compiled and op.name in FUSED_AWAY)]
    host = len(issued) * eff["compiled" if recipe.compiled else "eager"] / 1e3
    device = sum(bound.values())
    peak = peak_bytes(walked, recipe, train=train)
    available = (gpu.memory_gb - _data()["efficiency"]["fit_reserve_gb"]["value"]) * GB
    return Estimate(
        step_ms=max(device, host),
        device_ms=device,
        host_ms=host,
        peak_bytes=peak,
        fits=peak <= available,
        bound=bound,
        notes=tuple(notes),
    )


def _supported(gpu: Card, recipe: Recipe) -> tuple[Precision, list[str]]:
    if getattr(gpu, recipe.precision) is None:
        return "fp32", [f"{gpu.name} has no {recipe.precision} tensor cores; assuming FP32"]
    if recipe.precision == "half" and gpu.half_type == "fp16":
        return "half", [f"{gpu.name} has no BF16 tensor cores; assuming FP16"]
    return recipe.precision, []


def _cost(op: Op, gpu: Card, recipe: Recipe, *, train: bool) -> dict[str, float]:
    eff, bandwidth = _data()["efficiency"], _bandwidth(gpu)
    if op.name in ("convolution", "convolution_backward"):
        # TF32 is permitted, not required: cuDNN uses FP32 kernels where they are faster.
        optional = recipe.precision == "tf32"
        options = [recipe, replace(recipe, precision="fp32")] if optional else [recipe]
        return min((_convolution(op, gpu, r, train=train) for r in options), key=lambda cost: sum(cost.values()))
    if op.name in PRODUCTS:
        rate = _rate(gpu, recipe.precision) * min(1.0, _tiles(op.rows, op.columns) / gpu.sms)
        return {"matmul": max(op.flops / rate, op.bytes / bandwidth)}
    if recipe.compiled:
        return _compiled(op, gpu, recipe)
    if op.name.startswith("native_group_norm"):
        per_block = eff["norm_block_gelements"]["value"] * 1e9 * gpu.clock_mhz / 1980
        blocks = min(op.rows, 8 * gpu.sms)
        return {"norm": op.bytes / bandwidth + max(op.elements / (per_block * blocks), 4 * op.elements / bandwidth)}
    if op.strided:
        return {"layout": op.bytes / bandwidth / eff["strided_copy"]["value"]}
    return {"elementwise": op.bytes / bandwidth}


def _compiled(op: Op, gpu: Card, recipe: Recipe) -> dict[str, float]:
    if op.name in FUSED_AWAY:
        return {"elementwise": 0.0}
    if op.name.startswith("upsample") and op.name.endswith("_backward"):
        rate = _data()["efficiency"]["compiled_scatter_gelements"]["value"] * 1e9
        return {"elementwise": op.elements / rate * cards()["h200"].bandwidth_gbs / gpu.bandwidth_gbs}
    # The statistics are a second pass over the input.
    norm = op.name.startswith("native_group_norm")
    seconds = op.bytes * _width(recipe) / _bandwidth(gpu) / _data()["efficiency"]["fused"]["value"]
    return {"norm": 1.5 * seconds} if norm else {"elementwise": seconds}


def _convolution(op: Op, gpu: Card, recipe: Recipe, *, train: bool) -> dict[str, float]:
    eff, bandwidth = _data()["efficiency"], _bandwidth(gpu)
    forward = op.name == "convolution"
    if op.depthwise:
        # Not a matrix multiplication: each output voxel reads its neighbourhood through the cache.
        return {"convolution": max(op.flops / (0.1 * _rate(gpu, "fp32")), op.bytes / bandwidth)}
    direction = "conv_forward" if forward else "conv_backward"
    rate = _convolution_rate(gpu, recipe.precision, direction) * min(1.0, _tiles(op.rows, op.columns) / gpu.sms)
    tensor = recipe.precision != "fp32"
    # Channels are padded to full tensor-core tiles: 3 input channels cost as much as 32, 1 output channel as 64.
    padding = _ceil(op.columns, 64 if tensor else 32) / op.columns * (_ceil(op.inner, 32) / op.inner if tensor else 1)
    arithmetic = op.flops * padding / rate
    if not tensor and not forward:
        weights = op.rows * eff["wgrad_fp32_ns_per_voxel"]["value"] * 1e-9 * 1980 / gpu.clock_mhz
        arithmetic = arithmetic / 2 + max(arithmetic / 2, weights)
    if tensor and not forward and op.columns == 1:
        narrow = eff["wgrad_narrow_tflops"][recipe.precision] * 1e12 * gpu.fp32 / cards()["h200"].fp32
        arithmetic = arithmetic / 2 + op.flops / 2 / narrow
    moved = op.bytes * (_width(recipe) if recipe.compiled else 1) / bandwidth
    # The bias is a separate kernel: it reads and writes the output in the forward pass, and reads it in the backward pass.
    passes = (2 if forward else 1) if op.biased and not recipe.compiled else 0
    return {
        "convolution": max(arithmetic, moved),
        "layout": _relayout(op, gpu, recipe, train=train),
        "elementwise": passes * (op.activation - op.activation_in) / bandwidth,
    }


def _relayout(op: Op, gpu: Card, recipe: Recipe, *, train: bool) -> float:
    """Seconds to convert the operands of a convolution to the memory format of its kernel."""
    eff, bandwidth = _data()["efficiency"], _bandwidth(gpu)
    if not recipe.compiled:
        converted = 2 * op.relayout / bandwidth / eff["strided_copy"]["value"]
        return converted + 2 * _workspace(op, recipe) / bandwidth / eff["layout_kernel"]["value"]
    if recipe.precision == "fp32":
        return 0.0
    # torch.compile keeps activations channels-first: cuDNN converts them when sampling, separate copies when training.
    moved = 2 * op.activation * _width(recipe) / bandwidth
    if not train:
        return moved / eff["layout_kernel"]["value"]
    return moved / eff["compiled_relayout"]["value"] if op.phase == "backward" else 0.0


def _workspace(op: Op, recipe: Recipe) -> float:
    """Bytes that cuDNN converts: tensor-core kernels and FP32 weight gradients are channels-last, other FP32 kernels
    channels-first."""
    if op.name not in ("convolution", "convolution_backward") or op.depthwise or recipe.compiled:
        return 0.0
    if recipe.precision != "fp32":
        return 0.0 if recipe.channels_last else op.activation
    if op.name == "convolution":
        return op.activation if recipe.channels_last else 0.0
    return op.activation


def _workspace_allocated(op: Op, recipe: Recipe) -> float:
    """A tensor-core forward pass converts its input and then its output in the same workspace."""
    total = _workspace(op, recipe)
    if recipe.precision != "fp32" and op.name == "convolution":
        return min(total, max(op.activation_in, op.activation - op.activation_in))
    return total


def peak_bytes(walked: Walk, recipe: Recipe, *, train: bool) -> float:
    if recipe.compiled:
        return _peak_compiled(walked, recipe, train=train)
    timeline = zip(walked.timeline, walked.ops, strict=True)
    # Autocast caches a 16-bit copy of every weight until the end of the step.
    cached = 2.0 * walked.parameter_elements if recipe.precision == "half" else 0.0
    return cached + max((live + _workspace_allocated(op, recipe) for live, op in timeline), default=0.0)


def _peak_compiled(walked: Walk, recipe: Recipe, *, train: bool) -> float:
    """Activations in the precision of the recipe, plus the input of the widest norm in FP32. Training saves the inputs of
    matmuls, convolutions and norms and recomputes the rest."""
    width, weights = 4 * _width(recipe), walked.parameter_elements
    norm = (4 - width) * walked.widest_norm
    if not train:
        slack = _data()["efficiency"]["compiled_slack"]["value"]
        return ((max(walked.timeline) - 4 * weights) * _width(recipe) + norm) * slack + width * weights
    largest = max((op.bytes for op in walked.ops if op.phase == "backward"), default=0.0)
    return walked.saved_elements * width + (16 + width) * weights + largest * _width(recipe) + norm


def _width(recipe: Recipe) -> float:
    """Bytes per activation relative to the FP32 walk from which a compiled recipe is derived."""
    return 0.5 if recipe.precision == "half" else 1.0


def _rate(gpu: Card, precision: Precision) -> float:
    return getattr(gpu, precision) * 1e12 * _data()["efficiency"]["matmul"][precision]


def _convolution_rate(gpu: Card, precision: Precision, direction: str) -> float:
    """Time per FLOP = arithmetic, which scales with the peak rate, + loading operands, which scales with SMs and clock.

    Faster tensor cores do not load their operands faster. Both terms are fitted to the H200.
    """
    eff, fitted = _data()["efficiency"], cards()["h200"]
    ideal, achieved = eff["conv_forward"]["fp32"], eff[direction][precision]
    loading = (1 / achieved - 1 / ideal) / _rate(fitted, precision) * (fitted.sms * fitted.clock_mhz)
    return 1 / (1 / (ideal * _rate(gpu, precision)) + loading / (gpu.sms * gpu.clock_mhz))


def _bandwidth(gpu: Card) -> float:
    return gpu.bandwidth_gbs * GB * _data()["efficiency"]["bandwidth"]["value"]


def _tiles(rows: int, columns: int) -> float:
    return max(1.0, rows / 128) * max(1.0, columns / 64)


def _ceil(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def walk_workload(network: NetworkConfig, size: tuple[int, ...], batch: int, recipe: Recipe, *, train: bool) -> Walk:
    """The walk of a recipe; a compiled recipe is derived from the walk of the eager FP32 network."""

    def inputs() -> tuple[Tensor | None, ...]:
        mask = torch.empty(batch, network.mask_channels, *size) if network.mask_channels else None
        return torch.empty(batch, network.out_channels, *size), torch.empty(batch, dtype=torch.long), mask

    return _walk(lambda: build(network), inputs, recipe, train=train)


def _walk(
    make: Callable[[], nn.Module], inputs: Callable[[], tuple[Tensor | None, ...]], recipe: Recipe, *, train: bool
) -> Walk:
    half = recipe.precision == "half" and not recipe.compiled
    return walk(make, inputs, train=train, autocast=half, channels_last=recipe.channels_last and not recipe.compiled)


def training_bytes(
    network: NetworkConfig,
    size: tuple[int, ...],
    batch: int,
    recipe: Recipe,
    *,
    accumulated: bool = False,
    budget: int | None = None,
) -> float:
    """Estimated peak memory of a training run: a step with Adam, and the moving average of the weights.

    `accumulated` and `budget` are those of the plan voxtune: see `plan_memory`.
    """
    if recipe.plan:
        return plan_memory(network, size, batch, recipe, accumulated=accumulated, budget=budget).total
    walked = walk_workload(network, size, batch, recipe, train=True)
    return peak_bytes(walked, recipe, train=True) + 4.0 * walked.parameter_elements


def plan_memory(
    network: NetworkConfig,
    size: tuple[int, ...],
    batch: int,
    recipe: Recipe,
    *,
    accumulated: bool = False,
    budget: int | None = None,
) -> StepMemory:
    """The memory of a simulated training step by the plan voxtune, with what is computed again to fit into a `budget`.

    `accumulated`: the gradients of a step's several batches are in memory together.
    """
    from voxtune.plan.plan import Plan
    from voxtune.plan.training import training_network, training_passes
    from voxtune.plan.training_memory import TrainingMemory

    args = [torch.zeros(batch, network.out_channels, *size), torch.zeros(batch, dtype=torch.long)]
    if network.mask_channels:
        args.append(torch.zeros(batch, network.mask_channels, *size))
    passes = training_passes("bf16" if recipe.precision == "half" else recipe.precision)
    rewritten = training_network(build(network), args, None, Plan.of(*passes))
    memory = TrainingMemory(rewritten, args, accumulated=accumulated)
    return memory.step(() if budget is None else memory.within(budget))


def segmenter_bytes(network: SegmentConfig, size: tuple[int, ...], batch: int, recipe: Recipe) -> float:
    """Estimated peak memory of a training step of a segmenter, with Adam."""

    def make() -> nn.Module:
        return nn.Sequential(SegmentUNet(network), _MeanChannel())

    walked = _walk(make, lambda: (torch.empty(batch, network.in_channels, *size),), recipe, train=True)
    return peak_bytes(walked, recipe, train=True)


class _MeanChannel(nn.Module):
    """One channel, which every number of images can be compared with."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1, keepdim=True)


COLUMNS = (
    Column("gpu", kind="text"),
    Column("mode", kind="text"),
    Column("fits", kind="bool", doc="peak memory fits the GPU, less a reserve for the driver"),
    Column("peak_gib", "GiB", better="low", digits=1),
    Column("card_gib", "GiB", better="high", digits=1),
    Column("step_ms", "ms", better="low", digits=1, doc="one denoising step, or one training step"),
    Column("total_s", "s", better="low", digits=1, doc="all denoising steps of one batch; empty for training"),
    Column("mostly", kind="text", doc="kernel class with the largest share of the step"),
)


def estimate(
    workload: Workload,
    gpus: list[str],
    *,
    modes: tuple[str, ...] = ("sample", "train"),
    config: str = "baseline",
    size: tuple[int, ...] | None = None,
    batch: int = 1,
    steps: int | None = None,
) -> Table:
    """Peak memory and step time of a workload per GPU and mode."""
    recipe, chosen = Recipe.parse(config), [card(g) for g in gpus]
    size = size or workload.size
    steps = workload.steps if steps is None else steps
    _check(workload, size, batch, steps, modes)
    if recipe.plan:
        return _estimate_plan(workload, chosen, modes, config, size, batch, recipe)
    rows, notes = [], [NOTE]
    for mode in modes:
        train = mode == "train"
        walked = walk_workload(workload.network, size, batch, recipe, train=train)
        for gpu in chosen:
            result = estimate_step(walked, gpu, recipe, train=train)
            notes += [n for n in result.notes if n not in notes]
            rows.append(_row(gpu, mode, result, None if train else steps))
    title = f"Estimate: {workload.name}, {config}, {'x'.join(map(str, size))}, batch {batch}"
    return Table(title, list(COLUMNS), rows, notes, extra={"estimate": True, "config": config, "steps": steps})


def _estimate_plan(
    workload: Workload,
    gpus: list[Card],
    modes: tuple[str, ...],
    config: str,
    size: tuple[int, ...],
    batch: int,
    recipe: Recipe,
) -> Table:
    if "train" not in modes:
        raise InputError(f"configuration {config!r}: voxtune is a plan of training; pass --mode train")
    memory = plan_memory(workload.network, size, batch, recipe)
    reserve = _data()["efficiency"]["fit_reserve_gb"]["value"]
    unknown = dict.fromkeys(("step_ms", "total_s", "mostly"))
    rows = [
        {
            "gpu": gpu.key,
            "mode": "train",
            "fits": memory.total <= (gpu.memory_gb - reserve) * GB,
            "peak_gib": memory.total / GIB,
            "card_gib": gpu.memory_gb * GB / GIB,
            **unknown,
        }
        for gpu in gpus
    ]
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in memory.by_category().items())
    title = f"Estimate: {workload.name}, {config}, {'x'.join(map(str, size))}, batch {batch}"
    extra = {"estimate": True, "config": config, "steps": None, "memory_bytes": memory.by_category()}
    return Table(title, list(COLUMNS), rows, [PLAN_NOTE, f"GiB at the peak: {parts}."], extra=extra)


def _row(gpu: Card, mode: str, result: Estimate, steps: int | None) -> dict[str, Any]:
    host_bound = result.host_ms > result.device_ms
    mostly = "kernel launches (host)" if host_bound else max(result.bound, key=result.bound.__getitem__)
    return {
        "gpu": gpu.key,
        "mode": mode,
        "fits": result.fits,
        "peak_gib": result.peak_bytes / GIB,
        "card_gib": gpu.memory_gb * GB / GIB,
        "step_ms": result.step_ms,
        "total_s": None if steps is None else result.step_ms * steps / 1e3,
        "mostly": mostly,
    }


def _check(workload: Workload, size: tuple[int, ...], batch: int, steps: int, modes: tuple[str, ...]) -> None:
    network = workload.network
    if len(size) != network.dimensions:
        raise InputError(f"{workload.name} requires a size of {network.dimensions} dimensions, got {len(size)}")
    if any(n < 1 or n % network.divisor for n in size):
        text = ",".join(map(str, size))
        raise InputError(f"size {text}: dimensions must be multiples of {network.divisor}")
    if not 1 <= batch <= 4096 or not 1 <= steps <= 100_000:
        raise InputError(f"batch {batch}, steps {steps}: batch must be 1 to 4096, steps 1 to 100000")
    for mode in modes:
        if mode not in ("sample", "train"):
            raise InputError(f"unknown mode {mode!r}; choose from sample, train, both")

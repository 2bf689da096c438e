"""The gate: does a rewritten network compute the same as the original? A plan that fails is refused, with the errors.

Three checks, each against the original network:
1. structure: the rewritten graph computed in float32 (no half precision, no TF32, no compiler) against float64. A pass that
   dropped a norm or used a wrong epsilon shows here, where rounding cannot hide it.
2. numerics: the plan as it will run, on several inputs and time steps, against float64. Its error may be at most 1.5 times
   that of plain PyTorch in the same precision (autocast for half precision).
3. trajectory: volumes sampled with the same noise, against float32: relative error by the same rule, PSNR, worst voxel. Small
   errors grow by chance along a trajectory, so several are sampled, and the limit is the plain network's worst.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from voxtune.diffusion import DiffusionConfig, get_sampler, make_schedule, spaced_steps
from voxtune.files import one_line
from voxtune.plan.run import Inputs
from voxtune.precision import HALF, tf32_allowed
from voxtune.quality.tensor_error import Difference, difference

log = logging.getLogger("voxtune")
FACTOR = 1.5
# Float32: other orders of summation differ by a few units in the last place, which add up over a deep network.
FLOAT32_FACTOR, FLOAT32_FLOOR = 4.0, 1e-5
# A library's kernels may be less accurate (error 2e-5 of PyTorch's channels-last GroupNorm on a CPU), and steps add up.
STEP_FLOOR, PATH_FLOOR = 5e-5, 2e-4
# With TF32 allowed cuDNN may still compute in float32, so plain PyTorch's error says nothing: the floor is TF32's own spacing,
# and that of trajectories is higher by the same factor as in float32.
TF32_FLOOR = 2.0**-10 / STEP_FLOOR
# How far a plan may be from the original network that computes in float32, where the caller did not choose a precision.
SAME_LIMIT = 1e-4
SEEDS = (0, 1, 2)
# An evaluation in float64 takes about as long as this many in float32 on a CPU, for the progress bar.
FLOAT64_COST = 6

Call = Callable[..., Any]
# Samples a volume with a network, from the noise of a seed.
Trajectory = Callable[[Call, int], Tensor]


@dataclass(frozen=True)
class Verdict:
    """`figures` are the errors and their limits."""

    passed: bool
    reason: str | None
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def error(self) -> float:
        return float(self.figures.get("relative", math.nan))


class Gate:
    """References and plain PyTorch's errors for one network and its inputs, computed on first use."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Sequence[Inputs],
        trajectory: Trajectory | None = None,
        factor: float = FACTOR,
        *,
        same: bool = False,
        on_call: Callable[[], None] = lambda: None,
    ):
        """`same`: plain PyTorch is measured with the process's flags of TF32, and its error limits that of a plan.

        `on_call` is called after every evaluation of a network, `FLOAT64_COST` times in float64: for a progress bar."""
        assert inputs, "a gate needs inputs"
        self.model, self.inputs, self.trajectory, self.factor = model, list(inputs), trajectory, factor
        self.same, self.on_call = same, on_call
        self._references: list[list[Tensor]] | None = None
        self._begun: list[list[Tensor]] | None = None
        self._stream: torch.cuda.Stream | None = None
        self.reference_type = "float64"
        self._paths: dict[int, Tensor] = {}
        self._yardsticks: dict[str, tuple[float, float]] = {}

    @property
    def references(self) -> list[list[Tensor]]:
        """Outputs of the original network in float64, by input; in float32 if the network requires that type."""
        if self._references is None:
            if self._stream is not None:
                self._stream.synchronize()
            try:
                self._references = [[y.cpu() for y in ys] for ys in self._begun or self._in_float64()]
            except RuntimeError as error:
                log.info("no float64 reference (%s): using float32", one_line(error))
                self.reference_type = "float32"
                with tf32_allowed(False):
                    self._references = [[y.cpu() for y in _outputs(self.model, i)] for i in self.inputs]
        self._begun = None
        if self._stream is not None:
            self._stream = None
            torch.cuda.empty_cache()  # memory cached for one stream is not available to others
        return self._references

    def begin(self) -> None:
        """Starts computing the references on a GPU without waiting, while Python captures and rewrites."""
        device = _tensors(self.inputs[0])[0].device
        if self._references is None and device.type == "cuda":
            # On a stream of their own: other work on the GPU does not wait for them.
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
            try:
                with torch.cuda.stream(self._stream):
                    self._begun = self._in_float64()
            except RuntimeError as error:
                log.info("the gate's references are computed later: %s", one_line(error))

    def _in_float64(self) -> list[list[Tensor]]:
        network = copy.deepcopy(self.model).double()
        return [_outputs(self._counted(network, FLOAT64_COST), _to_float64(i)) for i in self.inputs]

    def _counted(self, call: Call, cost: int = 1) -> Call:
        def counted(*args: Any, **kwargs: Any) -> Any:
            output = call(*args, **kwargs)
            for _ in range(cost):
                self.on_call()
            return output

        return counted

    def path(self, seed: int) -> Tensor:
        """The volume sampled by the original network in float32."""
        if seed not in self._paths:
            assert self.trajectory is not None
            with torch.no_grad(), tf32_allowed(False):
                self._paths[seed] = self.trajectory(self._counted(self.model), seed).float().cpu()
        return self._paths[seed]

    def prepare(self, precision: str) -> None:
        """Computes everything that does not need the candidate: references, paths and plain PyTorch's errors."""
        try:
            assert self.references
            self.yardstick("fp32")
            self.yardstick(precision)
        except torch.OutOfMemoryError as error:
            log.info("the gate's references: %s", one_line(error))  # `judge` returns it as the verdict

    def judge(self, candidate: Call, precision: str, structure: Call | None = None) -> Verdict:
        """`structure` is the rewritten graph computed in float32; None if the plan has no structural passes."""
        figures: dict[str, Any] = {"precision": precision}
        try:
            return self._judge(candidate, precision, structure, figures)
        except torch.OutOfMemoryError as error:
            return Verdict(False, f"out of memory: {one_line(error)}", figures)

    def _judge(self, candidate: Call, precision: str, structure: Call | None, figures: dict[str, Any]) -> Verdict:
        if all(bool((y == y.flatten()[:1]).all()) for ys in self.references for y in ys):
            reason = "the network's output is zero or constant, so errors cannot be seen (untrained weights?)"
            return Verdict(False, reason, figures)
        if structure is not None:
            error = self._error(structure)
            limit = max(FLOAT32_FLOOR, FLOAT32_FACTOR * self.yardstick("fp32")[0])
            figures |= {"structure": error, "structure_limit": limit}
            if not error <= limit:
                return Verdict(
                    False, f"error {error:.1e} of the rewritten graph in float32 exceeds {limit:.1e}", figures
                )
        worst = max(self._differences(candidate), key=lambda d: d.relative)
        plain, plain_path = self.yardstick(precision)
        limit = self._limit(precision, plain, STEP_FLOOR)
        figures |= {"relative": worst.relative, "limit": limit, "plain": plain, "inputs": len(self.inputs)}
        figures["reference"] = self.reference_type
        if not worst.relative <= limit:
            return Verdict(False, f"error {worst.relative:.1e} exceeds {limit:.1e}", figures)
        if self.trajectory is not None:
            # Differences in the last digits of float32 do not grow by chance: one trajectory is enough.
            paths = self._follow(candidate, SEEDS[:1] if precision == "fp32" else SEEDS)
            median = sorted(paths, key=lambda d: d.relative)[len(paths) // 2]
            limit = self._limit(precision, plain_path, PATH_FLOOR)
            figures["trajectory"] = {**median.describe(), "limit": limit, "plain": plain_path}
            if not median.relative <= limit:
                reason = f"error {median.relative:.1e} of the sampled volume exceeds {limit:.1e}"
                return Verdict(False, f"{reason} (PSNR {median.psnr:.1f} dB, worst voxel {median.worst:.2g})", figures)
        return Verdict(True, None, figures)

    def yardstick(self, precision: str) -> tuple[float, float]:
        """Plain PyTorch's error in this precision: on single steps, and along the trajectory."""
        if precision not in self._yardsticks:
            device = next(x.device for x in _tensors(self.inputs[0]))

            def plain(*args: Any, **kwargs: Any) -> Any:
                with self._plain(device, precision):
                    return self.model(*args, **kwargs)

            # Plain float32 is the trajectory's reference.
            follows = self.trajectory is not None and precision != "fp32"
            path = max(d.relative for d in self._follow(plain, SEEDS)) if follows else 0.0
            self._yardsticks[precision] = (self._error(plain), path)
        return self._yardsticks[precision]

    @contextmanager
    def _plain(self, device: torch.device, precision: str) -> Iterator[None]:
        """Plain PyTorch in this precision."""
        half = precision in HALF and not any(p.dtype == HALF[precision] for p in self.model.parameters())
        flags = nullcontext() if self.same and precision == "tf32" else tf32_allowed(precision == "tf32")
        with flags, torch.autocast(device.type, HALF[precision]) if half else nullcontext():
            yield

    def _limit(self, precision: str, plain: float, floor: float) -> float:
        if self.same and precision == "fp32":
            return max(floor, min(SAME_LIMIT, FLOAT32_FACTOR * plain))
        if self.same and precision == "tf32":
            return max(SAME_LIMIT, self.factor * plain)
        floor *= TF32_FLOOR if precision == "tf32" else 1.0
        return max(floor, (FLOAT32_FACTOR if precision == "fp32" else self.factor) * plain)

    def _error(self, call: Call) -> float:
        return max(d.relative for d in self._differences(call))

    def _differences(self, call: Call) -> Iterator[Difference]:
        """For every output of every input; computed on the candidate's device, since features are large for a CPU."""
        for inputs, references in zip(self.inputs, self.references, strict=True):
            for y, reference in zip(_outputs(self._counted(call), inputs), references, strict=True):
                yield difference(y, reference.to(y.device))

    def _follow(self, call: Call, seeds: Sequence[int]) -> list[Difference]:
        assert self.trajectory is not None
        with torch.no_grad():
            return [
                difference(self.trajectory(self._counted(call), seed).float().cpu(), self.path(seed)) for seed in seeds
            ]


def _outputs(call: Call, inputs: Inputs) -> list[Tensor]:
    with torch.no_grad():
        output = call(*inputs[0], **inputs[1])
    return [y.detach() for y in volumes_of(output)]


def volumes_of(output: Any) -> list[Tensor]:
    """The floating-point tensors of a network's output (diffusers wraps one in a small class)."""
    values = tree_flatten(list(output.values()) if isinstance(output, dict) else output)[0]
    return [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]


def volume_of(output: Any) -> Tensor:
    """The first of them, which the sampler uses."""
    return volumes_of(output)[0]


def _tensors(inputs: Inputs) -> list[Tensor]:
    return [x for x in tree_flatten(inputs)[0] if isinstance(x, Tensor)]


def _to_float64(inputs: Inputs) -> Inputs:
    return tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, inputs)


def vary(inputs: Inputs, count: int = 3, seed: int = 0) -> list[Inputs]:
    """The inputs, then `count - 1` variants with other noise in the first volume and other time steps."""
    variants = [inputs]
    leaves, structure = tree_flatten(inputs)
    generator = torch.Generator().manual_seed(seed)
    for k in range(1, count):
        volume = next((i for i, x in enumerate(leaves) if is_volume(x)), None)
        changed = [
            _new_noise(x, generator) if i == volume else x * (count - 1 - k) // (count - 1) if is_time(x) else x
            for i, x in enumerate(leaves)
        ]
        variants.append(tree_unflatten(changed, structure))
    return variants


def _new_noise(x: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(x.shape, generator=generator)
    return (noise * x.float().std().cpu() + x.float().mean().cpu()).to(x.device, x.dtype)


def is_volume(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dim() >= 4


def is_time(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.is_floating_point() and x.dtype != torch.bool and x.dim() <= 1


STEPS = 8


def trajectory_of(inputs: Inputs, output: Tensor, *, steps: int = STEPS, total: int = 250) -> Trajectory | None:
    """DDIM from pure noise: x is the first volume of the output's shape, t the integer tensor; None if one is missing.

    The network's own schedule is not known here and not needed: the gate compares two networks on the same trajectory.
    """
    leaves, structure = tree_flatten(inputs)
    x_at = next((i for i, x in enumerate(leaves) if is_volume(x) and x.shape == output.shape), None)
    t_at = next((i for i, x in enumerate(leaves) if is_time(x) and x.numel() in (1, output.shape[0])), None)
    if x_at is None or t_at is None:
        return None
    schedule = make_schedule(DiffusionConfig(steps=total))
    timesteps = spaced_steps(total, steps)
    x_like, t_like = leaves[x_at], leaves[t_at]

    def walk(call: Call, seed: int) -> Tensor:
        def denoise(x: Tensor, t_N: Tensor) -> Tensor:
            changed: list[Any] = list(leaves)
            changed[x_at] = x.to(x_like.dtype)
            changed[t_at] = t_N.to(t_like.dtype).reshape(t_like.shape) if t_like.dim() else t_N[0].to(t_like.dtype)
            args, kwargs = tree_unflatten(changed, structure)
            return volume_of(call(*args, **kwargs)).float()

        noise = torch.randn(x_like.shape, generator=torch.Generator().manual_seed(seed)).to(x_like.device)
        return get_sampler("ddim")(denoise, noise, schedule, timesteps)

    return walk

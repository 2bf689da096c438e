"""The gate: is a rewritten network the same network? What fails is refused, with the figures.

Three questions, each against the network as its owner wrote it:
1. structure: the rewritten graph computed in float32 (no half precision, no TF32, no compiler) against float64. A pass that
   forgot a norm or took a wrong epsilon shows here, where rounding cannot hide it.
2. numerics: the plan as it will run, on several inputs and time steps, against float64. It may err at most 1.5 x as much as
   plain PyTorch errs in the same precision (autocast for half precision).
3. trajectory: whole samplings with the same noise, against float32: relative error by the same rule, PSNR, worst voxel. Small
   errors grow along the way by chance, so several are walked, and the plain network's worst is the measure.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from voxtune.diffusion import DiffusionConfig, get_sampler, make_schedule, spaced_steps
from voxtune.files import one_line
from voxtune.plan.passes.base import HALF
from voxtune.plan.run import Inputs
from voxtune.precision import tf32_allowed
from voxtune.quality.tensor_error import Difference, difference

log = logging.getLogger("voxtune")
FACTOR = 1.5
# Float32: other orders of summation differ by a few units in the last place, and these add up over a deep network.
FLOAT32_FACTOR, FLOAT32_FLOOR = 4.0, 1e-5
# As it runs, a library's own kernels may be coarser (PyTorch's channels-last GroupNorm on a CPU errs 2e-5), and steps add up.
STEP_FLOOR, PATH_FLOOR = 5e-5, 2e-4
# cuDNN takes TF32's products or float32's as it sees fit, so plain TF32 may be no TF32 at all: none is asked to lie closer than
# TF32's numbers lie to each other, and its volumes as much further as float32's may.
TF32_FLOOR = 2.0**-10 / STEP_FLOOR
SEEDS = (0, 1, 2)

Call = Callable[..., Any]
# A whole sampling with a network, from the noise of a seed.
Trajectory = Callable[[Call, int], Tensor]


@dataclass(frozen=True)
class Verdict:
    """`figures` are the errors, and the limits they were held to."""

    passed: bool
    reason: str | None
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def error(self) -> float:
        return float(self.figures.get("relative", math.nan))


class Gate:
    """References and yardsticks of one network and its inputs, computed when first asked for."""

    def __init__(
        self, model: nn.Module, inputs: Sequence[Inputs], trajectory: Trajectory | None = None, factor: float = FACTOR
    ):
        assert inputs, "a gate needs inputs"
        self.model, self.inputs, self.trajectory, self.factor = model, list(inputs), trajectory, factor
        self._references: list[list[Tensor]] | None = None
        self._begun: list[list[Tensor]] | None = None
        self._stream: torch.cuda.Stream | None = None
        self.reference_type = "float64"
        self._paths: dict[int, Tensor] = {}
        self._yardsticks: dict[str, tuple[float, float]] = {}

    @property
    def references(self) -> list[list[Tensor]]:
        """The network itself in float64, every output by input; in float32 where it insists on that type inside."""
        if self._references is None:
            if self._stream is not None:
                self._stream.synchronize()
            try:
                self._references = [[y.cpu() for y in ys] for ys in self._begun or self._widely()]
            except RuntimeError as error:
                log.info("no float64 reference (%s): float32 it is", one_line(error))
                self.reference_type = "float32"
                with tf32_allowed(False):
                    self._references = [[y.cpu() for y in _outputs(self.model, i)] for i in self.inputs]
        self._begun = None
        if self._stream is not None:
            self._stream = None
            torch.cuda.empty_cache()  # what is kept for one stream is of no use to others
        return self._references

    def begin(self) -> None:
        """Asks a GPU for the references and does not wait: it computes them while Python captures and rewrites."""
        device = _tensors(self.inputs[0])[0].device
        if self._references is None and device.type == "cuda":
            # On a stream of their own: whoever waits for the GPU meanwhile does not wait for them.
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
            try:
                with torch.cuda.stream(self._stream):
                    self._begun = self._widely()
            except RuntimeError as error:
                log.info("references are computed later: %s", one_line(error))

    def _widely(self) -> list[list[Tensor]]:
        wide = copy.deepcopy(self.model).double()
        return [_outputs(wide, _widened(i)) for i in self.inputs]

    def path(self, seed: int) -> Tensor:
        """The final volume of the network itself, in float32."""
        if seed not in self._paths:
            assert self.trajectory is not None
            with torch.no_grad(), tf32_allowed(False):
                self._paths[seed] = self.trajectory(self.model, seed).float().cpu()
        return self._paths[seed]

    def prepare(self, precision: str) -> None:
        """All that does not need the candidate: references, paths and what plain PyTorch errs."""
        try:
            assert self.references
            self.yardstick("fp32")
            self.yardstick(precision)
        except torch.OutOfMemoryError as error:
            log.info("the gate's references: %s", one_line(error))  # judging tells it as the verdict

    def judge(self, candidate: Call, precision: str, structure: Call | None = None) -> Verdict:
        """`structure` is the same rewriting computed in float32; leave it out where nothing was rewritten."""
        figures: dict[str, Any] = {"precision": precision}
        try:
            return self._judge(candidate, precision, structure, figures)
        except torch.OutOfMemoryError as error:
            return Verdict(False, f"out of memory: {one_line(error)}", figures)

    def _judge(self, candidate: Call, precision: str, structure: Call | None, figures: dict[str, Any]) -> Verdict:
        if structure is not None:
            error = self._error(structure)
            limit = max(FLOAT32_FLOOR, FLOAT32_FACTOR * self.yardstick("fp32")[0])
            figures |= {"structure": error, "structure_limit": limit}
            if not error <= limit:
                return Verdict(False, f"rewritten in float32 it errs {error:.1e}, more than {limit:.1e}", figures)
        worst = max(self._differences(candidate), key=lambda d: d.relative)
        plain, plain_path = self.yardstick(precision)
        limit = self._limit(precision, plain, STEP_FLOOR)
        figures |= {"relative": worst.relative, "limit": limit, "plain": plain, "inputs": len(self.inputs)}
        figures["reference"] = self.reference_type
        if not worst.relative <= limit:
            return Verdict(False, f"it errs {worst.relative:.1e}, more than {limit:.1e}", figures)
        if self.trajectory is not None:
            # What differs in the last digits of float32 has no chance to drift by luck: one walk tells.
            ways = self._follow(candidate, SEEDS[:1] if precision == "fp32" else SEEDS)
            reached = sorted(ways, key=lambda d: d.relative)[len(ways) // 2]
            limit = self._limit(precision, plain_path, PATH_FLOOR)
            figures["trajectory"] = {**reached.describe(), "limit": limit, "plain": plain_path}
            if not reached.relative <= limit:
                why = f"its sampled volume lies {reached.relative:.1e} from the reference's, more than {limit:.1e}"
                return Verdict(False, f"{why} (PSNR {reached.psnr:.1f} dB, worst voxel {reached.worst:.2g})", figures)
        return Verdict(True, None, figures)

    def yardstick(self, precision: str) -> tuple[float, float]:
        """What plain PyTorch errs in this precision: on single steps, and along the trajectory."""
        if precision not in self._yardsticks:
            device = next(x.device for x in _tensors(self.inputs[0]))

            def plain(*args: Any, **kwargs: Any) -> Any:
                with tf32_allowed(precision == "tf32"), _autocast(device, precision):
                    return self.model(*args, **kwargs)

            # Plain float32 is the reference of the trajectory itself.
            follows = self.trajectory is not None and precision != "fp32"
            path = max(d.relative for d in self._follow(plain, SEEDS)) if follows else 0.0
            self._yardsticks[precision] = (self._error(plain), path)
        return self._yardsticks[precision]

    def _limit(self, precision: str, plain: float, floor: float) -> float:
        floor *= TF32_FLOOR if precision == "tf32" else 1.0
        return max(floor, (FLOAT32_FACTOR if precision == "fp32" else self.factor) * plain)

    def _error(self, call: Call) -> float:
        return max(d.relative for d in self._differences(call))

    def _differences(self, call: Call) -> Iterator[Difference]:
        """Of every output, for every input: where the candidate's lies, since features are large for a processor."""
        for inputs, references in zip(self.inputs, self.references, strict=True):
            for y, reference in zip(_outputs(call, inputs), references, strict=True):
                yield difference(y, reference.to(y.device))

    def _follow(self, call: Call, seeds: Sequence[int]) -> list[Difference]:
        assert self.trajectory is not None
        with torch.no_grad():
            return [difference(self.trajectory(call, seed).float().cpu(), self.path(seed)) for seed in seeds]


def _autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, HALF[precision]) if precision in HALF else nullcontext()


def _outputs(call: Call, inputs: Inputs) -> list[Tensor]:
    with torch.no_grad():
        found = call(*inputs[0], **inputs[1])
    return [y.detach() for y in volumes_of(found)]


def volumes_of(output: Any) -> list[Tensor]:
    """A network's volumes: its output, or the tensors of it (diffusers wraps one in a small class)."""
    values = tree_flatten(list(output.values()) if isinstance(output, dict) else output)[0]
    return [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]


def volume_of(output: Any) -> Tensor:
    """The first of them: what the sampler goes on with."""
    return volumes_of(output)[0]


def _tensors(inputs: Inputs) -> list[Tensor]:
    return [x for x in tree_flatten(inputs)[0] if isinstance(x, Tensor)]


def _widened(inputs: Inputs) -> Inputs:
    return tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, inputs)


def vary(inputs: Inputs, count: int = 3, seed: int = 0) -> list[Inputs]:
    """The inputs themselves, then with other noise in the first volume and other time steps."""
    made = [inputs]
    leaves, structure = tree_flatten(inputs)
    generator = torch.Generator().manual_seed(seed)
    for k in range(1, count):
        volume = next((i for i, x in enumerate(leaves) if is_volume(x)), None)
        changed = [
            _redrawn(x, generator) if i == volume else x * (count - 1 - k) // (count - 1) if is_time(x) else x
            for i, x in enumerate(leaves)
        ]
        made.append(tree_unflatten(changed, structure))
    return made


def _redrawn(x: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(x.shape, generator=generator)
    return (noise * x.float().std().cpu() + x.float().mean().cpu()).to(x.device, x.dtype)


def is_volume(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dim() >= 4


def is_time(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.is_floating_point() and x.dtype != torch.bool and x.dim() <= 1


STEPS = 8


def trajectory_of(inputs: Inputs, output: Tensor, *, steps: int = STEPS, total: int = 250) -> Trajectory | None:
    """DDIM from pure noise: x is the first volume of the output's shape, t the integer tensor; None where there is none.

    The network's own schedule is not known here, and need not be: the gate asks whether two networks walk the same way.
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

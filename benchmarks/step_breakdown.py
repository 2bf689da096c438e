"""The time of a training step by class of operation, from a torch.profiler trace of its replays.

A replayed CUDA graph has no operators, and a convolution's data gradient runs the kernel of a forward convolution. Small kernels
therefore mark where a step, its backward pass and its update begin.

The trace slows a step slightly: gaps are the time of an untraced step without that of its kernels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

PHASES = ("forward", "backward", "update")
REPLAYS = 5


def _rules(*rules: tuple[str, str]) -> tuple[tuple[str, re.Pattern[str]], ...]:
    return tuple((label, re.compile(pattern)) for label, pattern in rules)


# The first match counts. What follows the slash is the class in the backward pass.
RULES = _rules(
    ("fused by torch.compile", r"^triton_"),
    ("copies", r"^Mem(cpy|set)|direct_copy|bfloat16_copy|CatArray|nchwToNhwc|nhwcToNchw|ncdhwTo|ndhwcTo|convertTensor"),
    ("weight gradients", r"^voxtune_(weight_gradient|tap_sums)|wgrad"),
    ("norms forward/norms computed again", r"^voxtune_(normalize|moments|finalize)"),
    ("norms forward/norms backward", r"^voxtune_(normalize|moments|finalize|norm_|rms_norm)"),
    ("norms forward/norms backward", r"GroupNorm|RowwiseMoments|ComputeFusedParams|InternalGradients|GammaBeta"),
    ("norms forward/norms backward", r"ComputeBackwardFusedParams|batch_norm|bn_(fw|bw)|instance_norm|ComputeInternal"),
    ("weights packed", r"^voxtune_(pack|unpack|opposite)_taps"),
    ("upsampling", r"^voxtune_upsample|upsample"),
    ("forward convolutions/data gradients", r"^voxtune_(conv3d|doubling_conv|strided_conv|pointwise|stem|head)"),
    ("forward convolutions/data gradients", r"fprop|dgrad|convolve|implicit_gemm|conv_depthwise|scudnn"),
    ("attention and products", r"flash|sdpa|fmha|[Ss]oft[Mm]ax|gemm|nvjet|cutlass|splitKreduce|gemv|cublas|dot_kernel"),
    ("sums", r"^voxtune_channel_sums|reduce_kernel|ReduceOp|cub::"),
    ("elementwise", r""),
)


@dataclass(frozen=True)
class Launch:
    """A kernel or copy on the GPU, in microseconds."""

    name: str
    start: float
    end: float


def mark(phase: str, x: torch.Tensor) -> None:
    """Launches the kernel that marks the beginning of a phase; `x` is any tensor on the GPU."""
    _marks()[PHASES.index(phase)][(1,)](x)


def _marks() -> tuple[Any, ...]:
    from step_marks import mark_backward, mark_forward, mark_update

    return mark_forward, mark_backward, mark_update


def phase_begun(name: str) -> str | None:
    found = re.match(rf"mark_({'|'.join(PHASES)})", name)
    return found.group(1) if found else None


def class_of(name: str, phase: str) -> str:
    if phase == "update":
        return "optimizer"
    label = next(label for label, pattern in RULES if pattern.search(name))
    forward, _, backward = label.partition("/")
    return backward or forward if phase == "backward" else forward


def steps_of(launches: Iterable[Launch]) -> list[list[tuple[str, Launch]]]:
    """The launches of each step with their phases, without the marks. What precedes the first mark belongs to none."""
    steps: list[list[tuple[str, Launch]]] = []
    phase = None
    for launch in sorted(launches, key=lambda x: x.start):
        begun = phase_begun(launch.name)
        if begun == "forward":
            steps.append([])
        phase = begun or phase
        if begun is None and phase is not None:
            steps[-1].append((phase, launch))
    return steps


def busy_us(launches: Iterable[Launch]) -> float:
    """The time in which at least one of them runs."""
    total, until = 0.0, float("-inf")
    for launch in sorted(launches, key=lambda x: x.start):
        total += max(0.0, launch.end - max(launch.start, until))
        until = max(until, launch.end)
    return total


def breakdown_of(launches: Iterable[Launch], step_ms: float) -> dict[str, Any]:
    """Milliseconds a step by class, mean over the steps; `step_ms` is the untraced time of one."""
    steps = steps_of(launches)
    if not steps or not all(steps):
        raise ValueError("the trace contains no step")
    count = len(steps)
    classes: dict[str, list[float]] = {}
    for phase, launch in (entry for step in steps for entry in step):
        entry = classes.setdefault(class_of(launch.name, phase), [0.0, 0])
        entry[0] += (launch.end - launch.start) / 1e3
        entry[1] += 1
    busy = sum(busy_us(launch for _, launch in step) for step in steps) / 1e3 / count
    ranked = sorted(classes.items(), key=lambda item: -item[1][0])
    return {
        "step_ms": round(step_ms, 3),
        "kernels_ms": round(sum(ms for ms, _ in classes.values()) / count, 3),
        "gaps_ms": round(step_ms - busy, 3),
        "launches": round(sum(n for _, n in classes.values()) / count),
        "classes": {name: {"ms": round(ms / count, 3), "launches": round(n / count)} for name, (ms, n) in ranked},
    }


def launches_of(run: Callable[[], None], replays: int = REPLAYS) -> list[Launch]:
    """A trace of calls that follow each other without waiting."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as traced:
        for _ in range(replays):
            run()
        torch.cuda.synchronize()
    events = [e for e in traced.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [Launch(e.name, e.time_range.start, e.time_range.end) for e in events]

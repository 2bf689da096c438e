"""A short sampling with a network given only as a callable, for the gate to follow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from voxtune.diffusion import DiffusionConfig, make_schedule, spaced_steps
from voxtune.diffusion import sampler as find_sampler
from voxtune.plan.gate import Call, Trajectory, is_time, is_volume, volume_of
from voxtune.plan.run import Inputs

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
        return find_sampler("ddim")(denoise, noise, schedule, timesteps)

    return walk

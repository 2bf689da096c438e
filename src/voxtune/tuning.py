"""Between a Model and the plans: what a network of it is called with, and a sampling of its own for the gate to walk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from voxtune.diffusion import noise_source, spaced_steps
from voxtune.diffusion import sampler as find_sampler
from voxtune.errors import InputError
from voxtune.runtime.model import Model, workload_config
from voxtune.runtime.storage import load
from voxtune.workloads import WORKLOADS

# Of the gate's trajectories: enough for errors to build up, few enough for a CPU.
STEPS = 8


def tuning_target(name: str, device: torch.device | str) -> Model:
    """A model from disk; or a workload with random weights, none of them zero, since a zero layer hides every error."""
    if name in WORKLOADS and not Path(name).exists():
        torch.manual_seed(0)
        model = Model(workload_config(name))
        for parameter in model.network.parameters():
            if parameter.dim() > 1 and not bool(parameter.any()):
                nn.init.normal_(parameter, std=0.02)
        return model.to(device)
    return load(Path(name), device=device)


def example_inputs(model: Model, size: Sequence[int] | None = None, batch: int = 1) -> tuple[Any, ...]:
    """(x, t, mask): noise, a middle step, and a mask of blocks, in the form that `Model.sample` calls the network with."""
    config = model.config.network
    sides = tuple(size or model.config.size)
    if len(sides) != config.dimensions or any(s < 1 or s % config.divisor for s in sides):
        raise InputError(f"size {sides}: need {config.dimensions} sides that divide by {config.divisor}")
    x = noise_source(0, list(range(batch)), (config.out_channels, *sides), model.device)(0)
    t_N = torch.full((batch,), len(model.schedule) // 2, dtype=torch.int64, device=model.device)
    if not config.mask_channels:
        return x, t_N, None
    coarse = torch.randn(batch, config.mask_channels, *[4] * len(sides), generator=torch.Generator().manual_seed(0))
    mask = nn.functional.interpolate(coarse.sign(), size=sides, mode="nearest")
    return x, t_N, mask.to(model.device)


def walk(model: Model, args: tuple[Any, ...]) -> Callable[[Callable[..., Any], int], Tensor]:
    """The model's own schedule and sampler in a few steps, with the noise of a seed."""
    timesteps = spaced_steps(model.available_steps, min(STEPS, model.available_steps))
    sampler = find_sampler(model.config.sampling.sampler)
    x, _, mask = args

    def follow(call: Callable[..., Any], seed: int) -> Tensor:
        noise = noise_source(seed, list(range(x.shape[0])), tuple(x.shape[1:]), x.device)
        return sampler(lambda y, t_N: call(y, t_N, mask), noise(0), model.schedule, timesteps, noise=noise)

    return follow

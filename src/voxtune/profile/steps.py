"""One step of a workload: of training (batch, L1 loss, Adam) or of sampling (DDPM).

All inputs of a step are on the device before it starts. Set-up is not part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from voxtune.diffusion import DiffusionConfig, Schedule, make_schedule, training_loss
from voxtune.errors import InputError
from voxtune.profile.configs import StepConfig, precision_flags
from voxtune.runtime.model import check_size
from voxtune.workloads import WORKLOADS, NetworkConfig, build, without_zeros, workload

MODES = ("train", "sample")


@dataclass(frozen=True, kw_only=True)
class Target:
    """What to run: a published workload, or a model on disk."""

    name: str
    network: NetworkConfig
    size: tuple[int, ...]
    diffusion: DiffusionConfig
    path: str | None = None


def find_target(text: str, size: tuple[int, ...] | None = None) -> Target:
    """The target of a workload's name or a model's path; `size` replaces its own size."""
    if text in WORKLOADS or not Path(text).exists():
        entry = workload(text)
        diffusion = DiffusionConfig(schedule=entry.schedule, steps=entry.steps)
        target = Target(name=entry.name, network=entry.network, size=size or entry.size, diffusion=diffusion)
    else:
        from voxtune.runtime.storage import load

        config = load(text).config
        name = Path(text).resolve().stem
        target = Target(
            name=name, network=config.network, size=size or config.size, diffusion=config.diffusion, path=text
        )
    check_size(target.network, target.size)
    return target


def smallest_size(text: str) -> tuple[int, ...]:
    """The smallest size at which every level of the network still has two voxels per dimension."""
    network = find_target(text).network
    return (2 * network.divisor,) * network.dimensions


@dataclass(kw_only=True)
class WorkloadStep:
    """`run()` runs one whole step; `close()` restores the flags that the configuration changed."""

    run: Callable[[], Any]
    network: nn.Module
    optimizer: torch.optim.Optimizer | None
    inputs: list[Tensor]
    flags: dict[str, Any]
    close: Callable[[], None]


def make_step(target: Target, mode: str, config: StepConfig, *, batch: int, device: torch.device) -> WorkloadStep:
    if mode not in MODES:
        raise InputError(f"unknown mode {mode!r}; choose from {', '.join(MODES)}")
    stack = ExitStack()
    flags = stack.enter_context(precision_flags(config))
    torch.manual_seed(0)
    network = _network(target).to(device).train(mode == "train")
    network = config.prepare(network)
    batch_of = _Batch(target, batch, device, config)
    if config.plan:
        network = _planned(network, mode, batch_of)
    schedule = make_schedule(target.diffusion)
    if mode == "train":
        run, optimizer = _training(network, schedule, batch_of, config)
    else:
        run, optimizer = _sampling(network, schedule, batch_of, config), None
    return WorkloadStep(
        run=run, network=network, optimizer=optimizer, inputs=batch_of.tensors, flags=flags, close=stack.close
    )


def _network(target: Target) -> nn.Module:
    if target.path is not None:
        from voxtune.runtime.storage import load

        return load(target.path).network
    return without_zeros(build(target.network))


def _planned(network: nn.Module, mode: str, batch: _Batch) -> nn.Module:
    """The fastest ready plan, and in training the plan voxtune, without a CUDA graph: counters cannot see its kernels."""
    from voxtune.plan.api import CPU_READY, READY
    from voxtune.plan.build import build as build_plan

    if mode == "train":
        return _rewritten(network, batch)
    plan = READY[0].without("cuda_graph") if batch.device.type == "cuda" else CPU_READY[0]
    return build_plan(network, (batch.image, batch.t_N, batch.mask), None, plan)


def _rewritten(network: nn.Module, batch: _Batch) -> nn.Module:
    from voxtune.plan.plan import Plan
    from voxtune.plan.training import training_network, training_passes

    passes = training_passes("bf16" if batch.device.type == "cuda" else "fp32")
    return training_network(network, (batch.image, batch.t_N, batch.mask), None, Plan.of(*passes))


class _Batch:
    """The tensors of one step."""

    def __init__(self, target: Target, batch: int, device: torch.device, config: StepConfig):
        network, size = target.network, target.size
        self.device = device

        def noise(channels: int) -> Tensor:
            return config.place(torch.randn(batch, channels, *size, device=device))

        self.image, self.noise = noise(network.out_channels), noise(network.out_channels)
        self.mask = noise(network.mask_channels) if network.mask_channels else None
        self.t = len(make_schedule(target.diffusion)) // 2
        self.t_N = torch.full((batch,), self.t, dtype=torch.int64, device=device)

    @property
    def tensors(self) -> list[Tensor]:
        return [t for t in (self.image, self.noise, self.mask, self.t_N) if t is not None]


def _training(
    network: nn.Module, schedule: Schedule, batch: _Batch, config: StepConfig
) -> tuple[Callable[[], Tensor], torch.optim.Optimizer]:
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-5)

    def denoise(x: Tensor, t_N: Tensor) -> Tensor:
        return network(x, t_N, batch.mask)

    def run() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with config.autocast(batch.device):
            loss = training_loss(denoise, schedule, batch.image, batch.t_N, batch.noise)
        loss.backward()
        optimizer.step()
        return loss

    return run, optimizer


def _sampling(network: nn.Module, schedule: Schedule, batch: _Batch, config: StepConfig) -> Callable[[], Tensor]:
    """One denoising and one DDPM update (Ho et al., algorithm 2, eq. 7), from the middle of the chain."""
    (alpha, sigma), (alpha_next, sigma_next) = schedule.signal_noise(batch.t), schedule.signal_noise(batch.t - 1)
    beta = 1 - (alpha / alpha_next) ** 2
    of_x0 = alpha_next * beta / sigma**2
    of_x = (alpha / alpha_next) * (sigma_next / sigma) ** 2
    spread = beta**0.5 * sigma_next / sigma

    @torch.inference_mode()
    def run() -> Tensor:
        x = batch.image
        with config.autocast(batch.device):
            eps = network(x, batch.t_N, batch.mask)
        x0 = ((x - sigma * eps.to(x.dtype)) / alpha).clamp(-1, 1)
        return of_x0 * x0 + of_x * x + spread * torch.randn_like(x)

    return run

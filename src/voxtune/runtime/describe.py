"""Facts about a model: parameters, arithmetic, memory, sizes and masks. Computed from shapes, without weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from voxtune.runtime.model import ModelConfig
from voxtune.workloads import NetworkConfig, build, split


def forward_flops(network: NetworkConfig, size: tuple[int, ...], batch: int = 1) -> int:
    """Floating-point operations of one forward pass; a multiply-add counts as two."""
    with torch.device("meta"), torch.inference_mode(), FlopCounterMode(display=False) as counter:
        x = torch.empty(batch, network.out_channels, *size)
        cond = torch.empty(batch, network.mask_channels, *size) if network.mask_channels else None
        build(network)(x, torch.zeros(batch, dtype=torch.int64), cond)
    return counter.get_total_flops()


def shallow_share(network: NetworkConfig, size: tuple[int, ...], depth: int) -> float:
    """The floating-point operations of a step that reuses the deep feature, as a fraction of those of a full step."""
    with torch.device("meta"), torch.inference_mode():
        x = torch.empty(1, network.out_channels, *size)
        cond = torch.empty(1, network.mask_channels, *size) if network.mask_channels else None
        t_N = torch.zeros(1, dtype=torch.int64)
        full, shallow = split(build(network), depth)
        with FlopCounterMode(display=False) as full_count:
            _, deep = full(x, t_N, cond)
        with FlopCounterMode(display=False) as shallow_count:
            shallow(x, t_N, cond, deep)
    return shallow_count.get_total_flops() / full_count.get_total_flops()


def describe(config: ModelConfig, size: tuple[int, ...] | None = None) -> dict[str, Any]:
    """The facts as a JSON object."""
    dimensions = size or config.size
    network = config.network
    with torch.device("meta"):
        parameters = sum(p.numel() for p in build(network).parameters())
    data = config.data
    return {
        "workload": config.family,
        "parameters": parameters,
        "weights_mib": round(parameters * 4 / 2**20, 1),
        "size": list(dimensions),
        "divisor": network.divisor,
        "voxels": math.prod(dimensions),
        "in_channels": network.in_channels,
        "out_channels": network.out_channels,
        "flop_per_step": forward_flops(network, dimensions),
        "diffusion": {
            "schedule": config.diffusion.schedule,
            "steps": config.diffusion.steps,
            "prediction": config.diffusion.prediction,
            "snr_shift": config.diffusion.snr_shift,
            "zero_terminal_snr": config.diffusion.zero_terminal_snr,
            "offset_noise": config.diffusion.offset_noise,
            "start": config.sampling.start,
            "available_steps": config.available_steps,
        },
        "sampling": config.sampling.resolve(config.available_steps).record(),
        "labels": None if data is None else data.describe_labels(),
        "images": None if data is None else list(data.images),
        "spacing_mm": None if data is None else list(data.spacing),
        "orientation": None if data is None else data.orientation,
    }

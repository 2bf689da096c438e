"""The forward process and the training losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from voxtune.diffusion.schedule import Schedule


def add_noise(schedule: Schedule, x0: Tensor, t_N: Tensor, noise: Tensor) -> Tensor:
    """x_t = sqrt(a_t) x_0 + sqrt(1 - a_t) noise (Ho et al. eq. 4)."""
    signal, spread = schedule.levels(t_N.device)
    shape = (-1, *[1] * (x0.dim() - 1))
    return signal[t_N].view(shape).to(x0.dtype) * x0 + spread[t_N].view(shape).to(x0.dtype) * noise


def noise_loss(predicted: Tensor, noise: Tensor, kind: Literal["l1", "l2"] = "l1") -> Tensor:
    """Mean of |error| ("l1") or error^2 ("l2") over all elements, in float32."""
    error = predicted.float() - noise.float()
    return error.abs().mean() if kind == "l1" else error.square().mean()


def training_loss(
    denoise: Callable[[Tensor, Tensor], Tensor],
    schedule: Schedule,
    x0: Tensor,
    t_N: Tensor,
    noise: Tensor,
    kind: Literal["l1", "l2"] = "l1",
) -> Tensor:
    assert t_N.dtype == torch.int64
    return noise_loss(denoise(add_noise(schedule, x0, t_N, noise), t_N), noise, kind)

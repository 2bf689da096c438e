"""Noise schedules, computed in float64, the forward process with its training loss, and the spacing of sampling steps.

a_t is the cumulative product of 1 - beta ("alphas_cumprod"); x_t = sqrt(a_t) x_0 + sqrt(1 - a_t) noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from voxtune.errors import InputError

MAX_STEPS = 100_000
# Lower limit of log(alphas_cumprod): samplers divide by the signal sqrt(a_t), which must stay above 1e-12.
MIN_LOG_SIGNAL = math.log(1e-24)


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig:
    """The diffusion that a network was trained with. `betas` is set only for the schedule "custom"."""

    schedule: Literal["cosine", "linear", "custom"] = "cosine"
    steps: int = 250
    loss: Literal["l1", "l2"] = "l1"
    betas: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= MAX_STEPS:
            raise InputError(f"diffusion steps must lie in 1 to {MAX_STEPS}, got {self.steps}")
        if (self.schedule == "custom") != (self.betas is not None):
            raise InputError("the schedule 'custom' requires betas; the other schedules do not accept them")
        if self.betas is not None and len(self.betas) != self.steps:
            raise InputError(f"got {len(self.betas)} betas for {self.steps} steps")
        if self.betas is not None and not all(0 < b < 1 for b in self.betas):
            raise InputError("every beta must be greater than 0 and less than 1")
        if self.betas is not None and math.fsum(math.log1p(-b) for b in self.betas) < MIN_LOG_SIGNAL:
            raise InputError("the schedule cannot be sampled: its betas reduce the signal below 1e-12")


class Schedule:
    """The betas and the quantities derived from them, in float64."""

    def __init__(self, betas: Tensor):
        self.betas = betas.detach().double().cpu()
        self._levels: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @cached_property
    def alphas_cumprod(self) -> Tensor:
        return torch.cumprod(1 - self.betas, dim=0)

    @cached_property
    def posterior_variance(self) -> Tensor:
        a = self.alphas_cumprod
        a_prev = torch.cat([a.new_ones(1), a[:-1]])
        return self.betas * (1 - a_prev) / (1 - a)

    @cached_property
    def log_snr(self) -> Tensor:
        """log(alpha / sigma) of every step, half the log of the signal-to-noise ratio; decreasing."""
        a = self.alphas_cumprod
        return 0.5 * (a.log() - (1 - a).log())

    def __len__(self) -> int:
        return len(self.betas)

    def levels(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(sqrt(a), sqrt(1 - a)) of every step as float32 tensors on `device`, copied there once."""
        if device not in self._levels:
            a = self.alphas_cumprod
            self._levels[device] = (a.sqrt().float().to(device), (1 - a).sqrt().float().to(device))
        return self._levels[device]

    def signal_noise(self, t: int) -> tuple[float, float]:
        """(sqrt(a_t), sqrt(1 - a_t)); t < 0 is the clean image."""
        if t < 0:
            return 1.0, 0.0
        a = self.alphas_cumprod[t].item()
        return math.sqrt(a), math.sqrt(1 - a)


def make_schedule(config: DiffusionConfig) -> Schedule:
    if config.betas is not None:
        return Schedule(torch.tensor(config.betas, dtype=torch.float64))
    return Schedule(cosine_betas(config.steps) if config.schedule == "cosine" else linear_betas(config.steps))


def cosine_betas(steps: int, s: float = 0.008) -> Tensor:
    """beta_i = 1 - f(u_{i+1}) / f(u_i), f(u) = cos^2((u + s) / (1 + s) pi / 2), <= 0.999 (Nichol & Dhariwal 17)."""
    u = torch.linspace(0, 1, steps + 1, dtype=torch.float64)
    f = torch.cos((u + s) / (1 + s) * math.pi / 2) ** 2
    return (1 - f[1:] / f[:-1]).clamp(0, 0.999)


def linear_betas(steps: int) -> Tensor:
    """1e-4 to 2e-2 over 1000 steps (Ho et al., section 4), scaled so that fewer steps end in pure noise, too."""
    scale = 1000 / steps
    return torch.linspace(1e-4 * scale, 0.02 * scale, steps, dtype=torch.float64).clamp(max=0.999)


def recognise(betas: Tensor, loss: Literal["l1", "l2"] = "l1") -> DiffusionConfig:
    """The configuration of stored betas: a named schedule if they agree up to float32 rounding, otherwise "custom"."""
    steps = len(betas)
    stored = betas.double()
    for name, make in (("cosine", cosine_betas), ("linear", linear_betas)):
        if torch.allclose(make(steps), stored, rtol=1e-5, atol=1e-7):
            return DiffusionConfig(schedule=name, steps=steps, loss=loss)  # type: ignore[arg-type]
    return DiffusionConfig(schedule="custom", steps=steps, loss=loss, betas=tuple(stored.tolist()))


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


def trailing(total: int, steps: int, schedule: Schedule | None) -> list[int]:
    """Evenly spaced, starting at the last training step."""
    return [round(total - i * total / steps) - 1 for i in range(steps)]


def linspace(total: int, steps: int, schedule: Schedule | None) -> list[int]:
    """Evenly spaced from the last training step towards step 0, which is left out unless all steps are taken."""
    return [round((total - 1) * (1 - i / steps)) for i in range(steps)] if steps < total else [*range(total)][::-1]


def leading(total: int, steps: int, schedule: Schedule | None) -> list[int]:
    """Multiples of total // steps, ending at step 0."""
    return [(steps - 1 - i) * (total // steps) for i in range(steps)]


# `logsnr` takes no steps below this log(alpha / sigma), except the first: the cosine schedule ends far beneath it.
MIN_LOG_SNR = -5.1


def logsnr(total: int, steps: int, schedule: Schedule | None) -> list[int]:
    """From the noisiest step to the cleanest in equal parts of log(alpha / sigma) (Lu et al. 2022)."""
    if schedule is None:
        raise InputError("timestep spacing 'logsnr' requires the schedule")
    log_snr = schedule.log_snr[:total]
    targets = torch.linspace(max(float(log_snr[-1]), MIN_LOG_SNR), float(log_snr[0]), steps, dtype=log_snr.dtype)
    nearest = (log_snr[None] - targets[:, None]).abs().argmin(dim=1).tolist()
    timesteps = [total - 1]
    for i, t in enumerate(nearest[1:], start=1):
        # Strictly decreasing, with enough steps left for those that follow.
        timesteps.append(max(min(t, timesteps[-1] - 1), steps - 1 - i))
    return timesteps


# Every list of timestep spacings (options, help texts, checks of stored settings) derives from this registry.
TIMESTEP_SPACINGS: dict[str, Callable[[int, int, Schedule | None], list[int]]] = {
    "trailing": trailing,
    "linspace": linspace,
    "leading": leading,
    "logsnr": logsnr,
}


def check_timestep_spacing(name: str) -> None:
    if not isinstance(name, str) or name not in TIMESTEP_SPACINGS:
        raise InputError(f"unknown timestep spacing {name!r}; choose from {', '.join(TIMESTEP_SPACINGS)}")


def spaced_steps(total: int, steps: int, spacing: str = "trailing", schedule: Schedule | None = None) -> list[int]:
    """`steps` of the `total` training steps, from the noisiest down. The spacing "logsnr" requires the schedule."""
    check_timestep_spacing(spacing)
    if not isinstance(steps, int) or not 1 <= steps <= total:
        raise InputError(f"sampling steps must lie in 1 to {total} (the model's diffusion steps), got {steps}")
    return TIMESTEP_SPACINGS[spacing](total, steps, schedule)

"""Noise schedules, computed in float64, the forward process with its training loss, and the spacing of sampling steps.

a_t is the cumulative product of 1 - beta ("alphas_cumprod"); x_t = alpha x_0 + sigma noise with alpha = sqrt(a_t) and
sigma = sqrt(1 - a_t). A network predicts the noise ("epsilon"), or v = alpha noise - sigma x_0 (Salimans & Ho 2022, appendix D).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor

from voxtune.errors import InputError

MAX_STEPS = 100_000
# Lower limit of log(alphas_cumprod): samplers divide by the signal sqrt(a_t), which must stay above 1e-12.
MIN_LOG_SIGNAL = math.log(1e-24)
# Factors of the signal-to-noise ratio; beyond them a schedule has no step in which a network could learn.
SNR_SHIFTS = (1e-4, 1e4)
MAX_OFFSET_NOISE = 1.0

Prediction = Literal["epsilon", "v"]


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig:
    """The diffusion that a network was trained with. `betas` is set only for the schedule "custom".

    `snr_shift` multiplies the signal-to-noise ratio of every step; `zero_terminal_snr` then rescales the schedule so that its
    last step has no signal. `offset_noise` is the standard deviation of a value that is added to the noise of a whole image.
    """

    schedule: Literal["cosine", "linear", "custom"] = "cosine"
    steps: int = 250
    loss: Literal["l1", "l2"] = "l1"
    betas: tuple[float, ...] | None = None
    prediction: Prediction = "epsilon"
    snr_shift: float = 1.0
    zero_terminal_snr: bool = False
    offset_noise: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= MAX_STEPS:
            raise InputError(f"diffusion steps must lie in 1 to {MAX_STEPS}, got {self.steps}")
        if (self.schedule == "custom") != (self.betas is not None):
            raise InputError("the schedule 'custom' requires betas; the other schedules do not accept them")
        if self.betas is not None and len(self.betas) != self.steps:
            raise InputError(f"got {len(self.betas)} betas for {self.steps} steps")
        if self.betas is not None and not all(0 < b < 1 for b in self.betas):
            raise InputError("every beta must be greater than 0 and less than 1")
        if self.prediction not in get_args(Prediction):
            raise InputError(f"prediction {self.prediction!r}: choose from {', '.join(get_args(Prediction))}")
        low, high = SNR_SHIFTS
        if not low <= self.snr_shift <= high:
            raise InputError(f"snr_shift {self.snr_shift}: the factor must lie in {low:g} to {high:g}")
        if not 0 <= self.offset_noise <= MAX_OFFSET_NOISE:
            raise InputError(f"offset_noise {self.offset_noise}: must lie in 0 to {MAX_OFFSET_NOISE:g}")
        if self.zero_terminal_snr and (self.prediction == "epsilon" or self.steps < 2):
            raise InputError(
                "zero_terminal_snr requires prediction v and 2 steps or more: the noise alone does not determine the image "
                "where there is no signal"
            )
        shift = min(0.0, math.log(self.snr_shift))
        if self.betas is not None and math.fsum(math.log1p(-b) for b in self.betas) + shift < MIN_LOG_SIGNAL:
            raise InputError("the schedule cannot be sampled: its betas reduce the signal below 1e-12")

    def describe(self) -> str:
        """The diffusion in a line, without the loss."""
        parts = [f"{self.schedule} schedule", f"{self.steps} steps"]
        parts += [] if self.prediction == "epsilon" else [f"{self.prediction}-prediction"]
        parts += [] if self.snr_shift == 1 else [f"SNR x {self.snr_shift:g}"]
        parts += ["zero terminal SNR"] if self.zero_terminal_snr else []
        parts += [f"offset noise {self.offset_noise:g}"] if self.offset_noise else []
        return ", ".join(parts)


class Schedule:
    """The betas and the quantities derived from them, in float64; `prediction` is what the network predicts at a step."""

    def __init__(self, betas: Tensor, prediction: Prediction = "epsilon"):
        self.betas, self.prediction = betas.detach().double().cpu(), prediction
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
        """log(alpha / sigma) of every step, half the log of the signal-to-noise ratio; decreasing, -inf without signal."""
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
        betas = torch.tensor(config.betas, dtype=torch.float64)
    else:
        betas = cosine_betas(config.steps) if config.schedule == "cosine" else linear_betas(config.steps)
    if config.snr_shift != 1:
        betas = shift_snr(betas, config.snr_shift)
    if config.zero_terminal_snr:
        betas = rescale_to_zero_terminal_snr(betas)
    return Schedule(betas, config.prediction)


def shift_snr(betas: Tensor, factor: float) -> Tensor:
    """Multiplies a / (1 - a), the signal-to-noise ratio, of every step (Hoogeboom et al. 2023, section 3.1).

    At higher resolution, neighbouring voxels repeat each other, and the same noise hides less of the image: a factor below 1.
    """
    a = torch.cumprod(1 - betas, dim=0)
    return _betas(factor * a / (factor * a + (1 - a)))


def rescale_to_zero_terminal_snr(betas: Tensor) -> Tensor:
    """Shifts and scales sqrt(a) so that its last value is 0 and its first one unchanged (Lin et al. 2024, algorithm 1)."""
    signal = torch.cumprod(1 - betas, dim=0).sqrt()
    return _betas(((signal - signal[-1]) * signal[0] / (signal[0] - signal[-1])).square())


def _betas(a: Tensor) -> Tensor:
    """The betas whose cumulative product of 1 - beta is `a`."""
    return 1 - torch.cat([a[:1], a[1:] / a[:-1]])


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


def clean_image(predicted: Tensor, x: Tensor, alpha: float, sigma: float, prediction: Prediction) -> Tensor:
    """x_0, from what the network predicts in x at a step with these levels."""
    if prediction == "v":
        return alpha * x - sigma * predicted
    return (x - sigma * predicted) / alpha


def noise_in(
    predicted: Tensor, x: Tensor, alpha: float | Tensor, sigma: float | Tensor, prediction: Prediction
) -> Tensor:
    """The noise in x, from what the network predicts at a step with these levels."""
    return sigma * x + alpha * predicted if prediction == "v" else predicted


def prediction_target(schedule: Schedule, x0: Tensor, t_N: Tensor, noise: Tensor) -> Tensor:
    """What the network should predict in x_t: the noise, or v = alpha noise - sigma x_0."""
    if schedule.prediction == "epsilon":
        return noise
    signal, spread = schedule.levels(t_N.device)
    shape = (-1, *[1] * (x0.dim() - 1))
    return signal[t_N].view(shape).to(x0.dtype) * noise - spread[t_N].view(shape).to(x0.dtype) * x0


def prediction_loss(predicted: Tensor, target: Tensor, kind: Literal["l1", "l2"] = "l1") -> Tensor:
    """Mean of |error| ("l1") or error^2 ("l2") over all elements, in float32."""
    error = predicted.float() - target.float()
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
    target = prediction_target(schedule, x0, t_N, noise)
    return prediction_loss(denoise(add_noise(schedule, x0, t_N, noise), t_N), target, kind)


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

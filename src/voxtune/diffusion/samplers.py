"""Samplers: plain functions (denoise, x, schedule, timesteps, ...) -> x_0.

`denoise(x, t_N)` predicts what `schedule.prediction` names: the noise in x, or v. `timesteps` are training steps in decreasing
order; the step after the last one is the clean image. `noise(k)` is draw k of the noise, k >= 1 (draw 0 is the initial x);
ddpm, sde-dpm++ and ddim with eta > 0 require it. `clip` clamps each prediction of x_0 to [-1, 1]. `callback(i, x, x0)` is
called after step i.

In the code, alpha = sqrt(a_t) and sigma = sqrt(1 - a_t) at the current step; `alpha_next` and `sigma_next` at the next one. At
the last step of a schedule with zero terminal SNR, alpha is 0 and log(alpha / sigma) is -inf: the step from it is of first order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from voxtune.diffusion.schedule import Schedule, clean_image
from voxtune.errors import InputError

Denoise = Callable[[Tensor, Tensor], Tensor]
Noise = Callable[[int], Tensor]
Callback = Callable[[int, Tensor, Tensor], None]


class Sampler(Protocol):
    def __call__(
        self,
        denoise: Denoise,
        x: Tensor,
        schedule: Schedule,
        timesteps: Sequence[int],
        *,
        noise: Noise | None = None,
        clip: bool = True,
        callback: Callback | None = None,
    ) -> Tensor: ...


def _predict(denoise: Denoise, x: Tensor, t: int, schedule: Schedule, clip: bool) -> Tensor:
    """The prediction of x_0, clamped."""
    predicted = denoise(x, torch.full((x.shape[0],), t, dtype=torch.int64, device=x.device))
    x0 = clean_image(predicted.to(x.dtype), x, *schedule.signal_noise(t), schedule.prediction)
    return x0.clamp(-1, 1) if clip else x0


def _log_snr(alpha: float, sigma: float) -> float:
    return math.log(alpha / sigma) if alpha else -math.inf


def ddpm(
    denoise: Denoise,
    x: Tensor,
    schedule: Schedule,
    timesteps: Sequence[int],
    *,
    noise: Noise | None = None,
    clip: bool = True,
    callback: Callback | None = None,
) -> Tensor:
    """Ancestral sampling (Ho et al., algorithm 2), over the subsequence `timesteps` of the training steps."""
    if noise is None:
        raise InputError("ddpm requires a noise source")
    for i, (t, t_next) in enumerate(zip(timesteps, [*timesteps[1:], -1], strict=True)):
        alpha, sigma = schedule.signal_noise(t)
        alpha_next, sigma_next = schedule.signal_noise(t_next)
        x0 = _predict(denoise, x, t, schedule, clip)
        beta = 1 - (alpha / alpha_next) ** 2
        # Posterior mean and variance (Ho et al. eq. 7).
        x = (alpha_next * beta / sigma**2) * x0 + ((alpha / alpha_next) * (sigma_next / sigma) ** 2) * x
        if t_next >= 0:
            x = x + math.sqrt(beta) * sigma_next / sigma * noise(i + 1)
        if callback:
            callback(i, x, x0)
    return x


def ddim(
    denoise: Denoise,
    x: Tensor,
    schedule: Schedule,
    timesteps: Sequence[int],
    *,
    noise: Noise | None = None,
    clip: bool = True,
    callback: Callback | None = None,
    eta: float = 0.0,
) -> Tensor:
    """Song et al. eq. 12 and 16: deterministic at eta 0, ancestral at eta 1."""
    if eta and noise is None:
        raise InputError("ddim with eta > 0 requires a noise source")
    for i, (t, t_next) in enumerate(zip(timesteps, [*timesteps[1:], -1], strict=True)):
        alpha, sigma = schedule.signal_noise(t)
        alpha_next, sigma_next = schedule.signal_noise(t_next)
        x0 = _predict(denoise, x, t, schedule, clip)
        eps = (x - alpha * x0) / sigma
        spread = eta * sigma_next / sigma * math.sqrt(max(0.0, 1 - (alpha / alpha_next) ** 2))
        x = alpha_next * x0 + math.sqrt(max(0.0, sigma_next**2 - spread**2)) * eps
        if spread and noise is not None:
            x = x + spread * noise(i + 1)
        if callback:
            callback(i, x, x0)
    return x


def dpm_solver_pp(
    denoise: Denoise,
    x: Tensor,
    schedule: Schedule,
    timesteps: Sequence[int],
    *,
    noise: Noise | None = None,
    clip: bool = True,
    callback: Callback | None = None,
    sde: bool = False,
) -> Tensor:
    """DPM-Solver++ (2M), Lu et al. 2022, algorithm 2: second order, with first-order steps at the start and the end.

    With `sde`, it solves the stochastic differential equation (SDE-DPM-Solver++); its first-order form is ancestral sampling.
    """
    if sde and noise is None:
        raise InputError("sde-dpm++ requires a noise source")
    x0_prev, h_prev = None, 0.0
    for i, (t, t_next) in enumerate(zip(timesteps, [*timesteps[1:], -1], strict=True)):
        alpha, sigma = schedule.signal_noise(t)
        alpha_next, sigma_next = schedule.signal_noise(t_next)
        x0 = _predict(denoise, x, t, schedule, clip)
        if t_next < 0:
            x = x0
        else:
            h = _log_snr(alpha_next, sigma_next) - _log_snr(alpha, sigma)
            d = x0 if x0_prev is None else x0 + (0.5 * h / h_prev) * (x0 - x0_prev)
            if sde and noise is not None:
                fresh = -math.expm1(-2 * h)  # fraction of the variance that is new noise
                x = (sigma_next / sigma * math.exp(-h)) * x + (alpha_next * fresh) * d
                x = x + sigma_next * math.sqrt(fresh) * noise(i + 1)
            else:
                x = (sigma_next / sigma) * x - (alpha_next * math.expm1(-h)) * d
            x0_prev, h_prev = x0, h
        if callback:
            callback(i, x, x0)
    return x


def unipc(
    denoise: Denoise,
    x: Tensor,
    schedule: Schedule,
    timesteps: Sequence[int],
    *,
    noise: Noise | None = None,
    clip: bool = True,
    callback: Callback | None = None,
) -> Tensor:
    """UniPC of order 2 with B(h) = e^h - 1 (Zhao et al. 2023, algorithms 1 and 2)."""
    correct: Callable[[Tensor], Tensor] | None = None
    x0_prev, log_snr_prev = None, 0.0
    for i, (t, t_next) in enumerate(zip(timesteps, [*timesteps[1:], -1], strict=True)):
        alpha, sigma = schedule.signal_noise(t)
        alpha_next, sigma_next = schedule.signal_noise(t_next)
        x0 = _predict(denoise, x, t, schedule, clip)
        if correct:
            x = correct(x0)
        if t_next < 0:
            x = x0
        else:
            log_snr = _log_snr(alpha, sigma)
            h = _log_snr(alpha_next, sigma_next) - log_snr
            base = (sigma_next / sigma) * x - (alpha_next * math.expm1(-h)) * x0
            r = -1.0 if x0_prev is None else (log_snr_prev - log_snr) / h
            slope = None if x0_prev is None else (x0_prev - x0) / r
            x = base if slope is None else base - (0.5 * alpha_next * math.expm1(-h)) * slope
            correct = _unipc_corrector(base, x0, slope, r, h, alpha_next)
            x0_prev, log_snr_prev = x0, log_snr
        if callback:
            callback(i, x, x0)
    return x


def _unipc_corrector(
    base: Tensor, x0: Tensor, slope: Tensor | None, r: float, h: float, alpha_next: float
) -> Callable[[Tensor], Tensor]:
    """The corrector of the current step, as a function of the prediction at the next step."""
    scale = alpha_next * math.expm1(-h)
    if slope is None:
        return lambda x0_next: base - (0.5 * scale) * (x0_next - x0)
    # Weights that match the expansion to second order: the 2 x 2 system [[1, 1], [r, 1]] rho = b (eq. 9).
    phi_1 = math.expm1(-h) / -h - 1
    b1 = phi_1 / math.expm1(-h)
    b2 = (phi_1 / -h - 0.5) * 2 / math.expm1(-h)
    rho_slope = (b1 - b2) / (1 - r)
    rho_next = b1 - rho_slope
    return lambda x0_next: base - scale * (rho_slope * slope + rho_next * (x0_next - x0))


# Adams-Bashforth weights by the number of known noise predictions, newest first (Liu et al. 2022, eq. 9).
_ADAMS_BASHFORTH = ((1.0,), (3 / 2, -1 / 2), (23 / 12, -16 / 12, 5 / 12))


def ipndm(
    denoise: Denoise,
    x: Tensor,
    schedule: Schedule,
    timesteps: Sequence[int],
    *,
    noise: Noise | None = None,
    clip: bool = True,
    callback: Callback | None = None,
) -> Tensor:
    """iPNDM of order 3 (Zhang & Chen 2023): DDIM steps along extrapolated noise, computed from the clamped x_0."""
    history: list[Tensor] = []
    for i, (t, t_next) in enumerate(zip(timesteps, [*timesteps[1:], -1], strict=True)):
        alpha, sigma = schedule.signal_noise(t)
        alpha_next, sigma_next = schedule.signal_noise(t_next)
        x0 = _predict(denoise, x, t, schedule, clip)
        history = [(x - alpha * x0) / sigma, *history[:2]]
        weights = _ADAMS_BASHFORTH[len(history) - 1]
        eps = torch.stack([w * e for w, e in zip(weights, history, strict=True)]).sum(dim=0)
        # Without signal x holds no x_0: the step is DDIM's.
        image = (alpha_next / alpha) * (x - sigma * eps) if alpha else alpha_next * x0
        x = image + sigma_next * eps
        if callback:
            callback(i, x, x0)
    return x.clamp(-1, 1) if clip else x


# Every list of samplers (options, help texts, checks of stored settings) derives from this registry.
SAMPLERS: dict[str, Sampler] = {
    "ddpm": ddpm,
    "ddim": ddim,
    "dpm++": dpm_solver_pp,
    "sde-dpm++": partial(dpm_solver_pp, sde=True),
    "unipc": unipc,
    "ipndm": ipndm,
}


def get_sampler(name: str) -> Sampler:
    if not isinstance(name, str) or name not in SAMPLERS:
        raise InputError(f"unknown sampler {name!r}; choose from {', '.join(SAMPLERS)}")
    return SAMPLERS[name]


# Reuse of deep features between sampling steps (DeepCache, Ma et al. 2023): they change slowly from one step to the next.
Full = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Shallow = Callable[[Tensor, Tensor, Tensor], Tensor]


def full_steps(steps: int, interval: int) -> list[bool]:
    """True for the steps that run the full network: the first, every `interval`-th after it, and the last."""
    return [i % interval == 0 or i == steps - 1 for i in range(steps)]


def cached_denoiser(full: Full, shallow: Shallow, full_at: Iterable[bool]) -> Denoise:
    """A denoiser for one sampling.

    At steps where `full_at` is true, `full(x, t_N)` returns the noise and the deep feature. At the others,
    `shallow(x, t_N, deep)` reuses that feature.
    """
    schedule = iter(full_at)
    deep: Tensor | None = None

    def denoise(x: Tensor, t_N: Tensor) -> Tensor:
        nonlocal deep
        full_step = next(schedule, None)
        if full_step is None:
            raise InputError(
                "the feature cache requires a sampler that evaluates the network once per step; omit cache"
            )
        if full_step:
            eps, deep = full(x, t_N)
            return eps
        assert deep is not None, "the first step runs the full network"
        return shallow(x, t_N, deep)

    return denoise

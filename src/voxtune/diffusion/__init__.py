"""Schedules, losses and samplers as plain functions."""

from voxtune.diffusion.feature_cache import cached_denoiser, full_steps
from voxtune.diffusion.losses import add_noise, noise_loss, training_loss
from voxtune.diffusion.noise import noise_source, normal
from voxtune.diffusion.samplers import SAMPLERS, get_sampler
from voxtune.diffusion.schedule import SPACINGS, DiffusionConfig, Schedule, make_schedule, spaced_steps

__all__ = [
    "SAMPLERS",
    "SPACINGS",
    "DiffusionConfig",
    "Schedule",
    "add_noise",
    "cached_denoiser",
    "full_steps",
    "get_sampler",
    "make_schedule",
    "noise_loss",
    "noise_source",
    "normal",
    "spaced_steps",
    "training_loss",
]

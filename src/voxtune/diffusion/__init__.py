"""Schedules, losses and samplers as plain functions."""

from voxtune.diffusion.noise import noise_source, normal
from voxtune.diffusion.samplers import SAMPLERS, cached_denoiser, full_steps, get_sampler
from voxtune.diffusion.schedule import (
    TIMESTEP_SPACINGS,
    DiffusionConfig,
    Schedule,
    add_noise,
    make_schedule,
    prediction_loss,
    prediction_target,
    spaced_steps,
    training_loss,
)

__all__ = [
    "SAMPLERS",
    "TIMESTEP_SPACINGS",
    "DiffusionConfig",
    "Schedule",
    "add_noise",
    "cached_denoiser",
    "full_steps",
    "get_sampler",
    "make_schedule",
    "noise_source",
    "normal",
    "prediction_loss",
    "prediction_target",
    "spaced_steps",
    "training_loss",
]

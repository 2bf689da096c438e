"""Schedules, losses and samplers as plain functions."""

from voxtune.diffusion.feature_cache import full_steps, reusing
from voxtune.diffusion.losses import add_noise, noise_loss, training_loss
from voxtune.diffusion.noise import noise_source, normal
from voxtune.diffusion.samplers import SAMPLERS, sampler
from voxtune.diffusion.schedule import DiffusionConfig, Schedule, make_schedule, spaced_steps

__all__ = [
    "SAMPLERS",
    "DiffusionConfig",
    "Schedule",
    "add_noise",
    "full_steps",
    "make_schedule",
    "noise_loss",
    "noise_source",
    "normal",
    "reusing",
    "sampler",
    "spaced_steps",
    "training_loss",
]

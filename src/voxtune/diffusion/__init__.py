"""Schedules, losses and samplers as plain functions."""

from voxtune.diffusion.losses import add_noise, noise_loss, training_loss
from voxtune.diffusion.noise import noise_source, normal
from voxtune.diffusion.samplers import SAMPLERS, sampler
from voxtune.diffusion.schedule import DiffusionConfig, Schedule, make_schedule, spaced_steps

__all__ = [
    "SAMPLERS",
    "DiffusionConfig",
    "Schedule",
    "add_noise",
    "make_schedule",
    "noise_loss",
    "noise_source",
    "normal",
    "sampler",
    "spaced_steps",
    "training_loss",
]

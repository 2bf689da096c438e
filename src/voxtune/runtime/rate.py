"""The learning rate of a step: fixed by its number and the run's length, and by the clock where minutes limit the run."""

from __future__ import annotations

import math

from voxtune.runtime.trainconfig import TrainConfig

# Of the rate, where the decay ends.
LAST_SHARE = 0.01


def learning_rate(config: TrainConfig, step: int, clock: float = 0.0) -> float:
    """The rate of step `step`; the first is 0. `clock` is the share of the run's minutes that is over.

    Up in a straight line over `warmup` steps, times a cosine from 1 to a hundredth over the run, by its steps or by its
    minutes, whichever are further along.
    """
    share = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    if config.decay == "cosine":
        done = min(1.0, max(step / config.steps, clock))
        share *= LAST_SHARE + (1 - LAST_SHARE) * 0.5 * (1 + math.cos(math.pi * done))
    return config.learning_rate * share

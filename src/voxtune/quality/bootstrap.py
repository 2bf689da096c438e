"""A figure with its uncertainty: percentile intervals over volumes drawn anew, with replacement.

A resample is a vector of counts, one a volume. A statistic takes such counts, so that statistics over pairs can leave out
the pairs of a volume with its own copy, which would look like a perfect match.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from voxtune.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """How intervals are made: the same seed draws the same volumes for every figure over a set of the same size."""

    resamples: int = 1000
    seed: int = 0
    level: float = 0.95

    def __post_init__(self) -> None:
        if not 10 <= self.resamples <= 100_000 or self.seed < 0 or not 0.5 <= self.level < 1:
            raise InputError(
                f"bootstrap of {self.resamples} resamples, seed {self.seed}, level {self.level}: resamples are 10 to "
                "100000, the seed 0 or more, the level 0.5 to below 1"
            )


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of a result. `n` says how many volumes or pairs it rests on; without an interval both ends are None."""

    name: str
    value: float
    low: float | None
    high: float | None
    n: int
    interval: str
    level: float
    resamples: int
    seed: int
    better: Literal["higher", "lower", "closer to yardstick", ""] = ""
    unit: str = ""
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """JSON has no infinity: a figure that is not finite is null, and its note says why."""
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in vars(self).items()}


def figure(
    name: str,
    statistic: Callable[..., float],
    sizes: Sequence[int],
    settings: Bootstrap,
    *,
    n: int | None = None,
    centred: bool = False,
    floor: float = -math.inf,
    **facts: Any,
) -> Figure:
    """`statistic(counts_1, counts_2, ...)` of all volumes once, with the interval of sets of `sizes` drawn anew.

    `centred` shifts the interval by the resamples' mean excess over the figure: for statistics whose bias grows with the
    copies in a resample, such as a distance between covariances. `floor` is the least value that there can be.
    """
    value = float(statistic(*(np.ones(size) for size in sizes)))
    n = min(sizes) if n is None else n
    shared: dict[str, Any] = {
        "name": name,
        "value": value,
        "n": n,
        "level": settings.level,
        "seed": settings.seed,
        **facts,
    }
    if min(sizes) < 2:
        return Figure(low=None, high=None, interval="none: one volume", resamples=0, **shared)
    rng = np.random.Generator(np.random.Philox(settings.seed))
    counts = [rng.multinomial(size, np.full(size, 1 / size), size=settings.resamples).astype(float) for size in sizes]
    with np.errstate(invalid="ignore", divide="ignore"):
        draws = np.array([statistic(*row) for row in zip(*counts, strict=True)], dtype=float)
    # A resample of one volume only has no pairs.
    draws = draws[np.isfinite(draws)]
    if len(draws) < settings.resamples / 2 or not math.isfinite(value):
        return Figure(low=None, high=None, interval="none: too few finite resamples", resamples=len(draws), **shared)
    shift = float(draws.mean()) - value if centred else 0.0
    low, high = np.quantile(draws, [(1 - settings.level) / 2, (1 + settings.level) / 2]) - shift
    kind = "percentile bootstrap, centred" if centred else "percentile bootstrap"
    return Figure(
        low=max(floor, float(low)), high=max(floor, float(high)), interval=kind, resamples=len(draws), **shared
    )


def mean_figure(name: str, values: Sequence[float], settings: Bootstrap, **facts: Any) -> Figure:
    """The mean of one value a volume."""
    array = np.asarray(values, dtype=float)
    return figure(name, lambda counts: float(counts @ array / counts.sum()), [len(array)], settings, **facts)

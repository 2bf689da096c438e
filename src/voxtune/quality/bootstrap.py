"""Bootstrap confidence intervals over volumes.

A resample is a vector of counts: how often each volume is taken. A statistic is a function of such counts, so that a
statistic over pairs of volumes can exclude the pairs of a volume with its own copy.

Legend: R resamples, N volumes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from voxtune.errors import InputError

# counts of one set, or of two sets -> value
Statistic = Callable[..., float]


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """Settings of the bootstrap. One seed gives the same resamples for every metric over sets of the same size."""

    resamples: int = 1000
    seed: int = 0
    level: float = 0.95

    def __post_init__(self) -> None:
        if not 10 <= self.resamples <= 100_000 or self.seed < 0 or not 0.5 <= self.level < 1:
            raise InputError(
                f"bootstrap of {self.resamples} resamples, seed {self.seed}, level {self.level}: resamples must be 10 to "
                "100000, the seed >= 0 and the level at least 0.5 and below 1"
            )


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A value and its confidence interval; `low` and `high` are None if too few resamples are finite."""

    value: float
    low: float | None
    high: float | None

    def to_json(self) -> dict[str, float | None]:
        return {k: None if v is None or not math.isfinite(v) else v for k, v in vars(self).items()}


@dataclass(frozen=True, kw_only=True)
class MetricValue:
    """One metric of a result. `n` counts the volumes or pairs behind it; without an interval, both ends are None."""

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
        """JSON has no infinity: a value that is not finite becomes null, and the note gives the reason."""
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in vars(self).items()}


def resample_counts(sizes: Sequence[int], settings: Bootstrap) -> list[np.ndarray]:
    """Counts (R, N) for each set of N volumes, resampled independently of the other sets."""
    rng = np.random.Generator(np.random.Philox(settings.seed))
    return [rng.multinomial(size, np.full(size, 1 / size), size=settings.resamples).astype(float) for size in sizes]


def resample(statistic: Statistic, counts: Sequence[np.ndarray]) -> tuple[float, np.ndarray]:
    """The statistic of all volumes once, and of each resample (R,)."""
    with np.errstate(invalid="ignore", divide="ignore"):
        value = float(statistic(*(np.ones(counts_RN.shape[1]) for counts_RN in counts)))
        resamples_R = np.array([statistic(*row) for row in zip(*counts, strict=True)], dtype=float)
    return value, resamples_R


def interval_of(value: float, resamples_R: np.ndarray, level: float, *, centred: bool = False) -> Interval:
    """The percentile interval. A resample that holds a single volume has no pairs, so values may be NaN: they are ignored.

    `centred` subtracts the bias of the resamples (their mean minus the value), for statistics whose bias grows with the
    copies in a resample, such as a distance between covariances.
    """
    finite = resamples_R[np.isfinite(resamples_R)]
    if len(finite) < max(2, len(resamples_R) / 2) or not math.isfinite(value):
        return Interval(value=value, low=None, high=None)
    bias = float(finite.mean()) - value if centred else 0.0
    low, high = np.quantile(finite, [(1 - level) / 2, (1 + level) / 2]) - bias
    return Interval(value=value, low=float(low), high=float(high))


def mean_statistic(values_N: Sequence[float] | np.ndarray) -> Statistic:
    """counts -> mean of one value per volume; volumes whose value is NaN are ignored."""
    array = np.asarray(values_N, dtype=float)
    present = ~np.isnan(array)
    values = np.where(present, array, 0.0)
    return lambda counts: float(counts @ values / (counts @ present))


def metric_value(
    name: str,
    statistic: Statistic,
    sizes: Sequence[int],
    settings: Bootstrap,
    *,
    n: int | None = None,
    centred: bool = False,
    minimum: float = -math.inf,
    **fields: Any,
) -> MetricValue:
    """`statistic(counts_1, counts_2, ...)` with its interval over independently resampled sets of `sizes` volumes.

    `minimum` is the smallest value that the statistic can have; a centred interval is cut there.
    """
    shared: dict[str, Any] = {
        "name": name,
        "n": min(sizes) if n is None else n,
        "level": settings.level,
        "seed": settings.seed,
        **fields,
    }
    if min(sizes) < 2:
        value = float(statistic(*(np.ones(size) for size in sizes)))
        return MetricValue(value=value, low=None, high=None, interval="none: one volume", resamples=0, **shared)
    value, resamples_R = resample(statistic, resample_counts(sizes, settings))
    finite = int(np.isfinite(resamples_R).sum())
    interval = interval_of(value, resamples_R, settings.level, centred=centred)
    if interval.low is None or interval.high is None:
        kind = "none: too few finite resamples"
        return MetricValue(value=value, low=None, high=None, interval=kind, resamples=finite, **shared)
    return MetricValue(
        value=value,
        low=max(minimum, interval.low),
        high=max(minimum, interval.high),
        interval="percentile bootstrap, centred" if centred else "percentile bootstrap",
        resamples=finite,
        **shared,
    )


def mean_value(name: str, values_N: Sequence[float] | np.ndarray, settings: Bootstrap, **fields: Any) -> MetricValue:
    """The mean of one value per volume."""
    return metric_value(name, mean_statistic(values_N), [len(values_N)], settings, **fields)

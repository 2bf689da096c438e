"""Paired comparison of sets of volumes that were generated for the same subjects: is one non-inferior to another?

Every metric is resampled over subjects, with the same resamples for all sets. The difference between two sets is therefore
resampled subject by subject, and what subjects have in common cancels. A set is non-inferior by a metric if the upper end
of the confidence interval of its worsening lies within a margin. With too few subjects the interval is too wide for that.

The margin of a metric is half of the deviation that the random seed gives to a single volume. The reference is generated
twice; s is the standard error of the difference between the two, and s * sqrt(n / 2) is the deviation of one volume. For
means it does not depend on the number of subjects. Half a deviation is a common estimate of the smallest difference that
matters (Norman et al. 2003). A margin is at least the metric's `min_difference`.

Legend: N subjects, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from voxtune.errors import InputError
from voxtune.quality.bootstrap import Bootstrap, Interval, interval_of, resample, resample_counts
from voxtune.quality.metrics import METRICS, Metric, SetMeasurements, metric_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Resampled:
    """A metric of one set: over all subjects, and over each resample. `target` is what "closer" is closer to."""

    value: float
    resamples_R: np.ndarray
    n: int
    centred: bool = False
    target: float = 0.0
    target_R: np.ndarray | None = None  # where the target is resampled, too

    def interval(self, level: float) -> Interval:
        return interval_of(self.value, self.resamples_R, level, centred=self.centred)

    def badness(self, metric: Metric) -> tuple[float, np.ndarray]:
        """Larger is worse: over all subjects, and over each resample."""
        if metric.better == "closer":
            target_R = self.target if self.target_R is None else self.target_R
            return abs(self.value - self.target), np.abs(self.resamples_R - target_R)
        sign = -1.0 if metric.better == "higher" else 1.0
        return sign * self.value, sign * self.resamples_R


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How much worse than the reference a set is, with its interval, and the margin."""

    worsening: Interval
    margin: float

    @property
    def non_inferior(self) -> bool:
        return self.worsening.high is not None and self.worsening.high <= self.margin

    @property
    def share_of_margin(self) -> float:
        """The upper end of the interval in margins: non-inferior up to 1."""
        high = self.worsening.high
        if high is None:
            return math.inf
        return high / self.margin if self.margin else (0.0 if high <= 0 else math.inf)

    def to_json(self) -> dict[str, Any]:
        return {**self.worsening.to_json(), "margin": self.margin, "not_worse": self.non_inferior}


class Resampler:
    """Computes metrics of sets against the real volumes, over the same resamples of subjects.

    `parameters` holds the parameter of each metric that has one: values by different parameters cannot be compared.
    """

    def __init__(self, real: SetMeasurements, settings: Bootstrap, parameters: Mapping[str, float]):
        if real.count < 2:
            raise InputError(f"{real.count} subjects: at least 2 are required, and 64 for a result")
        [self.counts_RN] = resample_counts([real.count], settings)
        self.real, self.parameters = real, parameters

    def metrics(self, generated: SetMeasurements) -> dict[str, Resampled]:
        """Every metric that the measurements allow, by its full name."""
        return {
            metric.full_name(part): self._resampled(metric, generated, part)
            for metric in METRICS
            for part in generated.parts(metric)
            if generated.get(metric, part) is not None
        }

    def _resampled(self, metric: Metric, generated: SetMeasurements, part: str) -> Resampled:
        values, real = generated.get(metric, part), self.real.get(metric, part)
        value, resamples_R = self._resample(metric, values, real)
        n = generated.count
        if metric.sets == 1 and isinstance(values, np.ndarray):
            n = int((~np.isnan(values)).sum())
        target, target_R = metric.target, None
        if metric.better == "closer" and target is None:
            target, target_R = self._resample(metric, real, real)
        return Resampled(
            value=value,
            resamples_R=resamples_R,
            n=n,
            centred=metric.centred != "never",
            target=target or 0.0,
            target_R=target_R,
        )

    def _resample(self, metric: Metric, values: Any, real: Any) -> tuple[float, np.ndarray]:
        statistic = metric.build(values, real, self.parameters.get(metric.name), paired=True)
        # A subject's real and generated volumes are resampled together.
        return resample(statistic, [self.counts_RN[: metric.max_resamples]] * metric.sets)


def shared_parameters(reference: SetMeasurements, real: SetMeasurements) -> dict[str, float]:
    """The parameters of metrics that have one, estimated from the reference and the real volumes."""
    return {
        metric.name: metric.parameter(reference.get(metric), real.get(metric))
        for metric in METRICS
        if metric.parameter is not None and reference.get(metric) is not None
    }


def margins(
    reference: Mapping[str, Resampled], repeated: Mapping[str, Resampled], factor: float = 1.0
) -> dict[str, float]:
    """The margin of each metric that decides, from two runs of the reference with different seeds."""
    limits = {}
    for name, values in reference.items():
        metric = metric_of(name)
        if metric is None or metric.better is None or not metric.decides:
            continue
        gap = repeated[name].badness(metric)[1] - values.badness(metric)[1]
        gap = gap[np.isfinite(gap)]
        deviation = float(gap.std()) * math.sqrt(values.n / 2) if len(gap) > 1 else 0.0
        limits[name] = max(metric.min_difference, factor * deviation)
    return limits


def compare(
    candidate: Mapping[str, Resampled],
    references: Sequence[Mapping[str, Resampled]],
    limits: Mapping[str, float],
    level: float,
) -> dict[str, Comparison]:
    """Each metric that decides, against the mean of the runs of the reference over the same resamples."""
    comparisons = {}
    for name, margin in limits.items():
        metric = metric_of(name)
        assert metric is not None
        value, badness_R = candidate[name].badness(metric)
        baseline = [reference[name].badness(metric) for reference in references]
        gap = value - sum(b for b, _ in baseline) / len(baseline)
        gap_R = badness_R - sum(b_R for _, b_R in baseline) / len(baseline)
        worsening = interval_of(gap, gap_R, level, centred=candidate[name].centred)
        comparisons[name] = Comparison(worsening=worsening, margin=margin)
    return comparisons

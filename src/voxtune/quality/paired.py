"""Is one set of volumes not worse than another that was drawn for the same subjects?

Every figure is resampled over subjects with the same draws for all sets, so that a difference of two sets is resampled
too, subject by subject: what subjects have in common cancels. "Not worse" is said where the upper end of the interval of
the worsening lies within a margin; where there are too few subjects to say so, it is not said.

The margin of a figure is half of what another seed makes of a single volume's figure: the reference is drawn twice, s is
the standard error of the difference of its two draws, and s * sqrt(n / 2) is the deviation of one volume of one draw. For
means it does not shrink or grow with the number of subjects. Half a deviation is a common measure of the least difference
that matters (Norman et al. 2003). Below the floors in RULES a change means nothing, whatever the seeds say.

Legend: N subjects, R resamples, P pairs of subjects, F features, B bins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from torch import Tensor

from voxtune.errors import InputError
from voxtune.quality.bootstrap import Bootstrap
from voxtune.quality.distributions import (
    fid_statistic,
    jensen_shannon_statistic,
    median_distance,
    mmd_statistic,
    wasserstein_statistic,
)

# Each resample of the Frechet distance takes two eigendecompositions.
FID_RESAMPLES = 200


@dataclass(frozen=True)
class Rule:
    """Which way a figure is better, and the least margin that it is given."""

    better: Literal["higher", "lower", "closer"]
    floor: float = 0.0
    unit: str = ""


# The figures that decide. FID and MMD have no floor: their scale is that of the feature network.
RULES = {
    "dice": Rule("higher", 0.01),
    "fid": Rule("lower"),
    "mmd": Rule("lower"),
    "histogram_w1": Rule("lower", 0.002),
    "histogram_js": Rule("lower", 0.005, "bit"),
    "psnr": Rule("higher", 0.25, "dB"),
    "ms_ssim": Rule("higher", 0.01),
    "diversity": Rule("closer", 0.01),
    "detail": Rule("closer", 0.02),
}


def rule_of(name: str) -> Rule | None:
    """None for a figure that is told but does not decide."""
    return RULES.get("dice" if name.startswith("dice_") else name)


@dataclass(frozen=True, kw_only=True)
class Span:
    """A figure with its interval; without one where too few resamples are finite."""

    value: float
    low: float | None
    high: float | None

    def to_json(self) -> dict[str, float | None]:
        return {k: None if v is None or not math.isfinite(v) else v for k, v in vars(self).items()}


@dataclass(frozen=True, kw_only=True, eq=False)
class Resampled:
    """A figure of one set: over all subjects, and over each resample of them. `aim` is what "closer" means closer to."""

    value: float
    draws_R: np.ndarray
    n: int
    centred: bool = False
    aim: float = 0.0
    aim_R: np.ndarray | None = None  # where the aim itself is resampled

    def span(self, level: float) -> Span:
        return span_of(self.value, self.draws_R, level, self.centred)

    def badness(self, rule: Rule) -> tuple[float, np.ndarray]:
        """Larger is worse: of all subjects, and of each resample."""
        if rule.better == "closer":
            return abs(self.value - self.aim), np.abs(self.draws_R - (self.aim if self.aim_R is None else self.aim_R))
        sign = -1.0 if rule.better == "higher" else 1.0
        return sign * self.value, sign * self.draws_R


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How much worse than the reference, with its interval, and the margin that it is held to."""

    worsening: Span
    margin: float

    @property
    def not_worse(self) -> bool:
        return self.worsening.high is not None and self.worsening.high <= self.margin

    @property
    def of_margin(self) -> float:
        """The interval's upper end in margins: up to 1 is not worse."""
        high = self.worsening.high
        if high is None:
            return math.inf
        return high / self.margin if self.margin else (0.0 if high <= 0 else math.inf)

    def to_json(self) -> dict[str, Any]:
        return {**self.worsening.to_json(), "margin": self.margin, "not_worse": self.not_worse}


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """What is known of each volume of a set, subject by subject. A Dice is NaN where its mask lacks the label."""

    features_NF: Tensor
    histograms_NB: np.ndarray
    detail_N: np.ndarray
    pairs_P: np.ndarray  # MS-SSIM of the chosen pairs
    dice_N: dict[str, np.ndarray] = field(default_factory=dict)
    likeness_N: dict[str, np.ndarray] = field(default_factory=dict)  # psnr, ms_ssim to another volume of the subject


def span_of(value: float, draws_R: np.ndarray, level: float, centred: bool = False) -> Span:
    draws = draws_R[np.isfinite(draws_R)]
    if len(draws) < max(2, len(draws_R) / 2) or not math.isfinite(value):
        return Span(value=value, low=None, high=None)
    shift = float(draws.mean()) - value if centred else 0.0
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2]) - shift
    return Span(value=value, low=float(low), high=float(high))


class Resampler:
    """The figures of sets against the real volumes, all over the same resamples of subjects."""

    def __init__(self, real: Measured, pairs: Sequence[tuple[int, int]], settings: Bootstrap, width: float):
        count = len(real.detail_N)
        if count < 2:
            raise InputError(f"{count} subjects: at least 2 are needed, and 64 for a result")
        rng = np.random.Generator(np.random.Philox(settings.seed))
        self.counts_RN = rng.multinomial(count, np.full(count, 1 / count), size=settings.resamples).astype(float)
        self.real, self.pairs, self.settings, self.width = real, np.asarray(pairs), settings, width

    def figures(self, drawn: Measured) -> dict[str, Resampled]:
        """Every figure of a set; those with a rule decide."""
        real = self.real
        found = {f"dice_{name.replace(' ', '_')}": self._mean(values) for name, values in drawn.dice_N.items()}
        fid = fid_statistic(drawn.features_NF, real.features_NF)
        mmd = mmd_statistic(drawn.features_NF, real.features_NF, self.width)
        w1 = wasserstein_statistic(drawn.histograms_NB, real.histograms_NB)
        js = jensen_shannon_statistic(drawn.histograms_NB, real.histograms_NB)
        # A subject's real and drawn volume are resampled together; copies shift distances between sets, so these are centred.
        found["fid"] = self._resampled(lambda c: fid(c, c), most=FID_RESAMPLES, centred=True)
        found["mmd"] = self._resampled(lambda c: mmd(c, c), centred=True)
        found["histogram_w1"] = self._resampled(lambda c: w1(c, c), centred=True)
        found["histogram_js"] = self._resampled(lambda c: js(c, c), centred=True)
        found |= {name: self._mean(values) for name, values in drawn.likeness_N.items()}
        found["diversity"] = self._diversity(drawn)
        found["detail"] = self._resampled(lambda c: float(c @ drawn.detail_N / (c @ real.detail_N)), aim=1.0)
        return found

    def _mean(self, values_N: np.ndarray) -> Resampled:
        there = ~np.isnan(values_N)
        values = np.where(there, values_N, 0.0)
        return self._resampled(lambda c: float(c @ values / (c @ there)), n=int(there.sum()))

    def _diversity(self, drawn: Measured) -> Resampled:
        first, second = self.pairs.T

        def statistic(values_P: np.ndarray) -> Callable[[np.ndarray], float]:
            return lambda c: float((c[first] * c[second]) @ values_P / (c[first] @ c[second]))

        aim = self._resampled(statistic(self.real.pairs_P))
        return self._resampled(statistic(drawn.pairs_P), aim=aim.value, aim_R=aim.draws_R)

    def _resampled(
        self, statistic: Callable[[np.ndarray], float], *, most: int | None = None, n: int | None = None, **facts: Any
    ) -> Resampled:
        count = self.counts_RN.shape[1]
        with np.errstate(invalid="ignore", divide="ignore"):
            value = float(statistic(np.ones(count)))
            draws = np.array([statistic(row) for row in self.counts_RN[:most]])
        return Resampled(value=value, draws_R=draws, n=count if n is None else n, **facts)


def kernel_width(reference: Measured, real: Measured) -> float:
    """One width of MMD's kernel for all sets: figures by different kernels cannot be compared."""
    return median_distance(reference.features_NF, real.features_NF)


def margins(
    reference: Mapping[str, Resampled], again: Mapping[str, Resampled], factor: float = 1.0
) -> dict[str, float]:
    """The margin of each figure that decides, from two draws of the reference with different seeds."""
    found = {}
    for name, figure in reference.items():
        rule = rule_of(name)
        if rule is None:
            continue
        gap = again[name].badness(rule)[1] - figure.badness(rule)[1]
        gap = gap[np.isfinite(gap)]
        spread = float(gap.std()) * math.sqrt(figure.n / 2) if len(gap) > 1 else 0.0
        found[name] = max(rule.floor, factor * spread)
    return found


def compare(
    candidate: Mapping[str, Resampled],
    references: Sequence[Mapping[str, Resampled]],
    limits: Mapping[str, float],
    level: float,
) -> dict[str, Comparison]:
    """Each figure that decides, against the mean of the reference's draws over the same resamples."""
    found = {}
    for name, margin in limits.items():
        rule = rule_of(name)
        assert rule is not None
        value, draws = candidate[name].badness(rule)
        before = [reference[name].badness(rule) for reference in references]
        gap = value - sum(b for b, _ in before) / len(before)
        gap_R = draws - sum(b_R for _, b_R in before) / len(before)
        worsening = span_of(gap, gap_R, level, candidate[name].centred)
        found[name] = Comparison(worsening=worsening, margin=margin)
    return found

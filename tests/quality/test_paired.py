"""Paired comparisons: cancellation, margins and non-inferiority."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from voxtune.quality.bootstrap import Bootstrap
from voxtune.quality.metrics import PairValues, SetMeasurements
from voxtune.quality.paired import Resampler, compare, margins
from voxtune.quality.per_volume import detail

LEVEL = 0.95


def measured(seed, count=40, shift=0.0, spread=0.05, subjects=None):
    """Measurements whose subjects differ much more than runs do."""
    rng = np.random.default_rng(seed)
    common = np.random.default_rng(99).normal(0.0, 1.0, count)
    own = common + rng.normal(shift, spread, count)
    features = torch.from_numpy(np.stack([own, common, rng.normal(size=count)], axis=1))
    histograms = rng.dirichlet(np.full(256, 50.0), count)
    pairs = np.stack([np.arange(count // 2), np.arange(count // 2) + count // 2], axis=1)
    similarity = rng.uniform(0.4, 0.5, count // 2)
    values = {
        "features": features,
        "histogram": histograms,
        "detail": np.full(count, 1.0) + rng.normal(0, 0.01, count),
        "similarity": PairValues(values_P=similarity, pairs_P2=pairs, count=count),
        "psnr": 20 + own,
        "ms_ssim": 0.5 + own / 100,
    }
    dice = {"brain": np.clip(0.8 + own / 50, 0, 1), "rare": np.where(np.arange(count) < 2, 0.5, np.nan)}
    return SetMeasurements(count=count, values=values, by_part={"dice": dice})


def comparisons(candidate, count=40, factor=1.0):
    resampler = Resampler(measured(1, count), Bootstrap(resamples=300), {"mmd": 1.0})
    first, again = (resampler.metrics(measured(seed, count)) for seed in (2, 3))
    limits = margins(first, again, factor)
    return compare(resampler.metrics(candidate), [first], limits, LEVEL), limits


def test_a_set_is_non_inferior_to_itself_without_any_margin():
    result, _ = comparisons(measured(2), factor=0.0)
    assert all(c.non_inferior and c.worsening.high == 0 for c in result.values())


def test_the_mean_of_two_reference_runs_has_narrower_intervals():
    """A candidate that is one of them lies half their distance from their mean, and of a third the interval is narrower."""
    resampler = Resampler(measured(1, 40), Bootstrap(resamples=300), {"mmd": 1.0})
    first, again, third = (resampler.metrics(measured(seed, 40)) for seed in (2, 3, 4))
    limits = margins(first, again)
    apart = compare(again, [first], limits, LEVEL)["psnr"].worsening.value
    halved = compare(again, [first, again], limits, LEVEL)["psnr"].worsening.value
    assert halved == pytest.approx(apart / 2)

    def width(references):
        span = compare(third, references, limits, LEVEL)["psnr"].worsening
        return span.high - span.low

    # The deviation of a difference of two draws is 1.41 of one's, of a draw and a mean of two 1.22.
    assert width([first, again]) == pytest.approx(width([first]) * math.sqrt(1.5 / 2), rel=0.15)


def test_what_subjects_have_in_common_cancels():
    result, _ = comparisons(measured(4))
    span = result["psnr"].worsening
    # Subjects differ by 1 dB, so that an interval over them alone is 0.6 dB wide; the two draws differ by 0.07 dB.
    assert span.high - span.low < 0.08
    assert result["psnr"].non_inferior


def test_a_shift_within_the_margin_is_non_inferior_and_beyond_it_is_not():
    assert not comparisons(measured(4, shift=-0.4))[0]["psnr"].non_inferior
    assert comparisons(measured(4, shift=-0.1))[0]["psnr"].non_inferior
    assert comparisons(measured(4, shift=0.4))[0]["psnr"].non_inferior
    # Nearly at the margin, the interval extends beyond it.
    assert not comparisons(measured(4, shift=-0.245))[0]["psnr"].non_inferior


def test_margins_do_not_depend_on_the_count_and_have_minima():
    few, many = (comparisons(measured(2, count), count, factor=20.0)[1] for count in (40, 160))
    # Two runs differ by 0.05 dB per volume.
    assert few["psnr"] == pytest.approx(20 * 0.05, rel=0.3)
    assert many["psnr"] == pytest.approx(20 * 0.05, rel=0.15)
    plain = comparisons(measured(2))[1]
    assert few["fid"] == pytest.approx(20 * plain["fid"])
    assert plain["psnr"] == 0.25 and plain["dice_brain"] == 0.01


def test_too_few_finite_resamples_are_not_non_inferior():
    candidate = measured(2)
    candidate.by_part["dice"]["rare"][:] = np.nan
    assert not comparisons(candidate)[0]["dice_rare"].non_inferior


def test_detail_is_less_where_a_volume_is_blurred():
    volume = torch.rand(12, 12, 12, generator=torch.Generator().manual_seed(0))
    inside = torch.ones(12, 12, 12, dtype=torch.bool)
    blurred = torch.nn.functional.avg_pool3d(volume[None, None], 3, 1, 1)[0, 0]
    assert detail(blurred, inside) < detail(volume, inside) / 2
    assert detail(volume, inside) == pytest.approx(1 / 3, rel=0.1)
    assert detail(volume, ~inside) == 0

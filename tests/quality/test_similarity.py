"""PSNR and MS-SSIM: known answers, and agreement with MONAI."""

from __future__ import annotations

import math

import pytest
import torch
from monai.metrics import MultiScaleSSIMMetric, PSNRMetric

from voxtune.errors import InputError
from voxtune.quality.similarity import WEIGHTS, ms_ssim, psnr, scale_weights


def smooth(side=48, seed=0):
    noise = torch.randn(1, 1, side, side, side, generator=torch.Generator().manual_seed(seed))
    x = torch.nn.functional.avg_pool3d(noise, 5, stride=1, padding=2)[0, 0]
    return (x - x.min()) / (x.max() - x.min())


def noisy(x, sd, seed=9):
    return x + sd * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))


def test_psnr_of_a_constant_difference():
    x = smooth()
    assert psnr(x + 0.1, x) == pytest.approx(20.0, abs=1e-4)
    assert psnr(x + 0.1, x, span=10) == pytest.approx(40.0, abs=1e-4)
    assert psnr(x, x) == math.inf


def test_psnr_is_monais():
    x, y = smooth(), smooth(seed=1)
    theirs = PSNRMetric(max_val=1.0)(y[None, None], x[None, None])
    assert psnr(y, x) == pytest.approx(float(theirs), abs=1e-4)


def test_ms_ssim_of_equal_volumes_is_one():
    assert ms_ssim(smooth(), smooth()) == pytest.approx(1.0, abs=1e-6)


def test_ms_ssim_falls_with_noise_and_is_symmetric():
    x = smooth()
    values = [ms_ssim(noisy(x, sd), x) for sd in (0.01, 0.05, 0.2)]
    assert values[0] > values[1] > values[2]
    assert ms_ssim(x, noisy(x, 0.05)) == pytest.approx(values[1], abs=1e-6)
    assert ms_ssim(smooth(seed=3), x) < 0.5


@pytest.mark.parametrize("side", [24, 44, 64])
def test_ms_ssim_is_monais(side):
    # MONAI wants the weights named and, for four scales and more, larger volumes than its own formula needs.
    x, y = smooth(side), noisy(smooth(side), 0.08)
    theirs = MultiScaleSSIMMetric(spatial_dims=3, weights=scale_weights(side))(y[None, None], x[None, None])
    assert ms_ssim(y, x) == pytest.approx(float(theirs), abs=2e-5)


@pytest.mark.parametrize(("side", "scales"), [(11, 1), (21, 1), (22, 2), (64, 3), (128, 4), (176, 5), (512, 5)])
def test_scales_that_fit(side, scales):
    weights = scale_weights(side)
    assert len(weights) == scales
    assert sum(weights) == pytest.approx(1.0)
    assert weights[0] / weights[-1] == pytest.approx(WEIGHTS[0] / WEIGHTS[scales - 1])


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(InputError, match="at least 11"):
        ms_ssim(torch.zeros(10, 16, 16), torch.zeros(10, 16, 16))
    with pytest.raises(InputError, match="equal shape"):
        psnr(torch.zeros(12, 12, 12), torch.zeros(12, 12, 13))

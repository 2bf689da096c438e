"""Distances between sets: closed forms, limits, and agreement with MONAI and SciPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.spatial.distance
import scipy.stats
import torch
from monai.metrics import FIDMetric, MMDMetric

from voxtune.errors import InputError
from voxtune.quality import distributions as d


def normal(n, f, seed, shift=0.0, scale=1.0):
    x = torch.randn(n, f, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x * torch.as_tensor(scale, dtype=torch.float64) + shift


def ones(*sets):
    return [np.ones(len(s)) for s in sets]


def test_frechet_of_known_normals():
    # Commuting covariances: |shift|^2 + sum (sqrt a - sqrt b)^2.
    a, b = torch.tensor([1.0, 4.0, 9.0]), torch.tensor([4.0, 4.0, 1.0])
    mean = torch.tensor([1.0, 0.0, 2.0])
    assert d.frechet_distance(torch.zeros(3), a.diag(), mean, b.diag()) == pytest.approx(5 + 1 + 0 + 4, abs=1e-9)


def test_fid_of_shifted_gaussians():
    x, y = normal(20_000, 4, 0), normal(20_000, 4, 1, shift=0.5, scale=2.0)
    assert d.fid(x, y) == pytest.approx(4 * 0.25 + 4 * 1.0, rel=0.03)
    assert d.fid(x, x) == pytest.approx(0.0, abs=1e-9)


def test_fid_does_not_depend_on_the_axes():
    x, y = normal(60, 6, 0), normal(50, 6, 1, shift=0.3, scale=torch.arange(1, 7))
    turn, _ = torch.linalg.qr(normal(6, 6, 2))
    assert d.fid(x @ turn, y @ turn) == pytest.approx(d.fid(x, y), rel=1e-9)


def test_fid_is_monais():
    x, y = normal(80, 12, 0), normal(70, 12, 1, shift=0.2, scale=1.4)
    assert d.fid(x, y) == pytest.approx(float(FIDMetric()(x, y)), rel=1e-8)


def test_fid_of_singular_covariances_is_finite_and_small_for_equal_sets():
    x = normal(8, 64, 0)
    assert d.fid(x, x) == pytest.approx(0.0, abs=1e-6)
    assert math.isfinite(d.fid(x, normal(5, 64, 1)))


def test_mmd_of_one_distribution_is_near_zero_and_of_another_is_not():
    x, y = normal(400, 8, 0), normal(300, 8, 1)
    assert abs(d.mmd(x, y)) < 0.003
    assert d.mmd(x, y + 1.0) > 0.1
    # The unbiased estimate of equal distributions falls on both sides of 0.
    signs = {d.mmd(normal(30, 4, 2 * i), normal(30, 4, 2 * i + 1)) > 0 for i in range(20)}
    assert signs == {True, False}


def test_mmd_of_known_normals():
    # Gaussian kernel of width w between N(0, I) and N(m, I): 2 c (1 - exp(-|m|^2 / (2 (w^2 + 2)))), c = (w^2/(w^2+2))^(f/2).
    w, f, shift = 2.0, 3, 0.8
    c = (w**2 / (w**2 + 2)) ** (f / 2)
    known = 2 * c * (1 - math.exp(-f * shift**2 / (2 * (w**2 + 2))))
    runs = [d.mmd(normal(300, f, 2 * i), normal(300, f, 2 * i + 1, shift=shift), width=w) for i in range(60)]
    # Unbiased: the mean of runs is the truth, here within its own standard error of 1.5 %.
    assert np.mean(runs) == pytest.approx(known, rel=0.05)


def test_mmd_is_monais_under_its_linear_kernel():
    x, y = normal(20, 5, 0), normal(20, 5, 1, shift=0.5)
    ours = d.mmd_of_kernels(*(k.numpy() for k in (x @ x.T, y @ y.T, x @ y.T)))(*ones(x, y))
    assert ours == pytest.approx(float(MMDMetric()(x[..., None], y[..., None])), rel=1e-9)


def test_copies_in_a_resample_do_not_look_alike():
    x, y = normal(12, 4, 0), normal(12, 4, 1)
    statistic = d.mmd_statistic(x, y, 2.0)
    doubled = np.repeat([2.0, 0.0], 6)
    assert statistic(doubled, doubled) == pytest.approx(d.mmd(x[:6], y[:6], 2.0), rel=1e-9)


def test_wasserstein_of_a_shift_is_the_shift():
    a, b = torch.rand(64, 64) * 0.5, torch.rand(64, 64) * 0.5 + 0.25
    ha, hb = d.histogram(a)[None], d.histogram(b)[None]
    ours = d.wasserstein_statistic(ha, hb)(*ones(ha, hb))
    assert ours == pytest.approx(0.25, abs=0.01)
    assert ours == pytest.approx(scipy.stats.wasserstein_distance(a.ravel(), b.ravel()), abs=1 / 256)


def test_jensen_shannon_is_scipys_and_has_its_limits():
    p, q = (np.random.default_rng(s).dirichlet(np.ones(256))[None] for s in (0, 1))
    ours = d.jensen_shannon_statistic(p, q)(*ones(p, q))
    assert ours == pytest.approx(scipy.spatial.distance.jensenshannon(p[0], q[0], base=2) ** 2, rel=1e-9)
    low, high = d.histogram(torch.zeros(8))[None], d.histogram(torch.ones(8))[None]
    assert d.jensen_shannon_statistic(low, high)(*ones(low, high)) == pytest.approx(1.0)
    assert d.jensen_shannon_statistic(low, low)(*ones(low, low)) == 0.0


def test_sets_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match="equal F"):
        d.fid(normal(4, 3, 0), normal(4, 2, 0))
    with pytest.raises(InputError, match="at least 2"):
        d.mmd(normal(1, 3, 0), normal(4, 3, 0), 1.0)

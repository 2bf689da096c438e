"""Distances between two sets of volumes: Frechet distance, maximum mean discrepancy, intensity histograms.

Legend: N volumes of one set, F features, B bins. `counts`: how often each volume is taken (bootstrap.py).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from voxtune.errors import InputError

BINS = 256

Statistic = Callable[[np.ndarray, np.ndarray], float]


def frechet_distance(mean_a: Tensor, cov_a: Tensor, mean_b: Tensor, cov_b: Tensor) -> float:
    """|mean_a - mean_b|^2 + tr(A + B - 2 (A B)^(1/2)) of two normal distributions, in float64.

    tr (A B)^(1/2) is the sum of the square roots of the eigenvalues of A^(1/2) B A^(1/2). That matrix is symmetric, so its
    eigenvalues are real, and negative rounding errors can be set to 0. The matrix root of A B fails for singular covariances.
    """
    mean_a, cov_a, mean_b, cov_b = (t.double() for t in (mean_a, cov_a, mean_b, cov_b))
    values, vectors = torch.linalg.eigh(cov_a)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    product = root @ cov_b @ root
    overlap = torch.linalg.eigvalsh((product + product.T) / 2).clamp(min=0).sqrt().sum()
    distance = (mean_a - mean_b).square().sum() + cov_a.trace() + cov_b.trace() - 2 * overlap
    return max(0.0, float(distance))


def fid_statistic(a_NF: Tensor, b_NF: Tensor) -> Statistic:
    """(counts, counts) -> Frechet distance of the features, with covariances divided by n - 1."""
    _check_features(a_NF, b_NF, least=2)

    def statistic(counts_a: np.ndarray, counts_b: np.ndarray) -> float:
        return frechet_distance(*_moments(a_NF.double(), counts_a), *_moments(b_NF.double(), counts_b))

    return statistic


def fid(a_NF: Tensor, b_NF: Tensor) -> float:
    """The Frechet distance of two sets of features."""
    return fid_statistic(a_NF, b_NF)(np.ones(len(a_NF)), np.ones(len(b_NF)))


def _moments(features_NF: Tensor, counts: np.ndarray) -> tuple[Tensor, Tensor]:
    weights = torch.from_numpy(counts).to(features_NF)
    mean = weights @ features_NF / weights.sum()
    away = features_NF - mean
    return mean, (away * weights[:, None]).T @ away / (weights.sum() - 1)


def median_distance(a_NF: Tensor, b_NF: Tensor) -> float:
    """The median distance between two volumes of the union of both sets: the width of the kernel."""
    both = torch.cat([a_NF, b_NF]).double()
    return float(torch.pdist(both).median())


def mmd_statistic(a_NF: Tensor, b_NF: Tensor, width: float) -> Statistic:
    """(counts, counts) -> squared MMD under the Gaussian kernel exp(-d^2 / (2 width^2)), the unbiased estimate.

    Gretton et al. 2012, lemma 6: mean k(a, a') + mean k(b, b') - 2 mean k(a, b) over different volumes. It may be
    negative for similar sets.
    """
    _check_features(a_NF, b_NF, least=2)
    kernels = [_gaussian(x.double(), y.double(), width).numpy() for x, y in ((a_NF, a_NF), (b_NF, b_NF), (a_NF, b_NF))]
    return mmd_of_kernels(*kernels)


def mmd_of_kernels(within_a: np.ndarray, within_b: np.ndarray, between: np.ndarray) -> Statistic:
    """The unbiased squared MMD from the values of any kernel."""

    def statistic(counts_a: np.ndarray, counts_b: np.ndarray) -> float:
        mixed = counts_a @ between @ counts_b / (counts_a.sum() * counts_b.sum())
        return mean_over_pairs(within_a, counts_a) + mean_over_pairs(within_b, counts_b) - 2 * float(mixed)

    return statistic


def mean_over_pairs(values_NN: np.ndarray, counts: np.ndarray, known_NN: np.ndarray | None = None) -> float:
    """The mean over `known` pairs of different volumes; NaN if there are none."""
    weights = np.outer(counts, counts)
    np.fill_diagonal(weights, 0.0)
    if known_NN is not None:
        weights = weights * known_NN
    total = weights.sum()
    return float((weights * values_NN).sum() / total) if total else float("nan")


def mmd(a_NF: Tensor, b_NF: Tensor, width: float | None = None) -> float:
    """The unbiased squared MMD; the default width is the median distance."""
    width = median_distance(a_NF, b_NF) if width is None else width
    return mmd_statistic(a_NF, b_NF, width)(np.ones(len(a_NF)), np.ones(len(b_NF)))


def _gaussian(x_NF: Tensor, y_NF: Tensor, width: float) -> Tensor:
    # Identical volumes have width 0; any other value gives the same result.
    return torch.exp(
        -torch.cdist(x_NF, y_NF, compute_mode="donot_use_mm_for_euclid_dist").square() / (2 * (width or 1) ** 2)
    )


def histogram(volume: Tensor, low: float = 0.0, high: float = 1.0) -> np.ndarray:
    """The share of voxels in each of 256 equal bins; values outside count in the first and last bin."""
    counts = torch.histc(volume.float().clamp(low, high), BINS, low, high).double().numpy()
    return np.asarray(counts / counts.sum())


def wasserstein_statistic(a_NB: np.ndarray, b_NB: np.ndarray, span: float = 1.0) -> Statistic:
    """(counts, counts) -> Wasserstein-1 distance of the pooled intensities: the area between the cumulative distributions."""

    def statistic(counts_a: np.ndarray, counts_b: np.ndarray) -> float:
        gap = counts_a @ a_NB / counts_a.sum() - counts_b @ b_NB / counts_b.sum()
        return float(np.abs(np.cumsum(gap)).sum() * span / a_NB.shape[1])

    return statistic


def jensen_shannon_statistic(a_NB: np.ndarray, b_NB: np.ndarray) -> Statistic:
    """(counts, counts) -> Jensen-Shannon divergence of the pooled intensities in bits: 0 equal, 1 disjoint."""

    def statistic(counts_a: np.ndarray, counts_b: np.ndarray) -> float:
        p, q = counts_a @ a_NB / counts_a.sum(), counts_b @ b_NB / counts_b.sum()
        middle = (p + q) / 2
        return max(0.0, (_relative_entropy(p, middle) + _relative_entropy(q, middle)) / 2)

    return statistic


def _relative_entropy(p: np.ndarray, q: np.ndarray) -> float:
    positive = p > 0
    return float((p[positive] * np.log2(p[positive] / q[positive])).sum())


def _check_features(a_NF: Tensor, b_NF: Tensor, least: int) -> None:
    if a_NF.dim() != 2 or b_NF.dim() != 2 or a_NF.shape[1] != b_NF.shape[1]:
        raise InputError(f"features of shape {tuple(a_NF.shape)} and {tuple(b_NF.shape)}: expected (N, F) with equal F")
    if min(len(a_NF), len(b_NF)) < least:
        raise InputError(f"sets of {len(a_NF)} and {len(b_NF)} volumes: at least {least} of each are required")

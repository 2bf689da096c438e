"""Contrast of tissues and of lesions in single volumes, and how well a segmenter finds lesions of each size.

Tissues are separated by intensity: a mixture of three normal distributions is fitted to the histogram of the healthy
voxels, fluid with its own spread, grey and white matter with a common one. A volume in which grey and white matter have the
same intensity gets a contrast near 0, which separate spreads would not give.

Legend: B bins, K = 3 tissues (fluid, grey, white), V voxels of lesions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

BINS = 256
ITERATIONS = 400
# Image kinds in which fluid is the brightest tissue.
BRIGHT_FLUID = frozenset({"T2w", "T2starw", "ADC"})
# Sizes of lesions in ml: name -> (at least, below).
SIZES: dict[str, tuple[float, float]] = {
    "under_1_ml": (0.0, 1.0),
    "1_to_5_ml": (1.0, 5.0),
    "5_to_20_ml": (5.0, 20.0),
    "over_20_ml": (20.0, math.inf),
}
# A lesion is detected if at least this share of its voxels is found.
DETECTED = 0.1
# The surroundings of a lesion, in voxels.
SHELL = 2


@dataclass(frozen=True, kw_only=True)
class TissueFit:
    """Mean intensity and share of fluid, grey and white matter; `spread` is the standard deviation of the last two."""

    means: tuple[float, float, float]
    shares: tuple[float, float, float]
    spread: float

    @property
    def contrast(self) -> float:
        """The difference of white and grey matter in units of their spread."""
        return abs(self.means[2] - self.means[1]) / self.spread if self.spread else 0.0


def fit_tissues(image: Tensor, healthy: Tensor, *, bright_fluid: bool = False) -> TissueFit | None:
    """Fits the three tissues to the intensities of the healthy voxels; None if these are too few.

    Equal intensities have no contrast, and their shares are unknown.
    """
    values = image[healthy].float()
    if len(values) < 3 * BINS // 2:
        return None
    ordered = values.sort().values
    low, high = (float(ordered[int(q * (len(ordered) - 1))]) for q in (0.001, 0.999))
    if not high > low:
        return TissueFit(means=(low, low, low), shares=(math.nan,) * 3, spread=0.0)
    counts = torch.histc(values.clamp(low, high), BINS, low, high).double().cpu().numpy()
    centres = (np.arange(BINS) + 0.5) / BINS
    if bright_fluid:  # fluid is fitted as the darkest tissue
        counts = counts[::-1]
    means_K, shares_K, spread = _mixture(counts / counts.sum(), centres)
    span = high - low
    intensities = high - means_K * span if bright_fluid else low + means_K * span
    return TissueFit(
        means=(float(intensities[0]), float(intensities[1]), float(intensities[2])),
        shares=(float(shares_K[0]), float(shares_K[1]), float(shares_K[2])),
        spread=spread * span,
    )


def _mixture(weights_B: np.ndarray, centres_B: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Means, shares and common spread of grey and white matter, by expectation maximisation from quantiles."""
    cumulative = np.cumsum(weights_B)
    means_K = np.array([centres_B[np.searchsorted(cumulative, q)] for q in (0.05, 0.35, 0.8)])
    shares_K = np.array([0.15, 0.45, 0.4])
    least = 1.0 / BINS**2
    variances_K = np.full(3, max(least, float(weights_B @ (centres_B - weights_B @ centres_B) ** 2) / 16))
    for _ in range(ITERATIONS):
        away_BK = (centres_B[:, None] - means_K) ** 2
        logs_BK = np.log(np.maximum(shares_K, 1e-12)) - 0.5 * (np.log(variances_K) + away_BK / variances_K)
        posterior_BK = np.exp(logs_BK - logs_BK.max(axis=1, keepdims=True))
        posterior_BK *= (weights_B / posterior_BK.sum(axis=1))[:, None]
        before, shares_K = means_K, posterior_BK.sum(axis=0)
        means_K = (centres_B @ posterior_BK) / np.maximum(shares_K, 1e-12)
        squared_K = (posterior_BK * (centres_B[:, None] - means_K) ** 2).sum(axis=0)
        fluid = squared_K[0] / max(shares_K[0], 1e-12)
        common = squared_K[1:].sum() / max(float(shares_K[1:].sum()), 1e-12)
        # Fluid shares its voxels with grey matter at the edges; a wider distribution would take up grey matter itself.
        variances_K = np.maximum([min(fluid, 4 * common), common, common], least)
        if np.abs(means_K - before).max() < 1e-6:
            break
    return means_K, shares_K, math.sqrt(variances_K[1])


def lesion_contrast(image: Tensor, lesion: Tensor, healthy: Tensor) -> float:
    """The mean of the lesion minus that of the healthy voxels around it, in units of their pooled spread; NaN without both."""
    grown = F.max_pool3d(lesion.float()[None, None], 2 * SHELL + 1, stride=1, padding=SHELL)[0, 0] > 0
    inside, around = image[lesion].double(), image[grown & healthy].double()
    if min(len(inside), len(around)) < 2:
        return math.nan
    pooled = float(((inside.var(unbiased=False) + around.var(unbiased=False)) / 2).sqrt())
    return float(inside.mean() - around.mean()) / pooled if pooled else math.nan


@dataclass(frozen=True, kw_only=True)
class LesionScore:
    """One lesion of a mask: its volume, the Dice with what was predicted at its place, and whether it was detected."""

    ml: float
    dice: float
    detected: bool


def lesion_scores(lesion: Tensor, predicted: Tensor, voxel_ml: float) -> list[LesionScore]:
    """Scores of each connected lesion. What is predicted at its place are the connected predictions that touch it."""
    truth, guess = components(lesion), components(predicted)
    sizes = np.bincount(guess.ravel())
    scores = []
    for number in range(1, int(truth.max(initial=0)) + 1):
        at = guess[truth == number]
        touching = np.unique(at[at > 0])
        common, total = int((at > 0).sum()), len(at)
        dice = 2 * common / (total + int(sizes[touching].sum()))
        scores.append(LesionScore(ml=total * voxel_ml, dice=dice, detected=common >= DETECTED * total))
    return scores


def by_size(scores: list[LesionScore], value: str) -> dict[str, float]:
    """The mean of `value` over the lesions of each size; NaN where there are none."""
    result = {}
    for name, (least, below) in SIZES.items():
        chosen = [float(getattr(score, value)) for score in scores if least <= score.ml < below]
        result[name] = sum(chosen) / len(chosen) if chosen else math.nan
    return result


def components(mask: Tensor) -> np.ndarray:
    """The connected parts of a mask, numbered from 1; voxels that share a corner are connected."""
    inside = np.pad(mask.cpu().numpy().astype(bool), 1)
    where_V = np.flatnonzero(inside)
    numbers = np.zeros(inside.size, dtype=np.int64)
    numbers[where_V] = np.arange(1, len(where_V) + 1)
    strides = np.array([inside.shape[1] * inside.shape[2], inside.shape[2], 1])
    steps = np.stack(np.meshgrid(*[[-1, 0, 1]] * 3, indexing="ij"), axis=-1).reshape(27, 3) @ strides
    neighbours = [numbers[where_V + step] for step in steps[:13]]
    edges = np.concatenate([np.stack([numbers[where_V], n])[:, n > 0] for n in neighbours], axis=1)
    label = np.arange(len(where_V) + 1)
    while True:
        # Each voxel takes the smallest number of its neighbours, then that of the voxel with this number, and so on.
        smallest = label.copy()
        np.minimum.at(smallest, edges[0], label[edges[1]])
        np.minimum.at(smallest, edges[1], label[edges[0]])
        for _ in range(4):
            smallest = smallest[smallest]
        if (smallest == label).all():
            break
        label = smallest
    parts = np.zeros(inside.size, dtype=np.int64)
    parts[where_V] = np.unique(label[1:], return_inverse=True)[1] + 1
    return parts.reshape(inside.shape)[1:-1, 1:-1, 1:-1]

"""Similarity of two volumes: PSNR and multi-scale SSIM in three dimensions.

Legend: volumes (D, H, W) or batches of them (..., D, H, W), with an intensity range of `span`.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from voxtune.errors import InputError

# Wang, Simoncelli and Bovik 2003: an 11-wide Gaussian window of 1.5 voxels, and the weight of each scale.
WINDOW, SIGMA = 11, 1.5
WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)
K1, K2 = 0.01, 0.03


def psnr(a: Tensor, b: Tensor, span: float = 1.0) -> float:
    """20 log10(span / RMS difference) in dB; infinite for equal volumes."""
    _check(a, b)
    mean_square = float((a.double() - b.double()).square().mean())
    return math.inf if mean_square == 0 else 10 * math.log10(span**2 / mean_square)


def ms_ssim(a: Tensor, b: Tensor, span: float = 1.0) -> float:
    """1 for equal volumes, about 0 for unrelated ones.

    The product over scales of the mean contrast-structure term, to the power of the scale's weight, with the luminance
    term at the last scale. Windows lie inside the volume. A volume too small for five scales uses as many as the window
    fits, with weights normalised to sum to 1.
    """
    _check(a, b)
    weights = scale_weights(min(a.shape[-3:]))
    x, y = a.float(), b.float()
    result = 1.0
    for scale, weight in enumerate(weights):
        full, contrast = _ssim_terms(x, y, span)
        last = scale == len(weights) - 1
        result *= max(0.0, float((full if last else contrast).mean())) ** weight
        if not last:
            x, y = (F.avg_pool3d(v[None, None], 2)[0, 0] for v in (x, y))
    return result


def scale_weights(size: int) -> tuple[float, ...]:
    """The weights of the scales that fit a volume whose smallest dimension is `size`."""
    if size < WINDOW:
        raise InputError(f"MS-SSIM requires at least {WINDOW} voxels in each dimension, got {size}")
    scales = min(len(WEIGHTS), 1 + int(math.log2(size / WINDOW)))
    total = sum(WEIGHTS[:scales])
    return tuple(w / total for w in WEIGHTS[:scales])


def _ssim_terms(x: Tensor, y: Tensor, span: float) -> tuple[Tensor, Tensor]:
    """SSIM and its contrast-structure part at every window."""
    c1, c2 = (K1 * span) ** 2, (K2 * span) ** 2
    mean_x, mean_y, mean_xx, mean_yy, mean_xy = _windowed(torch.stack([x, y, x * x, y * y, x * y]))
    variance_x, variance_y = mean_xx - mean_x**2, mean_yy - mean_y**2
    contrast = (2 * (mean_xy - mean_x * mean_y) + c2) / (variance_x + variance_y + c2)
    return (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1) * contrast, contrast


def _windowed(maps_NDHW: Tensor) -> Tensor:
    """Gaussian means of every window inside the volume, one axis at a time, as products with banded matrices."""
    for axis in (1, 2, 3):
        band = _band(maps_NDHW.shape[axis]).to(maps_NDHW)
        maps_NDHW = torch.tensordot(maps_NDHW, band, dims=([axis], [1])).movedim(-1, axis)
    return maps_NDHW


@lru_cache(maxsize=32)
def _band(size: int) -> Tensor:
    """(size - 10, size): row i holds the window that starts at voxel i."""
    offsets = torch.arange(WINDOW, dtype=torch.float64) - (WINDOW - 1) / 2
    window = torch.exp(-offsets.square() / (2 * SIGMA**2))
    window /= window.sum()
    band = torch.zeros(size - WINDOW + 1, size, dtype=torch.float64)
    for row in range(len(band)):
        band[row, row : row + WINDOW] = window
    return band


def _check(a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape or a.dim() != 3:
        raise InputError(
            f"volumes of shape {tuple(a.shape)} and {tuple(b.shape)}: expected two volumes (D, H, W) of equal shape"
        )

"""Fine detail: how much neighbouring voxels differ. A blurred volume has less of it, and PSNR rewards blur."""

from __future__ import annotations

import torch
from torch import Tensor


def detail(volume: Tensor, inside: Tensor) -> float:
    """The mean |difference| of neighbouring voxels that both lie inside; 0 where none do."""
    total, count = volume.new_zeros((), dtype=torch.float64), 0
    for axis, side in enumerate(volume.shape):
        both = inside.narrow(axis, 1, side - 1) & inside.narrow(axis, 0, side - 1)
        total += (volume.diff(dim=axis).abs() * both).sum(dtype=torch.float64)
        count += int(both.sum())
    return float(total) / max(1, count)

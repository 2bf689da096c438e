"""Subjects whose masks do not determine their images, so that the trajectories of sampling are curved."""

from __future__ import annotations

import numpy as np


class Fields:
    """Smooth fields with random signs inside of an ellipsoid, and a second label that brightens them."""

    def __init__(self, count: int = 64, side: int = 4):
        self.count, self.side = count, side

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(index)
        axes = np.meshgrid(*[np.linspace(-1, 1, self.side)] * 3, indexing="ij")
        slopes, level, place = rng.normal(size=3), rng.normal(), rng.uniform(-0.5, 0.5)
        inside = sum(axis**2 for axis in axes) < 1.2
        lesion = np.abs(axes[0] - place) < 0.4
        field = sum(slope * axis for slope, axis in zip(slopes, axes, strict=True)) + 0.7 * level
        image = np.tanh(3 * field) * np.where(inside, 0.8, 0.2) + 0.1 * lesion
        mask = np.where(np.stack([inside, lesion]), 1.0, -1.0)
        return image[None].clip(-1, 1).astype(np.float32), mask.astype(np.float32)

"""Memorisation: how near the nearest training volume lies, and how near it lies to volumes that nothing was trained on.

Legend: N volumes asked about, M training volumes, F features or voxels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Nearest:
    """For each volume asked about: the nearest training volume's number and its distance."""

    index: tuple[int, ...]
    distance: tuple[float, ...]


def nearest(asked_NF: Tensor, training_MF: Tensor, *, skip: Sequence[int | None] | None = None) -> Nearest:
    """By RMS difference over F. `skip[i]` names the training volume that is volume i itself, where there is one."""
    indices, distances = [], []
    for row, vector in enumerate(asked_NF):
        gap = (training_MF - vector).square().mean(dim=1, dtype=torch.float64).sqrt()
        itself = None if skip is None else skip[row]
        if itself is not None:
            gap[itself] = float("inf")
        indices.append(int(gap.argmin()))
        distances.append(float(gap.min()))
    return Nearest(index=tuple(indices), distance=tuple(distances))


def copies(distances: Sequence[float], yardstick: Sequence[float]) -> list[float]:
    """1 for each distance below half the least of the yardstick, else 0: far nearer to training than any unseen volume."""
    return [float(distance < min(yardstick) / 2) for distance in distances]

"""Measurements of single volumes: Dice of labels, detail, and the nearest training volume."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


def dice(mask: Tensor, predicted: Tensor, values: Sequence[int]) -> float | None:
    """2 |A and B| / (|A| + |B|) of one label, a set of values; None if the mask does not contain it."""
    a, b = (torch.isin(labels, torch.tensor(values, device=labels.device)) for labels in (mask, predicted))
    size = int(a.sum())
    return 2 * int((a & b).sum()) / (size + int(b.sum())) if size else None


def dice_by_label(pairs: Iterable[tuple[Tensor, Tensor]], values: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """Dice by label name over (mask, predicted) pairs; NaN if a mask lacks the label. Labels that no mask has are omitted."""
    scores: dict[str, list[float]] = {name: [] for name in values}
    for mask, predicted in pairs:
        for name, members in values.items():
            score = dice(mask, predicted, members)
            scores[name].append(np.nan if score is None else score)
    return {name: np.array(column) for name, column in scores.items() if not np.isnan(column).all()}


def detail(volume: Tensor, inside: Tensor) -> float:
    """The mean absolute difference of neighbouring voxels that are both inside; 0 if there are none."""
    total, count = volume.new_zeros((), dtype=torch.float64), 0
    for axis, side in enumerate(volume.shape):
        both = inside.narrow(axis, 1, side - 1) & inside.narrow(axis, 0, side - 1)
        total += (volume.diff(dim=axis).abs() * both).sum(dtype=torch.float64)
        count += int(both.sum())
    return float(total) / max(1, count)


@dataclass(frozen=True, kw_only=True)
class Nearest:
    """For each volume, the index of the nearest training volume and its distance."""

    index: tuple[int, ...]
    distance: tuple[float, ...]


def nearest(volumes_NF: Tensor, training_MF: Tensor, *, skip: Sequence[int | None] | None = None) -> Nearest:
    """By RMS difference over F. `skip[i]` is the index of volume i in the training set, or None."""
    indices, distances = [], []
    for row, vector in enumerate(volumes_NF):
        gap = (training_MF - vector).square().mean(dim=1, dtype=torch.float64).sqrt()
        itself = None if skip is None else skip[row]
        if itself is not None:
            gap[itself] = float("inf")
        indices.append(int(gap.argmin()))
        distances.append(float(gap.min()))
    return Nearest(index=tuple(indices), distance=tuple(distances))


def copies(distances: Sequence[float], yardstick: Sequence[float]) -> list[float]:
    """1 for each distance below half the smallest distance of an unseen volume (`yardstick`), else 0."""
    return [float(distance < min(yardstick) / 2) for distance in distances]

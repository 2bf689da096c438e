"""Mask adherence: how well what was drawn lies where it was asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


def dice(asked: Tensor, found: Tensor, value: int) -> float | None:
    """2 |A and B| / (|A| + |B|) of one label; None where it was not asked for, which says nothing of adherence."""
    a, b = asked == value, found == value
    wanted = int(a.sum())
    return 2 * int((a & b).sum()) / (wanted + int(b.sum())) if wanted else None


def dice_by_label(pairs: Iterable[tuple[Tensor, Tensor]], values: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Dice of each named label over (asked, found) pairs: NaN where it was not asked for; left out where it never was."""
    scores: dict[str, list[float]] = {name: [] for name in values}
    for asked, found in pairs:
        for name, value in values.items():
            score = dice(asked, found, value)
            scores[name].append(np.nan if score is None else score)
    return {name: np.array(of) for name, of in scores.items() if not np.isnan(of).all()}


def detail(volume: Tensor, inside: Tensor) -> float:
    """The mean |difference| of neighbouring voxels that both lie inside; 0 where none do."""
    total, count = volume.new_zeros((), dtype=torch.float64), 0
    for axis, side in enumerate(volume.shape):
        both = inside.narrow(axis, 1, side - 1) & inside.narrow(axis, 0, side - 1)
        total += (volume.diff(dim=axis).abs() * both).sum(dtype=torch.float64)
        count += int(both.sum())
    return float(total) / max(1, count)


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

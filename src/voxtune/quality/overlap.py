"""Mask adherence: how well what was drawn lies where it was asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
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

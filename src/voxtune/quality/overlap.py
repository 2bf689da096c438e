"""Mask adherence: how well what was drawn lies where it was asked for."""

from __future__ import annotations

from torch import Tensor


def dice(asked: Tensor, found: Tensor, value: int) -> float | None:
    """2 |A and B| / (|A| + |B|) of one label; None where it was not asked for, which says nothing of adherence."""
    a, b = asked == value, found == value
    wanted = int(a.sum())
    return 2 * int((a & b).sum()) / (wanted + int(b.sum())) if wanted else None

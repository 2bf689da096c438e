"""The difference between two tensors: the metrics that a gate decides by."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Difference:
    """`relative` is |x - r| / |r| (2-norms); `psnr` is in dB over the reference's range; `worst` is the largest |x - r|.

    The difference of a candidate that contains NaN or infinity is infinite.
    """

    relative: float
    psnr: float
    worst: float

    def describe(self) -> dict[str, float]:
        return asdict(self)


def difference(candidate: Tensor, reference: Tensor) -> Difference:
    if candidate.shape != reference.shape:
        raise ValueError(f"shapes {tuple(candidate.shape)} and {tuple(reference.shape)} differ")
    r = reference.detach().double()
    x = candidate.detach().to(r.device).double()
    if not bool(torch.isfinite(x).all()):
        return Difference(math.inf, -math.inf, math.inf)
    gap = x - r
    norm, size = float(gap.norm()), float(r.norm())
    span = float(r.max() - r.min()) if r.numel() else 0.0
    rms = norm / math.sqrt(max(1, r.numel()))
    psnr = math.inf if rms == 0 else 20 * math.log10(span / rms) if span else -math.inf
    return Difference(
        norm / size if size else (0.0 if norm == 0 else math.inf), psnr, float(gap.abs().max()) if r.numel() else 0.0
    )

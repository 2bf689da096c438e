"""Packs the weights of the 2D network's convolutions into the layout of voxtune_conv.

Legend: K output channels, C input channels, i j taps, KP padded output channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class PackedConv:
    weight: Tensor  # (taps * C padded, KP)
    shift: Tensor  # (9, KP) float32 after a norm, else (KP,)
    slope: Tensor | None  # (9, KP) float32
    channels: int
    out_channels: int
    side: int
    residual: Tensor | None = None  # (C2 padded, KP)


def pack_conv(
    weight_KCij: Tensor,
    bias_K: Tensor,
    *,
    norm: tuple[Tensor, Tensor] | None = None,
    residual: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype,
    block_c: int,
    block_k: int,
) -> PackedConv:
    """`norm`: weight and bias of the preceding norm. `residual`: weight and bias of the 1x1 convolution that is added."""
    K, C, side, _ = weight_KCij.shape
    wide = weight_KCij.detach().double()
    shift = bias_K.detach().double()
    slope = None
    scaled = wide if norm is None else wide * norm[0].detach().double()[None, :, None, None]
    if residual is not None:
        shift = shift + residual[1].detach().double()
    if norm is not None:
        # Sums of the rounded weights, so that a constant image cancels exactly.
        slope = cases(scaled.to(dtype).double().sum(1))
        shift = shift + cases((wide * norm[1].detach().double()[None, :, None, None]).sum(1))

    def columns(x: Tensor) -> Tensor:
        return F.pad(x, (0, -K % block_k)).float().contiguous()

    rows = scaled.permute(2, 3, 1, 0).reshape(side * side * C, K)
    return PackedConv(
        weight=_padded(rows, block_c, block_k).to(dtype),
        shift=columns(shift),
        slope=None if slope is None else columns(slope),
        channels=C,
        out_channels=K,
        side=side,
        residual=None
        if residual is None
        else _padded(residual[0].detach().double().flatten(1).t(), block_c, block_k).to(dtype),
    )


def unshuffled(weight_K4C11: Tensor) -> Tensor:
    """The 2x2 weight on x that equals a 1x1 weight on pixel_unshuffle(x, 2), whose channels are c * 4 + i * 2 + j."""
    K, C4 = weight_K4C11.shape[:2]
    return weight_K4C11.reshape(K, C4 // 4, 2, 2)


def cases(taps_Kij: Tensor) -> Tensor:
    """(9, K): sums over the 3x3 taps inside the image, for (top, middle, bottom) x (left, middle, right); or of one tap."""
    inside = (slice(1, 3), slice(0, 3), slice(0, 2)) if taps_Kij.shape[-1] == 3 else (slice(0, 1),) * 3
    return torch.stack([taps_Kij[:, ys, xs].sum((1, 2)) for ys in inside for xs in inside])


def _padded(rows: Tensor, block_c: int, block_k: int) -> Tensor:
    return F.pad(rows, (0, -rows.shape[1] % block_k, 0, -rows.shape[0] % block_c)).contiguous()

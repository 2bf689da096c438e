"""Depthwise 7x7 convolution + time term, and the sums for the norm that follows.

Why: 49 products a value are no work for the matrix units, and a general convolution kernel runs them one channel at a time. Here
a program takes a tile of pixels and channels; the taps' loads overlap in the L1. The convolution's bias and the block's time term
are one vector a step, made ahead for all steps.

Legend: N batch, H W pixels of a sample, C channels, P tiles of a sample.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from voxtune.kernels.convnext.common import leave_sums, release, wait

SIDE = 7


def pack_depthwise(weight: Tensor, dtype) -> Tensor:
    """A depthwise weight (C, 1, 7, 7) as (49, C)."""
    return weight.detach().flatten(1).t().contiguous().to(dtype)


def depthwise_reference(x_NCHW: Tensor, weight: Tensor, term_C: Tensor) -> Tensor:
    """The same in plain PyTorch; `term_C` is bias + time term."""
    return F.conv2d(x_NCHW, weight, term_C, padding=SIDE // 2, groups=weight.shape[0])


@triton.jit
def depthwise_tile(
    pid,
    x_ptr,  # (N, H, W, C), rows of LDX
    w_ptr,  # (49, C)
    term_ptr,  # (C,) float32
    y_ptr,  # (N, H, W, C), dense
    sums_ptr,  # (N, 2, P) float32
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    LDX: tl.constexpr,
    BLOCK_P: tl.constexpr,  # pixels of a tile
    BLOCK_C: tl.constexpr,
):
    TILES_C: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    TILES: tl.constexpr = (H * W // BLOCK_P) * TILES_C
    n, tile = pid // TILES, pid % TILES
    c = (tile % TILES_C) * BLOCK_C + tl.arange(0, BLOCK_C)
    p = (tile // TILES_C) * BLOCK_P + tl.arange(0, BLOCK_P)
    h, w = p // W, p % W
    inside = (c < C)[None, :]
    # One row of weights for every pixel of the tile: a row of its own layout would be passed around through shared memory.
    w_at = w_ptr + (p * 0)[:, None] + c[None, :]
    x_at = x_ptr + ((n * H * W + p) * LDX)[:, None] + c[None, :]
    v = tl.zeros((BLOCK_P, BLOCK_C), tl.float32) + tl.load(term_ptr + c, mask=c < C, other=0.0)[None, :]
    for i in tl.static_range(7):
        for j in tl.static_range(7):
            y, x = h + (i - 3), w + (j - 3)
            keep = ((y >= 0) & (y < H) & (x >= 0) & (x < W))[:, None]
            if C % BLOCK_C:
                keep = keep & inside
            taken = tl.load(x_at + ((i - 3) * W + (j - 3)) * LDX, mask=keep, other=0.0)
            weight = tl.load(w_at + (i * 7 + j) * C, mask=inside, other=0.0)
            v += taken.to(tl.float32) * weight.to(tl.float32)
    if C % BLOCK_C:
        v = tl.where(inside, v, 0.0)
    tl.store(y_ptr + (n * H * W + p)[:, None] * C + c[None, :], v.to(y_ptr.dtype.element_ty), mask=inside)
    leave_sums(sums_ptr, v, n, tile, TILES)


@triton.jit
def voxtune_depthwise(
    x_ptr,
    w_ptr,
    term_ptr,
    y_ptr,
    sums_ptr,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    LDX: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHAINED: tl.constexpr,
):
    release(CHAINED)
    wait(CHAINED)
    depthwise_tile(tl.program_id(0), x_ptr, w_ptr, term_ptr, y_ptr, sums_ptr, H, W, C, LDX, BLOCK_P, BLOCK_C)

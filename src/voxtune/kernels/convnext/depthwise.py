"""Depthwise convolution (7x7; also 3x3 and 5x5) + time term, with partial sums for the norm that follows.

Why: a depthwise convolution has no matrix product for the tensor cores, and general convolution kernels process it one channel
at a time. Here each thread computes a run of four adjacent pixels and two channels: it loads the ten pixels under the seven
columns of taps once and uses each up to four times. A run can leave the image only at its ends, so two conditions mask all
columns. BLOCK_I rows of taps are computed in parallel and added at the end; with few pixels, the loads of successive rows would
otherwise leave the GPU idle. The bias of the convolution and the time term of the block are one vector per step, precomputed for
all steps. Two sources, cat([a, b]) along the channels, are read where they are.

Legend: N batch, H W pixels per sample, C channels, P tiles per sample.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from voxtune.kernels.convnext.common import leave_both, release, wait


def pack_depthwise(weight: Tensor, dtype) -> Tensor:
    """Packs a depthwise weight (C, 1, 7, 7) as (8 * 7, C); rows of zero taps make their number a power of two."""
    side = weight.shape[-1]
    rows = 1 << (side - 1).bit_length()
    return F.pad(weight.detach().flatten(1).t(), (0, 0, 0, (rows - side) * side)).contiguous().to(dtype)


def depthwise_reference(x_NCHW: Tensor, weight: Tensor, term_C: Tensor) -> Tensor:
    """Reference in plain PyTorch; `term_C` is bias + time term."""
    return F.conv2d(x_NCHW, weight, term_C, padding=weight.shape[-1] // 2, groups=weight.shape[0])


@triton.jit
def column(
    at,  # address of the run's first pixel, in the row of taps
    x,  # its column
    row,  # mask: rows inside the image
    inside,  # mask: existing channels
    W,
    LDX,
    Q: tl.constexpr,  # offset of the pixel from the run's first
    RUN: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One pixel of every run as float32; zero outside the image."""
    keep = row
    if RUN < 4:
        keep = keep & (x + Q >= 0) & (x + Q < W)
    elif Q < 0:
        keep = keep & (x > 0)
    elif Q >= RUN:
        keep = keep & (x < W - RUN)
    if MASKED:
        keep = keep & inside
    return tl.load(at + Q * LDX, mask=keep, other=0.0).to(tl.float32)


@triton.jit
def depthwise_work(  # noqa: PLR0912, PLR0915
    pid,
    x_ptr,  # (N, H, W, C), row stride LDX
    w_ptr,  # (56, C)
    term_ptr,  # (C,) float32
    y_ptr,  # (N, H, W, C), dense
    sums_ptr,  # (N, 2, P) float32
    H,
    W,
    C,
    LDX,
    RUN: tl.constexpr,  # adjacent pixels per thread: 4, or 1 if W is not a multiple of 4
    BLOCK_P: tl.constexpr,  # runs per tile
    BLOCK_C: tl.constexpr,
    BLOCK_I: tl.constexpr,  # rows of taps computed in parallel
    MASKED: tl.constexpr,  # C is not a multiple of BLOCK_C
    SIDE: tl.constexpr = 7,  # taps per axis: 3, 5 or 7
    xb_ptr=0,  # (N, H, W, C - CA), row stride LDB: the second source if CA is not 0
    bias_ptr=0,  # (C,) float32; not read without BIAS
    BIAS: tl.constexpr = False,
    CA: tl.constexpr = 0,  # channels of the first of two sources
    LDB: tl.constexpr = 0,
    LDT: tl.constexpr = 0,  # row stride of term_ptr, if samples have different terms
):
    PAD: tl.constexpr = SIDE // 2
    tiles_c = (C + BLOCK_C - 1) // BLOCK_C
    tiles = (H * W // (BLOCK_P * RUN)) * tiles_c
    n, tile = pid // tiles, pid % tiles
    c = (tile % tiles_c) * BLOCK_C + tl.arange(0, BLOCK_C)
    p = ((tile // tiles_c) * BLOCK_P + tl.arange(0, BLOCK_P)) * RUN
    i = tl.arange(0, BLOCK_I)[:, None, None] - PAD
    h, x = (p // W)[None, :, None], (p % W)[None, :, None]
    inside = (c < C)[None, None, :]
    # Broadcast the weights to every pixel of the tile; a different layout would be converted through shared memory.
    w_at = w_ptr + (i + PAD) * (SIDE * C) + (p * 0)[None, :, None] + c[None, None, :]
    if CA:
        # A tile of one source has one condition.
        second = (c[None, None, :] if CA % BLOCK_C else (tile % tiles_c) * BLOCK_C) >= CA
        base, stride = tl.where(second, xb_ptr - CA, x_ptr), tl.where(second, LDB, LDX)
    else:
        base, stride = x_ptr, LDX
    x_at = base + (n * H * W + p)[None, :, None] * stride + i * (W * stride) + c[None, None, :]
    v0 = tl.zeros((BLOCK_I, BLOCK_P, BLOCK_C), tl.float32)
    v1, v2, v3 = v0, v0, v0
    for first in range(0, SIDE, BLOCK_I):
        at, y = x_at + first * W * stride, h + (i + first)
        row = (y >= 0) & (y < H)
        t0 = column(at, x, row, inside, W, stride, -PAD, RUN, MASKED)
        if RUN == 4:
            t1 = column(at, x, row, inside, W, stride, 1 - PAD, RUN, MASKED)
            t2 = column(at, x, row, inside, W, stride, 2 - PAD, RUN, MASKED)
            t3 = column(at, x, row, inside, W, stride, 3 - PAD, RUN, MASKED)
        for j in tl.static_range(SIDE):
            if MASKED:
                weight = tl.load(w_at + (first * SIDE + j) * C, mask=inside, other=0.0).to(tl.float32)
            else:
                weight = tl.load(w_at + (first * SIDE + j) * C).to(tl.float32)
            v0 += t0 * weight
            if RUN == 4:
                v1 += t1 * weight
                v2 += t2 * weight
                v3 += t3 * weight
                # Move the window by one pixel.
                t0, t1, t2 = t1, t2, t3
                if j < SIDE - 1:
                    t3 = column(at, x, row, inside, W, stride, j + 4 - PAD, RUN, MASKED)
            elif j < SIDE - 1:
                t0 = column(at, x, row, inside, W, stride, j + 1 - PAD, RUN, MASKED)
    keep = (c < C)[None, :]
    term = tl.load(term_ptr + n * LDT + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        term += tl.load(bias_ptr + c, mask=c < C, other=0.0)[None, :]
    y_at = y_ptr + (n * H * W + p)[:, None] * C + c[None, :]
    if RUN == 4:
        # One reduction for all four, since each reduction synchronises all warps.
        even, odd = tl.split(tl.sum(tl.join(tl.join(v0, v2), tl.join(v1, v3)), axis=0))
        s0, s2 = tl.split(even)
        s1, s3 = tl.split(odd)
    else:
        s0 = tl.sum(v0, axis=0)
    s0 += term
    tl.store(y_at, s0.to(y_ptr.dtype.element_ty), mask=keep)
    total, squares = s0, s0 * s0
    if RUN == 4:
        s1, s2, s3 = s1 + term, s2 + term, s3 + term
        tl.store(y_at + C, s1.to(y_ptr.dtype.element_ty), mask=keep)
        tl.store(y_at + 2 * C, s2.to(y_ptr.dtype.element_ty), mask=keep)
        tl.store(y_at + 3 * C, s3.to(y_ptr.dtype.element_ty), mask=keep)
        total += s1 + s2 + s3
        squares += s1 * s1 + s2 * s2 + s3 * s3
    leave_both(sums_ptr, total, squares, n, tile, tiles)


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
    RUN: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_I: tl.constexpr,
    CHAINED: tl.constexpr,
):
    release(CHAINED)
    wait(CHAINED)
    depthwise_work(
        tl.program_id(0), x_ptr, w_ptr, term_ptr, y_ptr, sums_ptr, H, W, C, LDX, RUN, BLOCK_P, BLOCK_C, BLOCK_I,
        C % BLOCK_C != 0,
    )  # fmt: skip

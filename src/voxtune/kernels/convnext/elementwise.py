"""Elementwise and linear operations of the ladder's lower rungs, one launch each.

Legend: N batch, C channels, H W pixels; tensors are (N, C, H, W), dense.
"""

from __future__ import annotations

import triton
import triton.language as tl

from voxtune.kernels.convnext.common import gelu


@triton.jit
def voxtune_unary(
    x_ptr,
    y_ptr,
    count,
    NAME: tl.constexpr,  # gelu, relu, sigmoid
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0)
    if NAME == "gelu":
        y = gelu(x)
    elif NAME == "relu":
        y = tl.maximum(x, 0.0)
    else:
        y = 1.0 / (1.0 + tl.exp(-x))
    tl.store(y_ptr + at, y, mask=at < count)


@triton.jit
def voxtune_binary(
    a_ptr,  # (N, C, pixels)
    b_ptr,  # as a; (N, C) if WHAT is channel; (N, pixels) if it is pixel
    y_ptr,
    count,
    C,
    pixels,
    NAME: tl.constexpr,  # add, multiply
    WHAT: tl.constexpr,  # all, channel, pixel
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + at, mask=at < count, other=0.0)
    other = at
    if WHAT == "channel":
        other = at // pixels
    elif WHAT == "pixel":
        other = at // (C * pixels) * pixels + at % pixels
    b = tl.load(b_ptr + other, mask=at < count, other=0.0)
    tl.store(y_ptr + at, a + b if NAME == "add" else a * b, mask=at < count)


@triton.jit
def voxtune_concat(
    a_ptr,  # (N, CA, pixels)
    b_ptr,  # (N, CB, pixels)
    y_ptr,  # (N, CA + CB, pixels)
    count,
    A,  # CA * pixels
    B,  # CB * pixels
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n, v = at // (A + B), at % (A + B)
    of_a = (v < A) & (at < count)
    a = tl.load(a_ptr + n * A + v, mask=of_a, other=0.0)
    b = tl.load(b_ptr + n * B + v - A, mask=(v >= A) & (at < count), other=0.0)
    tl.store(y_ptr + at, tl.where(v < A, a, b), mask=at < count)


@triton.jit
def voxtune_upsample2d(
    x_ptr,  # (planes, H, W)
    y_ptr,  # (planes, 2 H, 2 W)
    count,
    H,
    W,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w, h, plane = at % (2 * W) // 2, at // (2 * W) % (2 * H) // 2, at // (4 * H * W)
    tl.store(y_ptr + at, tl.load(x_ptr + (plane * H + h) * W + w, mask=at < count, other=0.0), mask=at < count)


@triton.jit
def voxtune_unshuffle(
    x_ptr,  # (planes, H, W)
    y_ptr,  # (planes, 4, H / 2, W / 2)
    count,
    H,
    W,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w, h = at % (W // 2), at // (W // 2) % (H // 2)
    place, plane = at // (H * W // 4) % 4, at // (H * W)
    source = (plane * H + 2 * h + place // 2) * W + 2 * w + place % 2
    tl.store(y_ptr + at, tl.load(x_ptr + source, mask=at < count, other=0.0), mask=at < count)


@triton.jit
def voxtune_linear(
    x_ptr,  # (N, C)
    w_ptr,  # (K, C)
    bias_ptr,  # (K,)
    y_ptr,  # (N, K)
    count,  # N * K
    C,
    K,
    BLOCK: tl.constexpr,
):
    """Each thread computes one output."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = at < count
    n, k = at // K, at % K
    v = tl.load(bias_ptr + k, mask=keep, other=0.0)
    for c in range(C):
        v += tl.load(x_ptr + n * C + c, mask=keep, other=0.0) * tl.load(w_ptr + k * C + c, mask=keep, other=0.0)
    tl.store(y_ptr + at, v, mask=keep)

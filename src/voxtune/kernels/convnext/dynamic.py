"""The two main kernels of the upper rungs with shapes as run-time arguments, for comparison with compile-time shapes.

Why: with constant shapes the compiler turns divisions into shifts, unrolls loops and drops masks, but every shape is a separate
kernel that occupies the instruction cache. Which is faster must be measured. The arguments have the same names as in depthwise.py
and conv.py, so that one prepared launch works with both.

Legend: as in conv.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from voxtune.kernels.convnext.common import load_sums, release, wait
from voxtune.kernels.convnext.conv import around, finish
from voxtune.kernels.convnext.depthwise import depthwise_work


@triton.jit
def voxtune_depthwise_dynamic(
    x_ptr, w_ptr, term_ptr, y_ptr, sums_ptr,
    H, W, C, LDX,
    RUN: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_I: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    release(CHAINED)
    wait(CHAINED)
    depthwise_work(
        tl.program_id(0), x_ptr, w_ptr, term_ptr, y_ptr, sums_ptr, H, W, C, LDX, RUN, BLOCK_P, BLOCK_C, BLOCK_I, True
    )


@triton.jit
def product_dynamic(
    acc, x_ptr, w_ptr, n, y, x, k,
    H, W, C, LDX, KP, SIDE, STRIDE, DOUBLE: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    half = 2 if DOUBLE else 1
    pad = tl.where(STRIDE == 1, SIDE // 2, 0)
    hs, ws = H * STRIDE // half, W * STRIDE // half
    column = tl.arange(0, BLOCK_C)
    for chunk in range(tl.cdiv(SIDE * SIDE * C, BLOCK_C)):
        r = chunk * BLOCK_C + column
        tap, c = r // C, r % C
        yy = y[:, None] * STRIDE + (tap // SIDE - pad)[None, :]
        xx = x[:, None] * STRIDE + (tap % SIDE - pad)[None, :]
        keep = (yy >= 0) & (yy < H * STRIDE) & (xx >= 0) & (xx < W * STRIDE) & (tap < SIDE * SIDE)[None, :]
        if DOUBLE:
            yy, xx = yy >> 1, xx >> 1
        a = tl.load(x_ptr + ((n * hs + yy) * ws + xx) * LDX + c[None, :], mask=keep, other=0.0)
        b = tl.load(w_ptr + r[:, None] * KP + k[None, :])
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def voxtune_conv_dynamic(
    x_ptr, w_ptr, x2_ptr, w2_ptr, shift_ptr, slope_ptr, read_ptr, y_ptr, sums_ptr, parts_ptr, count_ptr,
    turns, turns2, H, W, C, C2, K, KP, LDX, LD2, LDY, ROWS, SIDE, STRIDE,
    DOUBLE: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, GELU: tl.constexpr, SUMS: tl.constexpr,
    READ, BLOCK_R: tl.constexpr, EPS: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, WAYS: tl.constexpr,
    NEAR: tl.constexpr, PRECISION: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Supports SPLIT = 1 only; split reductions use the compile-time kernel."""
    tl.static_assert(SPLIT == 1)
    release(CHAINED)
    wait(CHAINED)
    pid = tl.program_id(0)
    tiles_k = KP // BLOCK_K
    k = pid % tiles_k * BLOCK_K + tl.arange(0, BLOCK_K)
    block = pid // tiles_k
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    n = block * BLOCK_M // (H * W)
    p = row - n * (H * W)
    y, x = p // W, p % W
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    total, squares = 0.0, 0.0
    if NORM:
        total, squares = load_sums(read_ptr, n, READ, BLOCK_R)
    more = acc
    if RESIDUAL == 2:
        more = product_dynamic(more, x2_ptr, w2_ptr, n, y, x, k, H, W, C2, LD2, KP, 1, 1, False, BLOCK_C, PRECISION)
    acc = product_dynamic(acc, x_ptr, w_ptr, n, y, x, k, H, W, C, LDX, KP, SIDE, STRIDE, DOUBLE, BLOCK_C, PRECISION)
    tiles = (H * W // BLOCK_M) * tiles_k
    shift, slope, residual = around(shift_ptr, slope_ptr, x2_ptr, row, y, x, k, H, W, K, KP, LD2, NORM, RESIDUAL)
    finish(
        acc, more, shift, slope, residual, total, squares, y_ptr, sums_ptr, n, pid % tiles, row, k,
        K, LDY, H * W * C, EPS, NORM, RESIDUAL, "gelu" if GELU else "none", SUMS, tiles,
    )  # fmt: skip

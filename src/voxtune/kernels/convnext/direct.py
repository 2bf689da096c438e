"""Direct convolution: naive with a separate padding kernel (rung 1), and tiled in shared memory (rung 2).

Why: the naive version is the baseline of the ladder. Each thread computes one output; it loops over all channels and taps and
reads every input from global memory.

Legend: N batch, C input channels, K output channels, H W pixels, R padding.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def voxtune_pad(
    x_ptr,  # (N, C, H, W)
    y_ptr,  # (N, C, H + 2 R, W + 2 R)
    count,  # values of y
    H,
    W,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w, h = at % (W + 2 * R) - R, at // (W + 2 * R) % (H + 2 * R) - R
    plane = at // ((W + 2 * R) * (H + 2 * R))
    keep = (at < count) & (h >= 0) & (h < H) & (w >= 0) & (w < W)
    tl.store(y_ptr + at, tl.load(x_ptr + (plane * H + h) * W + w, mask=keep, other=0.0), mask=at < count)


@triton.jit
def voxtune_direct(
    x_ptr,  # (N, C, H + SIDE - 1, W + SIDE - 1): already padded
    w_ptr,  # (K, C / groups, SIDE, SIDE)
    bias_ptr,  # (K,)
    y_ptr,  # (N, K, H, W)
    count,  # values of y
    C,
    K,
    H,
    W,
    each,  # input channels per group
    SIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = at < count
    w, h, k, n = at % W, at // W % H, at // (W * H) % K, at // (W * H * K)
    WP, HP = W + SIDE - 1, H + SIDE - 1
    first = k // (K // (C // each)) * each
    x_at = x_ptr + ((n * C + first) * HP + h) * WP + w
    w_at = w_ptr + k * each * (SIDE * SIDE)
    v = tl.zeros((BLOCK,), tl.float32)
    for c in range(each):
        for i in range(SIDE):
            for j in range(SIDE):
                x = tl.load(x_at + (c * HP + i) * WP + j, mask=keep, other=0.0)
                v += x * tl.load(w_at + (c * SIDE + i) * SIDE + j, mask=keep, other=0.0)
    tl.store(y_ptr + at, v + tl.load(bias_ptr + k, mask=keep, other=0.0), mask=keep)


@triton.jit
def voxtune_tiled(
    x_ptr,  # (N, C, H, W)
    w_ptr,  # (K, C / groups, SIDE * SIDE)
    bias_ptr,  # (K,)
    y_ptr,  # (N, K, H, W)
    C,
    K,
    H,
    W,
    each,  # input channels per group
    SIDE: tl.constexpr,
    TAPS: tl.constexpr,  # SIDE * SIDE rounded up to a power of two
    TILE: tl.constexpr,  # pixels per side, including the border
    BLOCK_K: tl.constexpr,
    ALONE: tl.constexpr,  # depthwise: one input and one output channel per group
):
    R: tl.constexpr = SIDE // 2
    INNER: tl.constexpr = TILE - 2 * R
    AREA: tl.constexpr = TILE * TILE
    tiles_w = tl.cdiv(W, INNER)
    block, n = tl.program_id(0), tl.program_id(2)
    v = tl.arange(0, AREA)
    i, j = v // TILE, v % TILE
    h, w = block // tiles_w * INNER - R + i, block % tiles_w * INNER - R + j
    in_image = (h >= 0) & (h < H) & (w >= 0) & (w < W)
    inner = in_image & (i >= R) & (i < TILE - R) & (j >= R) & (j < TILE - R)
    # For every pixel of the tile and every tap, the index of the pixel to read. Results of border pixels are not stored.
    t = tl.arange(0, TAPS)
    shift = tl.where(t < SIDE * SIDE, (t // SIDE - R) * TILE + t % SIDE - R, 0)
    source = tl.minimum(tl.maximum(v[:, None] + shift[None, :], 0), AREA - 1)
    source = tl.reshape(source, (AREA * TAPS,))
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    acc = tl.zeros((AREA, BLOCK_K), tl.float32)
    first = tl.program_id(1) * BLOCK_K // (K // (C // each)) * each
    for c in range(each):
        x = tl.load(x_ptr + ((n * C + first + c) * H + h) * W + w, mask=in_image, other=0.0)
        taps = tl.reshape(tl.gather(x, source, 0), (AREA, TAPS))
        at = (k[None, :] * each + c) * (SIDE * SIDE) + t[:, None]
        weight = tl.load(w_ptr + at, mask=(t < SIDE * SIDE)[:, None] & (k < K)[None, :], other=0.0)
        if ALONE:
            acc += tl.sum(taps * tl.reshape(weight, (1, TAPS)), axis=1)[:, None]
        else:
            acc = tl.dot(taps, weight, acc, input_precision="ieee")
    acc += tl.load(bias_ptr + k, mask=k < K, other=0.0)[None, :]
    at = ((n * K + k)[None, :] * H + h[:, None]) * W + w[:, None]
    tl.store(y_ptr + at, acc, mask=inner[:, None] & (k < K)[None, :])

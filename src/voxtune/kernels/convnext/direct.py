"""Direct convolution, one output at a time, over an image padded by a kernel of its own: where the ladder starts.

Why: it is what a first program does, and what everything above it is measured against. A lane makes one output; it walks over
all channels and taps and reads every input from memory again.

Legend: N batch, C channels in, K channels out, H W pixels, R padding.
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
    x_ptr,  # (N, C, H + SIDE - 1, W + SIDE - 1): padded already
    w_ptr,  # (K, C / groups, SIDE, SIDE)
    bias_ptr,  # (K,)
    y_ptr,  # (N, K, H, W)
    count,  # values of y
    C,
    K,
    H,
    W,
    each,  # channels in of a group
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

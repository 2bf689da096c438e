"""Layer norm over channels and pixels together, in the forms of the ladder: by one lane's order, by warps, by three kernels.

Why: a mean over a whole image is a sum that every program must wait for. One small program a sample walks through it (the start);
a large one reduces by warps, by shuffles and then through shared memory, so that few steps are left; and three kernels use the
whole card: partial sums, their reduction, the normalisation.

Legend: N batch, V values a sample (C * pixels), C channels, P partial sums a sample.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def voxtune_norm_naive(
    x_ptr,  # (N, C, pixels)
    w_ptr,  # (C,)
    b_ptr,  # (C,)
    y_ptr,  # as x
    V,
    pixels,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a sample; every step of both walks waits for a reduction to one number."""
    at0 = tl.program_id(0) * V
    lane = tl.arange(0, BLOCK)
    mean = 0.0
    for v0 in range(0, V, BLOCK):
        mean += tl.sum(tl.load(x_ptr + at0 + v0 + lane, mask=v0 + lane < V, other=0.0), axis=0)
    mean = mean / V
    spread = 0.0
    for v0 in range(0, V, BLOCK):
        d = tl.load(x_ptr + at0 + v0 + lane, mask=v0 + lane < V, other=mean) - mean
        spread += tl.sum(d * d, axis=0)
    rate = tl.rsqrt(spread / V + EPS)
    for v0 in range(0, V, BLOCK):
        v = v0 + lane
        x = tl.load(x_ptr + at0 + v, mask=v < V, other=0.0)
        w, b = tl.load(w_ptr + v // pixels, mask=v < V), tl.load(b_ptr + v // pixels, mask=v < V)
        tl.store(y_ptr + at0 + v, (x - mean) * rate * w + b, mask=v < V)


@triton.jit
def voxtune_norm_warp(
    x_ptr,  # as above
    w_ptr,
    b_ptr,
    y_ptr,
    V,
    pixels,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One large program a sample: a sum for every lane, reduced once, by shuffles inside a warp and then over warps."""
    at0 = tl.program_id(0) * V
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for v0 in range(0, V, BLOCK):
        x = tl.load(x_ptr + at0 + v0 + lane, mask=v0 + lane < V, other=0.0)
        total += x
        squares += x * x
    mean = tl.sum(total, axis=0) / V
    rate = tl.rsqrt(tl.maximum(tl.sum(squares, axis=0) / V - mean * mean, 0.0) + EPS)
    for v0 in range(0, V, BLOCK):
        v = v0 + lane
        x = tl.load(x_ptr + at0 + v, mask=v < V, other=0.0)
        w, b = tl.load(w_ptr + v // pixels, mask=v < V), tl.load(b_ptr + v // pixels, mask=v < V)
        tl.store(y_ptr + at0 + v, (x - mean) * rate * w + b, mask=v < V)


@triton.jit
def voxtune_norm_sums(
    x_ptr,  # (N, V)
    sums_ptr,  # (N, 2, P)
    V,
    P,
    BLOCK: tl.constexpr,
):
    """Kernel 1 of 3: a tile's sum and sum of squares."""
    n, p = tl.program_id(0) // P, tl.program_id(0) % P
    v = p * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + n * V + v, mask=v < V, other=0.0)
    tl.store(sums_ptr + n * 2 * P + p, tl.sum(x, axis=0))
    tl.store(sums_ptr + n * 2 * P + P + p, tl.sum(x * x, axis=0))


@triton.jit
def voxtune_norm_reduce(
    sums_ptr,  # (N, 2, P)
    out_ptr,  # (N, 2): mean, 1 / deviation
    V,
    P,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Kernel 2 of 3: one program a sample adds them up."""
    n = tl.program_id(0)
    p = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for p0 in range(0, P, BLOCK):
        total += tl.load(sums_ptr + n * 2 * P + p0 + p, mask=p0 + p < P, other=0.0)
        squares += tl.load(sums_ptr + n * 2 * P + P + p0 + p, mask=p0 + p < P, other=0.0)
    mean = tl.sum(total, axis=0) / V
    tl.store(out_ptr + n * 2, mean)
    tl.store(out_ptr + n * 2 + 1, tl.rsqrt(tl.maximum(tl.sum(squares, axis=0) / V - mean * mean, 0.0) + EPS))


@triton.jit
def voxtune_norm_apply(
    x_ptr,  # (N, C, pixels)
    stats_ptr,  # (N, 2)
    w_ptr,
    b_ptr,
    y_ptr,
    V,
    pixels,
    count,  # N * V
    BLOCK: tl.constexpr,
):
    """Kernel 3 of 3."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = at < count
    n, c = at // V, at % V // pixels
    mean, rate = tl.load(stats_ptr + n * 2, mask=keep), tl.load(stats_ptr + n * 2 + 1, mask=keep)
    x = tl.load(x_ptr + at, mask=keep, other=0.0)
    w, b = tl.load(w_ptr + c, mask=keep), tl.load(b_ptr + c, mask=keep)
    tl.store(y_ptr + at, (x - mean) * rate * w + b, mask=keep)

"""Layer norm over channels and pixels, in the three versions of the ladder: naive, by warp reduction, and by three kernels.

Why: the mean of a whole image is a reduction that everything after it depends on. The naive version loops over the image in one
small program per sample. The second uses one large program, which reduces by warp shuffles and then through shared memory. The
third uses the whole GPU: partial sums, their reduction, normalisation.

Legend: N batch, V values per sample (C * pixels), C channels, P partial sums per sample.
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
    """One program per sample; every iteration of the first two loops waits for a reduction to a scalar."""
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
    """One large program per sample: each thread accumulates; one reduction by warp shuffles, then across warps."""
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
    """Kernel 1 of 3: sum and sum of squares of each tile."""
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
    """Kernel 2 of 3: mean and 1 / deviation from the partial sums, one program per sample."""
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
    """Kernel 3 of 3: normalisation."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = at < count
    n, c = at // V, at % V // pixels
    mean, rate = tl.load(stats_ptr + n * 2, mask=keep), tl.load(stats_ptr + n * 2 + 1, mask=keep)
    x = tl.load(x_ptr + at, mask=keep, other=0.0)
    w, b = tl.load(w_ptr + c, mask=keep), tl.load(b_ptr + c, mask=keep)
    tl.store(y_ptr + at, (x - mean) * rate * w + b, mask=keep)

"""What the fused kernels of the 2D network share.

Layout: an image is (pixels, channels) with a row stride, so that a result can be written straight into its slice of a wider
buffer. A norm over channels and pixels together is two numbers a sample: whoever writes a tensor leaves the sum and the sum of
squares of its tile, and whoever reads the tensor adds these up. One kernel's waiting for the one before it can overlap that
one's end (`chained`): Hopper starts a kernel early when both sides say so.

Legend: N batch, P tiles of a sample.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def wait(CHAINED: tl.constexpr):
    """Before the first read of what an earlier kernel wrote."""
    if CHAINED:
        cuda.gdc_wait()


@triton.jit
def release(CHAINED: tl.constexpr):
    """The next kernel may be put on the card; what it reads it still waits for."""
    if CHAINED:
        cuda.gdc_launch_dependents()


@triton.jit
def gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def leave_sums(
    sums_ptr,  # (N, 2, P) float32
    v,  # float32 tile; zero where it lies outside
    n,
    tile,
    P: tl.constexpr,
):
    leave_both(sums_ptr, v, v * v, n, tile, P)


@triton.jit
def leave_both(
    sums_ptr,  # (N, 2, P) float32
    total,  # float32 tiles: of the values, and of their squares
    squares,
    n,
    tile,
    P,
):
    # Both in one reduction: each is a few meetings of all warps.
    both = tl.sum(tl.reshape(tl.join(total, squares), (total.numel, 2)), axis=0)
    tl.store(sums_ptr + n * (2 * P) + tile + tl.arange(0, 2) * P, both)


@triton.jit
def load_sums(
    sums_ptr,  # (N, 2, P) float32
    n,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,  # P, rounded up to a power of two
):
    """Both sums' parts; read early, added up late (`norm_of`), so that the reading is hidden behind other work."""
    i = tl.arange(0, BLOCK_P)
    at = sums_ptr + n * (2 * P) + i
    total = tl.load(at, mask=i < P, other=0.0)
    squares = tl.load(at + P, mask=i < P, other=0.0)
    return total, squares


@triton.jit
def norm_of(
    total,
    squares,
    COUNT: tl.constexpr,  # values a sample
    EPS: tl.constexpr,
):
    """(mean, 1 / standard deviation). A mean of r deviations costs r^2 roundings of float32; storage in half costs more."""
    both = tl.sum(tl.reshape(tl.join(total, squares), (total.numel, 2)), axis=0)
    sum_all, sum_squares = tl.split(both)
    mean = sum_all / COUNT
    variance = tl.maximum(sum_squares / COUNT - mean * mean, 0.0)
    return mean, tl.rsqrt(variance + EPS)

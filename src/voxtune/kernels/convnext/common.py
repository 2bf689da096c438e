"""Functions shared by the fused kernels of the 2D network.

Layout: an image is (pixels, channels) with a row stride, so that a kernel can write its result directly into a slice of a wider
buffer. A norm over all channels and pixels needs two numbers per sample: the kernel that writes a tensor also stores the sum and
the sum of squares of each tile, and the kernel that reads the tensor adds them up. With CHAINED, a kernel starts before its
predecessor has ended (programmatic dependent launch, Hopper).

Legend: N batch, P tiles per sample.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def wait(CHAINED: tl.constexpr):
    """Waits for the preceding kernel; call it before the first read of its results."""
    if CHAINED:
        cuda.gdc_wait()


@triton.jit
def release(CHAINED: tl.constexpr):
    """Allows the next kernel to start; it still calls `wait` before it reads results."""
    if CHAINED:
        cuda.gdc_launch_dependents()


@triton.jit
def gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def leave_sums(
    sums_ptr,  # (N, 2, P) float32
    v,  # float32 tile; zero outside the image
    n,
    tile,
    P: tl.constexpr,
):
    leave_both(sums_ptr, v, v * v, n, tile, P)


@triton.jit
def leave_both(
    sums_ptr,  # (N, 2, P) float32
    total,  # float32 tiles: values and squares
    squares,
    n,
    tile,
    P,
):
    # One reduction for both, since each reduction synchronises all warps several times.
    both = tl.sum(tl.reshape(tl.join(total, squares), (total.numel, 2)), axis=0)
    tl.store(sums_ptr + n * (2 * P) + tile + tl.arange(0, 2) * P, both)


@triton.jit
def load_sums(
    sums_ptr,  # (N, 2, P) float32
    n,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,  # P rounded up to a power of two
):
    """The partial sums of values and squares. Load them early and reduce them late (`norm_of`) to hide the latency."""
    i = tl.arange(0, BLOCK_P)
    at = sums_ptr + n * (2 * P) + i
    total = tl.load(at, mask=i < P, other=0.0)
    squares = tl.load(at + P, mask=i < P, other=0.0)
    return total, squares


@triton.jit
def norm_of(
    total,
    squares,
    COUNT: tl.constexpr,  # values per sample
    EPS: tl.constexpr,
):
    """(mean, 1 / standard deviation).

    If the mean is r standard deviations, the relative error grows to r^2 float32 roundings, which is less than the error
    of half-precision storage.
    """
    both = tl.sum(tl.reshape(tl.join(total, squares), (total.numel, 2)), axis=0)
    sum_all, sum_squares = tl.split(both)
    mean = sum_all / COUNT
    variance = tl.maximum(sum_squares / COUNT - mean * mean, 0.0)
    return mean, tl.rsqrt(variance + EPS)

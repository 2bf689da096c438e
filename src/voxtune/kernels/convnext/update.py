"""The end of a step: the last 1x1 convolution, the DDPM update and its noise, in one kernel.

Why: three output channels are too few for tensor cores, and update and noise use the same pixels. The noise is that of
diffusion/noise.py: a value depends only on random seed, sample number, draw and position, so a CUDA graph needs no generator
state. The coefficients of step i are a row of a table on the device, so nothing is read from the host.

Legend: N batch, V pixels per sample, C channels of the image, K channels of the network's last tensor.
"""

from __future__ import annotations

import triton
import triton.language as tl

from voxtune.kernels.convnext.common import release, wait


@triton.jit
def normal_four(seed, block, draw, low, high, BLOCK_B: tl.constexpr):
    """(4 * BLOCK_B,): four normal values per counter, in the order of diffusion/noise.py."""
    zero = tl.zeros((BLOCK_B,), tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, block.to(tl.uint32), zero + draw, zero + low, zero + high)
    u0 = ((w0 >> 8).to(tl.float32) + 0.5) * 5.9604644775390625e-08
    u1 = ((w1 >> 8).to(tl.float32) + 0.5) * 5.9604644775390625e-08
    u2 = ((w2 >> 8).to(tl.float32) + 0.5) * 5.9604644775390625e-08
    u3 = ((w3 >> 8).to(tl.float32) + 0.5) * 5.9604644775390625e-08
    r0, a0 = tl.sqrt(-2.0 * tl.log(u0)), 6.283185307179586 * u1
    r1, a1 = tl.sqrt(-2.0 * tl.log(u2)), 6.283185307179586 * u3
    even = tl.join(r0 * tl.cos(a0), r1 * tl.cos(a1))
    odd = tl.join(r0 * tl.sin(a0), r1 * tl.sin(a1))
    return tl.reshape(tl.join(even, odd), (BLOCK_B * 4,))


@triton.jit
def voxtune_update(
    h_ptr,  # (N, V, K), row stride LDH: the network's last tensor
    w_ptr,  # (C, K) float32
    bias_ptr,  # (C,) float32
    x_ptr,  # (N, C, V) float32: the image, updated in place
    x4_ptr,  # (N, V, 4): the image in the layout of the stem
    eps_ptr,  # (N, C, V) float32: the predicted noise; not written without KEEP
    row_ptr,  # (8,) float32: alpha, sigma, weights of x_0, x and noise, number of the draw, 1 to clamp x_0
    seed_ptr,  # (1,) int64
    index_ptr,  # (N,) int64: sample numbers
    V: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    LDH: tl.constexpr,
    BLOCK_K: tl.constexpr,  # K rounded up to a power of two
    BLOCK_V: tl.constexpr,
    KEEP: tl.constexpr,  # write the predicted noise and do not update the image
    CHAINED: tl.constexpr,
):
    TILES: tl.constexpr = V // BLOCK_V
    pid = tl.program_id(0)
    n, first = pid // TILES, pid % TILES * BLOCK_V
    v = first + tl.arange(0, BLOCK_V)
    k = tl.arange(0, BLOCK_K)
    alpha, sigma = tl.load(row_ptr), tl.load(row_ptr + 1)
    of_x0, of_x, of_noise = tl.load(row_ptr + 2), tl.load(row_ptr + 3), tl.load(row_ptr + 4)
    draw, clamp = tl.load(row_ptr + 5).to(tl.uint32), tl.load(row_ptr + 6)
    release(CHAINED)
    wait(CHAINED)
    seed, index = tl.load(seed_ptr), tl.load(index_ptr + n)
    low, high = (index & 0xFFFFFFFF).to(tl.uint32), (index >> 32).to(tl.uint32)
    h = tl.load(h_ptr + (n * V + v)[:, None] * LDH + k[None, :], mask=(k < K)[None, :], other=0.0).to(tl.float32)
    for c in tl.static_range(C):
        w = tl.load(w_ptr + c * K + k, mask=k < K, other=0.0)
        eps = tl.sum(h * w[None, :], axis=1) + tl.load(bias_ptr + c)
        at = (n * C + c) * V + v
        if KEEP:
            tl.store(eps_ptr + at, eps)
        else:
            old = tl.load(x_ptr + at)
            x0 = (old - sigma * eps) / alpha
            x0 = tl.where(clamp > 0, tl.minimum(tl.maximum(x0, -1.0), 1.0), x0)
            block = (c * V + first) // 4 + tl.arange(0, BLOCK_V // 4)
            noise = normal_four(seed, block, draw, low, high, BLOCK_V // 4)
            x = of_x0 * x0 + of_x * old + of_noise * noise
            tl.store(x_ptr + at, x)
            tl.store(x4_ptr + (n * V + v) * 4 + c, x.to(x4_ptr.dtype.element_ty))


@triton.jit
def voxtune_begin(
    x_ptr,  # (N, C, V) float32: draw 0 of the noise, written if DRAW
    x4_ptr,  # (N, V, 4)
    seed_ptr,
    index_ptr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DRAW: tl.constexpr,  # generate the image from the seed; else only convert it to the layout of the stem
):
    TILES: tl.constexpr = V // BLOCK_V
    pid = tl.program_id(0)
    n, first = pid // TILES, pid % TILES * BLOCK_V
    v = first + tl.arange(0, BLOCK_V)
    seed, index = tl.load(seed_ptr), tl.load(index_ptr + n)
    low, high = (index & 0xFFFFFFFF).to(tl.uint32), (index >> 32).to(tl.uint32)
    draw = (index * 0).to(tl.uint32)
    for c in tl.static_range(4):
        x = tl.zeros((BLOCK_V,), tl.float32)
        if c < C:
            at = (n * C + c) * V + v
            if DRAW:
                block = (c * V + first) // 4 + tl.arange(0, BLOCK_V // 4)
                x = normal_four(seed, block, draw, low, high, BLOCK_V // 4)
                tl.store(x_ptr + at, x)
            else:
                x = tl.load(x_ptr + at)
        tl.store(x4_ptr + (n * V + v) * 4 + c, x.to(x4_ptr.dtype.element_ty))

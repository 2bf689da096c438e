"""Convolution as explicit im2col and a BF16 product on tensor cores with float32 accumulation.

Why: tensor cores multiply matrices. A first kernel writes, for every pixel, the values of its window as a row in BF16; a second
multiplies the rows by the weights, adds the bias in its epilogue and writes the image. In the fused form, the first kernel also
applies the preceding norm (padding stays zero), and the second also applies GELU, ReLU or an addition and stores the partial sums
of its tile for the next norm.

Legend: N batch, M pixels of all samples, V pixels per sample, C input channels, K output channels, R length of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from voxtune.kernels.convnext.common import gelu, leave_sums, load_sums, norm_of


@triton.jit
def voxtune_im2col(
    x_ptr,  # (N, C, H, W)
    rows_ptr,  # (M, RP): channels, then taps; zero from R on
    sums_ptr,  # (N, 2, P) float32: partial sums of x, read if NORM
    w_ptr,  # (C,): weight and bias of the norm
    b_ptr,
    C,
    H,
    W,
    R,
    RP,
    SIDE: tl.constexpr,
    NORM: tl.constexpr,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    COUNT: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    n = tl.program_id(2)
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    c, tap = r // (SIDE * SIDE), r % (SIDE * SIDE)
    h = (v // W)[:, None] + (tap // SIDE - SIDE // 2)[None, :]
    w = (v % W)[:, None] + (tap % SIDE - SIDE // 2)[None, :]
    keep = (h >= 0) & (h < H) & (w >= 0) & (w < W) & (r < R)[None, :]
    x = tl.load(x_ptr + ((n * C + c)[None, :] * H + h) * W + w, mask=keep, other=0.0)
    if NORM:
        total, squares = load_sums(sums_ptr, n, P, BLOCK_P)
        mean, rate = norm_of(total, squares, COUNT, EPS)
        scale, offset = tl.load(w_ptr + c, mask=r < R, other=0.0), tl.load(b_ptr + c, mask=r < R, other=0.0)
        # Zero padding comes after the norm.
        x = tl.where(keep, (x - mean) * rate * scale[None, :] + offset[None, :], 0.0)
    at = (n * H * W + v)[:, None] * RP + r[None, :]
    tl.store(rows_ptr + at, x.to(rows_ptr.dtype.element_ty), mask=(v < H * W)[:, None] & (r < RP)[None, :])


@triton.jit
def voxtune_product(
    a_ptr,  # (M, RP)
    w_ptr,  # (RP, KP)
    bias_ptr,  # (K,)
    add_ptr,  # (N, K, V): added if ADD
    y_ptr,  # (N, K, V)
    sums_ptr,  # (N, 2, tiles per sample) float32: written if SUMS
    V,
    K,
    KP,
    RP: tl.constexpr,
    AFTER: tl.constexpr,  # none, gelu, relu
    ADD: tl.constexpr,
    SUMS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    n = tl.program_id(2)
    v = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    r = tl.arange(0, BLOCK_R)
    keep = (v < V)[:, None]
    a_at = a_ptr + (n * V + v)[:, None] * RP + r[None, :]
    w_at = w_ptr + r[:, None] * KP + k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for r0 in range(0, RP, BLOCK_R):
        acc = tl.dot(tl.load(a_at + r0, mask=keep, other=0.0), tl.load(w_at + r0 * KP), acc, input_precision=PRECISION)
    acc += tl.load(bias_ptr + k, mask=k < K, other=0.0)[None, :]
    inside = keep & (k < K)[None, :]
    at = (n * K + k)[None, :] * V + v[:, None]
    if ADD:
        acc += tl.load(add_ptr + at, mask=inside, other=0.0)
    if AFTER == "gelu":
        acc = gelu(acc)
    elif AFTER == "relu":
        acc = tl.maximum(acc, 0.0)
    tl.store(y_ptr + at, acc, mask=inside)
    if SUMS:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        leave_sums(sums_ptr, tl.where(inside, acc, 0.0), n, tile, TILES)


@triton.jit
def voxtune_depthwise_direct(
    x_ptr,  # (N, C, H, W)
    w_ptr,  # (C, 49)
    bias_ptr,  # (C,)
    term_ptr,  # (N, C): added if TERM
    y_ptr,  # (N, C, H, W)
    sums_ptr,  # (N, 2, tiles per sample): written if SUMS
    C,
    H,
    W,
    TERM: tl.constexpr,
    SUMS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Depthwise 7x7: each program computes pixels of a few channels, without tensor cores."""
    n = tl.program_id(2)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h, w = v // W, v % W
    inside = (c < C)[:, None] & (v < H * W)[None, :]
    at = ((n * C + c) * H * W)[:, None] + v[None, :]
    acc = tl.zeros((BLOCK_C, BLOCK), tl.float32) + tl.load(bias_ptr + c, mask=c < C, other=0.0)[:, None]
    if TERM:
        acc += tl.load(term_ptr + n * C + c, mask=c < C, other=0.0)[:, None]
    for i in tl.static_range(7):
        for j in tl.static_range(7):
            y, x = h + (i - 3), w + (j - 3)
            keep = ((y >= 0) & (y < H) & (x >= 0) & (x < W))[None, :] & inside
            taken = tl.load(x_ptr + at + ((i - 3) * W + (j - 3)), mask=keep, other=0.0)
            acc += taken * tl.load(w_ptr + c * 49 + (i * 7 + j), mask=c < C, other=0.0)[:, None]
    tl.store(y_ptr + at, acc, mask=inside)
    if SUMS:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        leave_sums(sums_ptr, tl.where(inside, acc, 0.0), n, tile, TILES)


@triton.jit
def voxtune_gate_product(
    x_ptr,  # (N, C, V): decoder
    skip_ptr,  # (N, CS, V)
    wx_ptr,  # (C padded, KP)
    ws_ptr,  # (CS padded, KP)
    bias_ptr,  # (K,): sum of both inner biases
    y_ptr,  # (N, K, V): relu(A x + B skip + b)
    V,
    C,
    CS,
    K,
    KP,
    CP: tl.constexpr,
    CSP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gate + residual + ReLU: two 1x1 convolutions with one accumulator."""
    n = tl.program_id(2)
    v = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    c = tl.arange(0, BLOCK_C)
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for c0 in range(0, CP, BLOCK_C):
        keep = (c0 + c < C)[None, :] & (v < V)[:, None]
        a = tl.load(x_ptr + (n * C + c0 + c)[None, :] * V + v[:, None], mask=keep, other=0.0)
        b = tl.load(wx_ptr + (c0 + c)[:, None] * KP + k[None, :])
        acc = tl.dot(a.to(b.dtype), b, acc, input_precision=PRECISION)
    for c0 in range(0, CSP, BLOCK_C):
        keep = (c0 + c < CS)[None, :] & (v < V)[:, None]
        a = tl.load(skip_ptr + (n * CS + c0 + c)[None, :] * V + v[:, None], mask=keep, other=0.0)
        b = tl.load(ws_ptr + (c0 + c)[:, None] * KP + k[None, :])
        acc = tl.dot(a.to(b.dtype), b, acc, input_precision=PRECISION)
    acc += tl.load(bias_ptr + k, mask=k < K, other=0.0)[None, :]
    inside = (v < V)[:, None] & (k < K)[None, :]
    tl.store(y_ptr + (n * K + k)[None, :] * V + v[:, None], tl.maximum(acc, 0.0), mask=inside)


@triton.jit
def voxtune_gate_apply(
    hidden_ptr,  # (N, K, V)
    w_ptr,  # (K,)
    bias_ptr,  # (1,)
    skip_ptr,  # (N, CS, V)
    y_ptr,  # (N, CS, V)
    V,
    K,
    CS,
    BLOCK: tl.constexpr,
):
    """sigmoid(w . hidden + b) * skip."""
    n = tl.program_id(1)
    v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    logit = tl.zeros((BLOCK,), tl.float32) + tl.load(bias_ptr)
    for k in range(K):
        logit += tl.load(hidden_ptr + (n * K + k) * V + v, mask=v < V, other=0.0) * tl.load(w_ptr + k)
    weight = 1.0 / (1.0 + tl.exp(-logit))
    for c in range(CS):
        at = (n * CS + c) * V + v
        tl.store(y_ptr + at, tl.load(skip_ptr + at, mask=v < V, other=0.0) * weight, mask=v < V)

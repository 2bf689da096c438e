"""Convolution as an implicit matrix product, fused with the preceding norm and with bias, GELU, residual and norm statistics.

Why: at 64 x 64 pixels and batch 1, a step is hundreds of tiny operations, and each launch costs more than its arithmetic. Here
one launch computes one convolution and the operations around it:

- im2col is implicit, in the addressing: 3x3 and 1x1 kernels, over an upsampled (Up) or pixel-unshuffled (Down) image, as one
  loop over taps and channels.
- The preceding norm is applied after the product. With x' = (x - mean) / deviation * w + b, conv(x') is linear in x:
      conv(x') = conv_{W w}(x) / deviation - (mean / deviation) * slope + shift,
  where slope is the sum of W w over the taps inside the image, and shift is the sum of W b over the same taps, plus the bias.
  Zero padding comes after the norm, so both differ at the border: nine cases (top, middle, bottom times left, middle, right),
  which are precomputed. The statistics are needed only in the epilogue. slope is the sum of the rounded weights, so that a
  constant image cancels exactly.
- Two sources, cat([a, b]) along the channels, are read where they are: every channel's address follows from its number.
- A residual of a different width is a 1x1 convolution of the block's input, with a separate accumulator.
- If there are too few pixels and output channels to fill the GPU, the reduction is split among programs (split-K). Each program
  stores a float32 partial sum; the last one to finish a tile adds them in a fixed order and runs the epilogue. It also resets
  the tile's counter, so that a CUDA graph can replay the kernel. No program waits for another, so they may run in any order.
- In a small product, each tensor core instruction waits for the previous one. With WAYS > 1, a loop iteration processes that
  many chunks, each with its own accumulator, divided among the warps; the accumulators are added once, at the end. The number
  of iterations is a run-time argument, so that the loop is not unrolled: the code of a kernel that runs once per step is not
  in the instruction cache, and fetching unrolled code costs more than a branch.
- The nine taps read the same pixels, so pixels are cached in L1 (NEAR). Each program reads its weights once; they bypass L1.

Legend: N batch, H W output pixels per sample, C input channels, K output channels, S partial sums, T tiles per sample.
"""

from __future__ import annotations

import triton
import triton.language as tl

from voxtune.kernels.convnext.common import leave_sums, load_sums, norm_of, release, wait
from voxtune.kernels.group_norm import activate


@triton.jit
def added(acc, WAYS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """(WAYS, BLOCK_M, BLOCK_K) summed over the first axis by halving; tl.sum would synchronise for every few values."""
    if WAYS == 2:
        p, q = tl.split(tl.permute(acc, (1, 2, 0)))
    else:
        tl.static_assert(WAYS == 4)
        p, q = tl.split(tl.permute(tl.reshape(acc, (2, 2, BLOCK_M, BLOCK_K)), (2, 3, 0, 1)))
        p, q = tl.split(p + q)
    return p + q


@triton.jit
def product(
    acc,  # (BLOCK_M, BLOCK_K) float32 of zeros
    x_ptr,  # (N, h, w, C), row stride LDX; h, w of the source
    w_ptr,  # (taps * C padded to full iterations, KP)
    n,
    y,  # (BLOCK_M,) row and column of each output pixel
    x,
    k,  # (BLOCK_K,) output channels
    first,  # iterations first to last - 1, each of WAYS chunks of BLOCK_C
    last,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    LDX: tl.constexpr,
    KP: tl.constexpr,
    SIDE: tl.constexpr,  # taps per axis
    STRIDE: tl.constexpr,
    DOUBLE: tl.constexpr,  # the source has half the size and is upsampled (nearest)
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WAYS: tl.constexpr,
    NEAR: tl.constexpr,
    PRECISION: tl.constexpr,
    b_ptr=0,  # (N, h, w, C - CA), row stride LDB: the second source if CA is not 0
    CA: tl.constexpr = 0,  # channels of the first of two sources
    LDB: tl.constexpr = 0,
):
    PAD: tl.constexpr = SIDE // 2 if SIDE % 2 else 0
    HS: tl.constexpr = H * STRIDE // (2 if DOUBLE else 1)
    WS: tl.constexpr = W * STRIDE // (2 if DOUBLE else 1)
    CACHE: tl.constexpr = ".ca" if NEAR and SIDE == 3 else ""
    column = tl.arange(0, BLOCK_C)
    # One bit per tap: whether it lies inside the image.
    reach = y * 0
    for bit in tl.static_range(SIDE * SIDE):
        yy, xx = y * STRIDE + (bit // SIDE - PAD), x * STRIDE + (bit % SIDE - PAD)
        inside = (yy >= 0) & (yy < H * STRIDE) & (xx >= 0) & (xx < W * STRIDE)
        reach |= inside.to(tl.int32) << bit
    if WAYS == 1:
        way, y, x, reach = 0, y[:, None], x[:, None], reach[:, None]
        along, down, across = column[None, :], column[:, None], k[None, :]
        v = acc
    else:
        way, y, x, reach = tl.arange(0, WAYS)[:, None, None], y[None, :, None], x[None, :, None], reach[None, :, None]
        along, down, across = column[None, None, :], column[None, :, None], k[None, None, :]
        v = tl.zeros((WAYS, BLOCK_M, BLOCK_K), tl.float32)
    b_at = w_ptr + (way * BLOCK_C + down) * KP + across
    for turn in range(first, last):
        chunk = turn * WAYS
        b = tl.load(b_at + chunk * (BLOCK_C * KP))
        if C % BLOCK_C:
            # A chunk spans several taps, so each column has its own.
            r = (chunk + way) * BLOCK_C + along
            tap, c = r // C, r % C
            first_c = c
            keep = ((reach >> tap) & 1) != 0
        elif C // BLOCK_C % WAYS:
            tap = (chunk + way) // (C // BLOCK_C)
            first_c = (chunk + way) % (C // BLOCK_C) * BLOCK_C
            c = first_c + along
            keep = ((reach >> tap) & 1) != 0
        else:
            tap = chunk // (C // BLOCK_C)
            first_c = chunk % (C // BLOCK_C) * BLOCK_C + way * BLOCK_C
            c = first_c + along
            keep = ((reach >> tap) & 1) != 0
        i, j = tap // SIDE - PAD, tap % SIDE - PAD
        if CA:
            # A chunk of one source has one condition.
            second = (c if CA % BLOCK_C else first_c) >= CA
            base, stride = tl.where(second, b_ptr - CA, x_ptr), tl.where(second, LDB, LDX)
        else:
            base, stride = x_ptr, LDX
        if DOUBLE:
            at = ((n * HS + ((y + i) >> 1)) * WS + ((x + j) >> 1)) * stride
        else:
            at = ((n * HS + y * STRIDE) * WS + x * STRIDE) * stride + (i * WS + j) * stride
        a = tl.load(base + at + c, mask=keep, other=0.0, cache_modifier=CACHE)
        v = tl.dot(a, b, v, input_precision=PRECISION)
    if WAYS > 1:
        v = added(v, WAYS, BLOCK_M, BLOCK_K)
    return v


@triton.jit
def around(
    shift_ptr,  # (9, KP) float32 with NORM, else (KP,)
    slope_ptr,  # (9, KP) float32; not read without NORM
    x2_ptr,  # (N, H, W, K), row stride LD2: added unchanged if RESIDUAL is 1
    row,  # (BLOCK_M,) pixel indices over all samples
    y,
    x,
    k,
    H,
    W,
    K,
    KP,
    LD2,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    n=0,
    term_ptr=0,  # (N, K) float32, row stride LDT: added to all pixels of a sample; read if LDT is not -1
    LDT: tl.constexpr = -1,
):
    """(shift, slope, residual) of a tile: the inputs of its epilogue. Load them early to hide the latency."""
    shift, slope, residual = 0.0, 0.0, 0.0
    if NORM:
        # 0 top or left, 1 inside, 2 bottom or right.
        case = (1 - (y == 0).to(tl.int32) + (y == H - 1).to(tl.int32)) * 3
        case += 1 - (x == 0).to(tl.int32) + (x == W - 1).to(tl.int32)
        at = case[:, None] * KP + k[None, :]
        shift, slope = tl.load(shift_ptr + at), tl.load(slope_ptr + at)
    else:
        shift = tl.load(shift_ptr + k)[None, :]
    if LDT >= 0:
        shift += tl.load(term_ptr + n * LDT + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
    if RESIDUAL == 1:
        residual = tl.load(x2_ptr + row[:, None] * LD2 + k[None, :], mask=(k < K)[None, :], other=0.0)
    return shift, slope, residual


@triton.jit
def finish(
    v,  # (BLOCK_M, BLOCK_K) float32: the product
    more,  # same shape: the product of the residual, or zeros
    shift,  # from `around`
    slope,
    residual,
    total,  # from `load_sums`
    squares,
    y_ptr,  # (N, H, W, K), row stride LDY
    sums_ptr,  # (N, 2, T) float32; not written without SUMS
    n,
    tile,
    row,
    k,
    K,
    LDY,
    COUNT,  # values per sample of the norm's input
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,  # 0 none, 1 added unchanged, 2 by a product
    ACTIVATION: tl.constexpr,
    SUMS: tl.constexpr,
    TILES,
):
    inside = (k < K)[None, :]
    if NORM:
        mean, rate = norm_of(total, squares, COUNT, EPS)
        v = (v - mean * slope) * rate + shift
    else:
        v += shift
    if RESIDUAL == 1:
        v += residual.to(tl.float32)
    if RESIDUAL == 2:
        v += more
    v = activate(v, 0.0, ACTIVATION)
    tl.store(y_ptr + row[:, None] * LDY + k[None, :], v.to(y_ptr.dtype.element_ty), mask=inside)
    if SUMS:
        leave_sums(sums_ptr, tl.where(inside, v, 0.0), n, tile, TILES)


@triton.jit
def conv_work(
    pid,
    x_ptr,  # see `product`
    w_ptr,
    x2_ptr,  # (N, H, W, C2), row stride LD2: source of the residual
    w2_ptr,  # (C2 padded, KP): its 1x1 weights if RESIDUAL is 2
    shift_ptr,  # see `around`
    slope_ptr,
    read_ptr,  # (N, 2, READ) float32: partial sums of the norm's input
    y_ptr,
    sums_ptr,
    parts_ptr,  # (tiles, S, BLOCK_M, BLOCK_K) float32; not written if SPLIT is 1
    count_ptr,  # (tiles,) int32; zero before and after the launch
    turns,  # loop iterations of the full reduction; a run-time value, so that the loop is not unrolled
    turns2,  # loop iterations of the residual
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    C2: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    LDX: tl.constexpr,
    LD2: tl.constexpr,
    LDY: tl.constexpr,
    ROWS: tl.constexpr,  # N * H * W
    SIDE: tl.constexpr,
    STRIDE: tl.constexpr,
    DOUBLE: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SUMS: tl.constexpr,
    READ: tl.constexpr,
    BLOCK_R: tl.constexpr,  # READ rounded up to a power of two
    EPS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WAYS: tl.constexpr,
    NEAR: tl.constexpr,
    PRECISION: tl.constexpr,
    xb_ptr=0,  # second source, see `product`
    x2b_ptr=0,  # second source of the residual's product
    term_ptr=0,  # see `around`
    CA: tl.constexpr = 0,
    LDB: tl.constexpr = 0,
    CA2: tl.constexpr = 0,
    LD2B: tl.constexpr = 0,
    LDT: tl.constexpr = -1,
):
    """One tile of a convolution. With SPLIT > 1: one partial sum, and the epilogue if it is the last of its tile."""
    TILES_K: tl.constexpr = KP // BLOCK_K
    TILES: tl.constexpr = (H * W // BLOCK_M) * TILES_K
    ALL: tl.constexpr = (ROWS // BLOCK_M) * TILES_K
    # The product of the residual is a separate part, since the norm must not scale it.
    PARTS: tl.constexpr = SPLIT + (1 if RESIDUAL == 2 else 0)
    tile = pid % ALL
    k = tile % TILES_K * BLOCK_K + tl.arange(0, BLOCK_K)
    block = tile // TILES_K
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    n = block * BLOCK_M // (H * W)
    p = row - n * (H * W)
    y, x = p // W, p % W
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    total, squares = 0.0, 0.0
    if NORM:
        total, squares = load_sums(read_ptr, n, READ, BLOCK_R)
    if SPLIT == 1:
        # Large tiles have no free registers to load the epilogue's inputs early.
        EARLY: tl.constexpr = BLOCK_M * BLOCK_K <= 2048
        if EARLY:
            shift, slope, residual = around(
                shift_ptr, slope_ptr, x2_ptr, row, y, x, k, H, W, K, KP, LD2, NORM, RESIDUAL, n, term_ptr, LDT
            )
        more = acc
        if RESIDUAL == 2:
            more = product(
                more, x2_ptr, w2_ptr, n, y, x, k, 0, turns2, H, W, C2, LD2, KP, 1, 1, False,
                BLOCK_M, BLOCK_K, BLOCK_C, WAYS, NEAR, PRECISION, x2b_ptr, CA2, LD2B,
            )  # fmt: skip
        acc = product(
            acc, x_ptr, w_ptr, n, y, x, k, 0, turns, H, W, C, LDX, KP, SIDE, STRIDE, DOUBLE,
            BLOCK_M, BLOCK_K, BLOCK_C, WAYS, NEAR, PRECISION, xb_ptr, CA, LDB,
        )  # fmt: skip
        if not EARLY:
            shift, slope, residual = around(
                shift_ptr, slope_ptr, x2_ptr, row, y, x, k, H, W, K, KP, LD2, NORM, RESIDUAL, n, term_ptr, LDT
            )
        finish(
            acc, more, shift, slope, residual, total, squares, y_ptr, sums_ptr, n, tile % TILES, row, k,
            K, LDY, H * W * C, EPS, NORM, RESIDUAL, ACTIVATION, SUMS, TILES,
        )  # fmt: skip
    else:
        s = pid // ALL
        if s < SPLIT:
            each = (turns + SPLIT - 1) // SPLIT
            acc = product(
                acc, x_ptr, w_ptr, n, y, x, k, s * each, tl.minimum((s + 1) * each, turns),
                H, W, C, LDX, KP, SIDE, STRIDE, DOUBLE, BLOCK_M, BLOCK_K, BLOCK_C, WAYS, NEAR, PRECISION, xb_ptr, CA, LDB,
            )  # fmt: skip
        elif RESIDUAL == 2:
            acc = product(
                acc, x2_ptr, w2_ptr, n, y, x, k, 0, turns2, H, W, C2, LD2, KP, 1, 1, False,
                BLOCK_M, BLOCK_K, BLOCK_C, WAYS, NEAR, PRECISION, x2b_ptr, CA2, LD2B,
            )  # fmt: skip
        inner = tl.arange(0, BLOCK_M)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        at = parts_ptr + tile * (PARTS * BLOCK_M * BLOCK_K) + inner
        tl.store(at + s * (BLOCK_M * BLOCK_K), acc)
        # All threads of the program write before the atomic add, which makes the writes visible to later programs.
        tl.debug_barrier()
        before = tl.atomic_add(count_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if before == PARTS - 1:
            tl.store(count_ptr + tile, 0)
            v = tl.load(at, cache_modifier=".cg")
            for one in tl.static_range(1, SPLIT):
                v += tl.load(at + one * (BLOCK_M * BLOCK_K), cache_modifier=".cg")
            more = v
            if RESIDUAL == 2:
                more = tl.load(at + SPLIT * (BLOCK_M * BLOCK_K), cache_modifier=".cg")
            shift, slope, residual = around(
                shift_ptr, slope_ptr, x2_ptr, row, y, x, k, H, W, K, KP, LD2, NORM, RESIDUAL, n, term_ptr, LDT
            )
            finish(
                v, more, shift, slope, residual, total, squares, y_ptr, sums_ptr, n, tile % TILES, row, k,
                K, LDY, H * W * C, EPS, NORM, RESIDUAL, ACTIVATION, SUMS, TILES,
            )  # fmt: skip


@triton.jit
def voxtune_conv(
    x_ptr, w_ptr, x2_ptr, w2_ptr, shift_ptr, slope_ptr, read_ptr, y_ptr, sums_ptr, parts_ptr, count_ptr,
    turns, turns2,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, C2: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    LDX: tl.constexpr, LD2: tl.constexpr, LDY: tl.constexpr, ROWS: tl.constexpr,
    SIDE: tl.constexpr, STRIDE: tl.constexpr, DOUBLE: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, GELU: tl.constexpr, SUMS: tl.constexpr,
    READ: tl.constexpr, BLOCK_R: tl.constexpr, EPS: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, WAYS: tl.constexpr,
    NEAR: tl.constexpr, PRECISION: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """A convolution; each program computes one tile or one partial sum of a tile (`conv_work`)."""
    release(CHAINED)
    wait(CHAINED)
    conv_work(
        tl.program_id(0), x_ptr, w_ptr, x2_ptr, w2_ptr, shift_ptr, slope_ptr, read_ptr, y_ptr, sums_ptr, parts_ptr,
        count_ptr, turns, turns2, H, W, C, C2, K, KP, LDX, LD2, LDY, ROWS, SIDE, STRIDE, DOUBLE, NORM, RESIDUAL,
        "gelu" if GELU else "none", SUMS, READ, BLOCK_R, EPS, SPLIT, BLOCK_M, BLOCK_K, BLOCK_C, WAYS, NEAR, PRECISION,
    )  # fmt: skip

"""Convolution as a matrix product over what its neighbours need: norm before it, bias, GELU, residual and sums after it.

Why: at 64 x 64 pixels and batch 1 a step is hundreds of tiny operations, and each launch costs more than its arithmetic. Here one
launch is one convolution with everything around it:

- The gather is in the addressing (im2col is never written): 3x3 and 1x1, over a doubled image (Up) or over pixel-unshuffled
  ones (Down), as one K loop of taps times channels.
- The norm before it is applied after it. With x' = (x - mean) / deviation * w + b, conv(x') is linear in x:
      conv(x') = conv_{W w}(x) / deviation - (mean / deviation) * slope + shift,
  slope = the sum of W w over the taps inside the image, shift = the sum of W b over them, plus the bias. Zero padding comes after
  the norm, so both differ at the border: nine cases (top, middle, bottom times left, middle, right), made ahead. The statistics
  are needed only at the end, and slope is the sum of the rounded weights, so that a constant cancels exactly.
- A residual of another width is a 1x1 convolution of the block's input: more K, in an accumulator of its own.
- Where pixels and channels out are too few to fill the card, the sum is split: programs leave float32 parts, and the one that
  comes last to a tile adds them in a fixed order and does what comes after. It also sets the tile's count back, so a recorded
  graph may replay it; nobody waits, so any number of programs will do, one after the other too.
- A small product is a chain: each step on the matrix units waits for the one before. With WAYS a turn of the loop takes so many
  chunks, and the program's warps share them: each has an accumulator of its own, added up once at the end. Turns are an
  argument, so that the loop stays one: a kernel that runs once a step has its code in no near cache, where straight code costs
  more than a branch.
- The taps read the same pixels nine times: by the L1 (NEAR), while the weights, which a program reads once, go past it.

Legend: N batch, H W pixels out of a sample, C channels in, K channels out, S parts of the sum, T tiles of a sample.
"""

from __future__ import annotations

import triton
import triton.language as tl

from voxtune.kernels.convnext.common import gelu, leave_sums, load_sums, norm_of, release, wait


@triton.jit
def added(acc, WAYS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """(WAYS, BLOCK_M, BLOCK_K) summed over the first axis, by halves: a plain sum meets at a barrier for every few values."""
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
    x_ptr,  # (N, h, w, C), rows of LDX; h, w of the source
    w_ptr,  # (taps * C padded to whole turns, KP)
    n,
    y,  # (BLOCK_M,) pixel rows and columns of the result
    x,
    k,  # (BLOCK_K,) channels out
    first,  # of the turns of WAYS chunks of BLOCK_C
    last,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    LDX: tl.constexpr,
    KP: tl.constexpr,
    SIDE: tl.constexpr,  # taps along an axis
    STRIDE: tl.constexpr,
    DOUBLE: tl.constexpr,  # the source is at half the size, taken nearest
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WAYS: tl.constexpr,
    NEAR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    PAD: tl.constexpr = SIDE // 2 if STRIDE == 1 else 0
    HS: tl.constexpr = H * STRIDE // (2 if DOUBLE else 1)
    WS: tl.constexpr = W * STRIDE // (2 if DOUBLE else 1)
    CACHE: tl.constexpr = ".ca" if NEAR and SIDE == 3 else ""
    column = tl.arange(0, BLOCK_C)
    # A bit for each tap that lies inside the image.
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
            # A chunk reaches over several taps: each column has its own.
            r = (chunk + way) * BLOCK_C + along
            tap, c = r // C, r % C
            keep = ((reach >> tap) & 1) != 0
        elif C // BLOCK_C % WAYS:
            tap = (chunk + way) // (C // BLOCK_C)
            c = (chunk + way) % (C // BLOCK_C) * BLOCK_C + along
            keep = ((reach >> tap) & 1) != 0
        else:
            tap = chunk // (C // BLOCK_C)
            c = chunk % (C // BLOCK_C) * BLOCK_C + way * BLOCK_C + along
            keep = ((reach >> tap) & 1) != 0
        i, j = tap // SIDE - PAD, tap % SIDE - PAD
        if DOUBLE:
            at = ((n * HS + ((y + i) >> 1)) * WS + ((x + j) >> 1)) * LDX
        else:
            at = ((n * HS + y * STRIDE) * WS + x * STRIDE) * LDX + (i * WS + j) * LDX
        a = tl.load(x_ptr + at + c, mask=keep, other=0.0, cache_modifier=CACHE)
        v = tl.dot(a, b, v, input_precision=PRECISION)
    if WAYS > 1:
        v = added(v, WAYS, BLOCK_M, BLOCK_K)
    return v


@triton.jit
def around(
    shift_ptr,  # (9, KP) float32 with NORM, else (KP,)
    slope_ptr,  # (9, KP) float32; unread without NORM
    x2_ptr,  # (N, H, W, K), rows of LD2: added as it is when RESIDUAL is 1
    row,  # (BLOCK_M,) pixels, counted over all samples
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
):
    """What a tile needs beside its product: (shift, slope, residual). Read early, so that nobody waits for it at the end."""
    shift, slope, residual = 0.0, 0.0, 0.0
    if NORM:
        # 0 top or left, 1 inside, 2 bottom or right.
        case = (1 - (y == 0).to(tl.int32) + (y == H - 1).to(tl.int32)) * 3
        case += 1 - (x == 0).to(tl.int32) + (x == W - 1).to(tl.int32)
        at = case[:, None] * KP + k[None, :]
        shift, slope = tl.load(shift_ptr + at), tl.load(slope_ptr + at)
    else:
        shift = tl.load(shift_ptr + k)[None, :]
    if RESIDUAL == 1:
        residual = tl.load(x2_ptr + row[:, None] * LD2 + k[None, :], mask=(k < K)[None, :], other=0.0)
    return shift, slope, residual


@triton.jit
def finish(
    v,  # (BLOCK_M, BLOCK_K) float32: the product
    more,  # the same: the residual's product, or zeros
    shift,  # of around
    slope,
    residual,
    total,  # of load_sums
    squares,
    y_ptr,  # (N, H, W, K), rows of LDY
    sums_ptr,  # (N, 2, T) float32; unwritten without SUMS
    n,
    tile,
    row,
    k,
    K,
    LDY,
    COUNT,  # values a sample of what the norm reads
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,  # 0 none, 1 added as it is, 2 by a product
    GELU: tl.constexpr,
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
    if GELU:
        v = gelu(v)
    tl.store(y_ptr + row[:, None] * LDY + k[None, :], v.to(y_ptr.dtype.element_ty), mask=inside)
    if SUMS:
        leave_sums(sums_ptr, tl.where(inside, v, 0.0), n, tile, TILES)


@triton.jit
def conv_work(
    pid,
    x_ptr,  # see product
    w_ptr,
    x2_ptr,  # (N, H, W, C2), rows of LD2: the residual's source
    w2_ptr,  # (C2 padded, KP): its 1x1 weights, with RESIDUAL 2
    shift_ptr,  # see around
    slope_ptr,
    read_ptr,  # (N, 2, READ) float32: the sums of what the norm reads
    y_ptr,
    sums_ptr,
    parts_ptr,  # (tiles, S, BLOCK_M, BLOCK_K) float32; unwritten when SPLIT is 1
    count_ptr,  # (tiles,) int32, zero before and after
    turns,  # of the whole sum: a run-time value, so that the loop over them stays one
    turns2,  # of the residual's
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
    GELU: tl.constexpr,
    SUMS: tl.constexpr,
    READ: tl.constexpr,
    BLOCK_R: tl.constexpr,  # READ, rounded up to a power of two
    EPS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WAYS: tl.constexpr,
    NEAR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of a convolution; with SPLIT one part of its sum, and the rest where it is the tile's last."""
    TILES_K: tl.constexpr = KP // BLOCK_K
    TILES: tl.constexpr = (H * W // BLOCK_M) * TILES_K
    ALL: tl.constexpr = (ROWS // BLOCK_M) * TILES_K
    # The residual's product, which no norm may scale, is a part of its own.
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
        # Large tiles have no registers to spare for it.
        EARLY: tl.constexpr = BLOCK_M * BLOCK_K <= 2048
        if EARLY:
            shift, slope, residual = around(
                shift_ptr, slope_ptr, x2_ptr, row, y, x, k, H, W, K, KP, LD2, NORM, RESIDUAL
            )
        more = acc
        if RESIDUAL == 2:
            more = product(
                more, x2_ptr, w2_ptr, n, y, x, k, 0, turns2, H, W, C2, LD2, KP, 1, 1, False,
                BLOCK_M, BLOCK_K, BLOCK_C, WAYS, NEAR, PRECISION,
            )  # fmt: skip
        acc = product(
            acc, x_ptr, w_ptr, n, y, x, k, 0, turns, H, W, C, LDX, KP, SIDE, STRIDE, DOUBLE,
            BLOCK_M, BLOCK_K, BLOCK_C, WAYS, NEAR, PRECISION,
        )  # fmt: skip
        if not EARLY:
            shift, slope, residual = around(
                shift_ptr, slope_ptr, x2_ptr, row, y, x, k, H, W, K, KP, LD2, NORM, RESIDUAL
            )
        finish(
            acc, more, shift, slope, residual, total, squares, y_ptr, sums_ptr, n, tile % TILES, row, k,
            K, LDY, H * W * C, EPS, NORM, RESIDUAL, GELU, SUMS, TILES,
        )  # fmt: skip
    else:
        s = pid // ALL
        if s < SPLIT:
            each = (turns + SPLIT - 1) // SPLIT
            acc = product(
                acc, x_ptr, w_ptr, n, y, x, k, s * each, tl.minimum((s + 1) * each, turns),
                H, W, C, LDX, KP, SIDE, STRIDE, DOUBLE, BLOCK_M, BLOCK_K, BLOCK_C, WAYS, NEAR, PRECISION,
            )  # fmt: skip
        elif RESIDUAL == 2:
            acc = product(
                acc, x2_ptr, w2_ptr, n, y, x, k, 0, turns2, H, W, C2, LD2, KP, 1, 1, False,
                BLOCK_M, BLOCK_K, BLOCK_C, WAYS, NEAR, PRECISION,
            )  # fmt: skip
        inner = tl.arange(0, BLOCK_M)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        at = parts_ptr + tile * (PARTS * BLOCK_M * BLOCK_K) + inner
        tl.store(at + s * (BLOCK_M * BLOCK_K), acc)
        # All lanes' writes come before the one lane's count, which makes them seen by whoever counts after.
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
                shift_ptr, slope_ptr, x2_ptr, row, y, x, k, H, W, K, KP, LD2, NORM, RESIDUAL
            )
            finish(
                v, more, shift, slope, residual, total, squares, y_ptr, sums_ptr, n, tile % TILES, row, k,
                K, LDY, H * W * C, EPS, NORM, RESIDUAL, GELU, SUMS, TILES,
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
    """A convolution, a tile or a part of one a program: conv_work."""
    release(CHAINED)
    wait(CHAINED)
    conv_work(
        tl.program_id(0), x_ptr, w_ptr, x2_ptr, w2_ptr, shift_ptr, slope_ptr, read_ptr, y_ptr, sums_ptr, parts_ptr,
        count_ptr, turns, turns2, H, W, C, C2, K, KP, LDX, LD2, LDY, ROWS, SIDE, STRIDE, DOUBLE, NORM, RESIDUAL, GELU,
        SUMS, READ, BLOCK_R, EPS, SPLIT, BLOCK_M, BLOCK_K, BLOCK_C, WAYS, NEAR, PRECISION,
    )  # fmt: skip

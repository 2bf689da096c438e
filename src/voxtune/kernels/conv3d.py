"""3x3x3 convolution of channels-last volumes, with what follows it in its epilogue; also 1x3x3, 3x1x1 and other kernels of ones
and threes.

Why: three quarters of a 3D U-Net's arithmetic are 3x3x3 convolutions with 64 output channels, where the matrix units wait for
shared memory: each of 27 taps loads the whole tile again. Here a program computes two neighbouring output planes. Of the four
input planes that they need, the inner two serve both, so that each is loaded once for two products. The products of one step
use different accumulators: two on the same one would wait for each other.

1. The bulk copy engine loads tiles (tensor descriptors) and fills what is outside the volume with zeros: the padding, of any
   width before and after each axis (video networks pad the time axis in front only). Devices without the engine load by masked
   pointers: descriptors would become loads of single values there.
2. conv(cat([a, b])) reads two sources, one after the other, and the concatenation is never written. The weights have one matrix
   per tap for the channels of both.
3. The epilogue adds a shift per channel (bias, time embedding) and a residual, and computes the statistics of its output, so that
   the next norm need not read it again: see group_norm.py for their form.
4. Small volumes fill too few multiprocessors: there several programs share the taps of a tile and write float32 partial sums,
   and a second kernel adds these in a fixed order and does the epilogue.

Legend: N batch, D H W voxels of the result, V = D*H*W, C input channels (CA, CB of each source), K output channels, P tiles (or
stretches) of voxels. KD KH KW are the extents of the kernel; a padding is (before, after) along depth, height and width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from voxtune.kernels.conv3d_join import join, stretches_of_join
from voxtune.kernels.conv3d_tiles import Conv3dTile, Device, has_copy_engine, tiles
from voxtune.kernels.group_norm import row_stride
from voxtune.kernels.measured_tiles import chosen
from voxtune.kernels.pointwise import why_no_shift
from voxtune.kernels.precompile import ready

CUBE = (3, 3, 3)
AROUND = (1, 1, 1, 1, 1, 1)


def conv3d_reference(
    sources: tuple[Tensor, ...],
    packed: Tensor,
    shift_NC: Tensor | None = None,
    residual: Tensor | None = None,
    statistics: bool = False,
    kernel: tuple[int, ...] = CUBE,
    padding: tuple[int, ...] = AROUND,
) -> tuple[Tensor, Tensor | None]:
    """The same in plain PyTorch, sums in float32 (float64 for float64); the statistics as one stretch."""
    x = torch.cat(tuple(sources), dim=1) if len(sources) > 1 else sources[0]
    wide = torch.promote_types(x.dtype, torch.float32)
    d, h, w = padding[:2], padding[2:4], padding[4:]
    y = F.conv3d(F.pad(x.to(wide), (*w, *h, *d)), unpack(packed, kernel).to(wide))
    if shift_NC is not None:
        y = y + shift_NC.to(wide)[:, :, None, None, None]
    if residual is not None:
        y = y + residual.to(wide)
    y = y.to(x.dtype)
    if not statistics:
        return y, None
    y_NCV = y.flatten(2).to(wide)
    count = torch.full_like(y_NCV[..., 0], y_NCV.shape[2])
    mean = y_NCV.mean(dim=2)
    m2 = (y_NCV - mean[..., None]).square().sum(dim=2)
    return y, torch.stack([count, mean, m2], dim=1)[:, None].to(torch.float32)


def pack(weight: Tensor) -> Tensor:
    """A convolution's weight (K, C, KD, KH, KW) as (KD * KH * KW, K, C): one contiguous matrix per tap."""
    return weight.permute(2, 3, 4, 0, 1).reshape(-1, *weight.shape[:2]).contiguous()


def unpack(packed: Tensor, kernel: tuple[int, ...] = CUBE) -> Tensor:
    """The inverse of `pack`."""
    return packed.view(*kernel, *packed.shape[1:]).permute(3, 4, 0, 1, 2)


def result_size(source: Tensor, kernel: tuple[int, ...], padding: tuple[int, ...]) -> tuple[int, ...]:
    """(D, H, W) of the result."""
    return tuple(
        size + before + after - extent + 1
        for size, extent, before, after in zip(source.shape[2:], kernel, padding[::2], padding[1::2], strict=True)
    )


@triton.jit
def load_voxels(
    x,  # (N, XD, XH, XW, C): a descriptor of tiles (1, 1, TH, TW, TC), or a pointer
    n,
    d,
    h0,
    w0,
    c0,
    XD,
    XH,
    XW,
    C,
    TH: tl.constexpr,
    TW: tl.constexpr,
    TC: tl.constexpr,
    BULK: tl.constexpr,
):
    """A tile (TH * TW, TC) of a plane, zeros outside."""
    if BULK:
        tile = x.load([n, d, h0, w0, c0]).reshape(TH * TW, TC)
    else:
        v, c = tl.arange(0, TH * TW), c0 + tl.arange(0, TC)
        h, w = h0 + v // TW, w0 + v % TW
        # The plane's own test as a tile too: the interpreter cannot join a tile's mask with a scalar's.
        depth = d + tl.zeros_like(v)
        inside = (h >= 0) & (h < XH) & (w >= 0) & (w < XW) & (depth >= 0) & (depth < XD)
        plane = x + (n * XD + d).to(tl.int64) * XH * XW * C
        keep = inside[:, None] & (c < C)[None, :]
        tile = tl.load(plane + ((h * XW + w)[:, None] * C + c[None, :]), mask=keep, other=0.0)
    return tile


@triton.jit
def _matrix(
    w,  # (taps * K, WIDTH): a descriptor of tiles (TK, TC), or a pointer
    tap,
    k0,
    first,  # the source's first column
    c0,
    K,
    C,
    WIDTH,
    TK: tl.constexpr,
    TC: tl.constexpr,
    BULK: tl.constexpr,
):
    """A tap's weights (TK, TC). Columns past the source meet the zeros of its tile."""
    if BULK:
        matrix = w.load([tap * K + k0, first + c0])
    else:
        k, c = k0 + tl.arange(0, TK), c0 + tl.arange(0, TC)
        keep = (k < K)[:, None] & (c < C)[None, :]
        matrix = tl.load(w + ((tap * K + k)[:, None] * WIDTH + (first + c)[None, :]), mask=keep, other=0.0)
    return matrix


@triton.jit
def _product(accumulator, x, w, SWAP: tl.constexpr):
    """One tap: x (voxels, channels), w (output channels, channels). SWAP makes output channels the rows of the product."""
    return tl.dot(w, x.T, accumulator) if SWAP else tl.dot(x, w.T, accumulator)


@triton.jit
def _inner_planes(
    lower,
    upper,
    x,
    w,
    steps,  # (first, end), of 2 * KH * KW taps and all chunks of the source
    at,
    size,
    matrix,
    KH: tl.constexpr,
    KW: tl.constexpr,
    TH: tl.constexpr,
    TW: tl.constexpr,
    TK: tl.constexpr,
    TC: tl.constexpr,
    SWAP: tl.constexpr,
    BULK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The two input planes from d that both output planes see: one tile of x, two of weights."""
    PLANE: tl.constexpr = KH * KW
    n, d, h0, w0, k0 = at
    XD, XH, XW, C = size
    column, K, WIDTH = matrix
    chunks = (C + TC - 1) // TC
    for step in tl.range(steps[0], steps[1], num_stages=STAGES):
        tap = step // chunks
        c0 = step % chunks * TC
        h, v = h0 + tap // KW % KH, w0 + tap % KW
        tile = load_voxels(x, n, d + tap // PLANE, h, v, c0, XD, XH, XW, C, TH, TW, TC, BULK)
        # All loads before the products: one barrier a step.
        w_lower = _matrix(w, tap + PLANE, k0, column, c0, K, C, WIDTH, TK, TC, BULK)
        w_upper = _matrix(w, tap, k0, column, c0, K, C, WIDTH, TK, TC, BULK)
        lower = _product(lower, tile, w_lower, SWAP)
        upper = _product(upper, tile, w_upper, SWAP)
    return lower, upper


@triton.jit
def _outer_planes(
    lower,
    upper,
    x,
    w,
    steps,  # (first, end), of KH * KW taps and all chunks of the source
    at,
    size,
    matrix,
    KD: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    TH: tl.constexpr,
    TW: tl.constexpr,
    TK: tl.constexpr,
    TC: tl.constexpr,
    SWAP: tl.constexpr,
    BULK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The input planes d and d + KD, each seen by one output plane. Without taps along the depth both use the same weights."""
    n, d, h0, w0, k0 = at
    XD, XH, XW, C = size
    column, K, WIDTH = matrix
    chunks = (C + TC - 1) // TC
    for step in tl.range(steps[0], steps[1], num_stages=STAGES):
        tap = step // chunks
        c0 = step % chunks * TC
        h, v = h0 + tap // KW, w0 + tap % KW
        below = load_voxels(x, n, d, h, v, c0, XD, XH, XW, C, TH, TW, TC, BULK)
        above = load_voxels(x, n, d + KD, h, v, c0, XD, XH, XW, C, TH, TW, TC, BULK)
        w_lower = _matrix(w, tap, k0, column, c0, K, C, WIDTH, TK, TC, BULK)
        w_upper = w_lower
        if KD > 1:
            w_upper = _matrix(w, tap + (KD - 1) * KH * KW, k0, column, c0, K, C, WIDTH, TK, TC, BULK)
        lower = _product(lower, below, w_lower, SWAP)
        upper = _product(upper, above, w_upper, SWAP)
    return lower, upper


@triton.jit
def _store_plane(
    y,  # (N, D, H, W, K): a descriptor of tiles (1, 1, TH, TW, TK), or a pointer
    values,  # (TH * TW, TK)
    n,
    d,
    h0,
    w0,
    k0,
    D,
    H,
    W,
    K,
    TH: tl.constexpr,
    TW: tl.constexpr,
    TK: tl.constexpr,
    BULK: tl.constexpr,
):
    if BULK:
        y.store([n, d, h0, w0, k0], values.reshape(1, 1, TH, TW, TK))
    else:
        v, k = tl.arange(0, TH * TW), k0 + tl.arange(0, TK)
        h, w = h0 + v // TW, w0 + v % TW
        keep = ((h < H) & (w < W) & (d + tl.zeros_like(v) < D))[:, None] & (k < K)[None, :]
        plane = y + (n * D + d).to(tl.int64) * H * W * K
        tl.store(plane + ((h * W + w)[:, None] * K + k[None, :]), values, mask=keep)


# Sizes are not specialised: one compiled kernel is used for all volume sizes, numbers of channels and paddings.
@triton.jit(
    do_not_specialize=[
        *("N", "D", "H", "W", "XD", "XH", "XW", "eighths_a", "eighths_b", "eighths_k"),
        *("before_d", "before_h", "before_w", "splits", "shift_stride"),
    ]
)
def voxtune_conv3d(  # noqa: PLR0915
    a,  # (N, XD, XH, XW, CA), tiles of (1, 1, TH, TW, TC); this and the next four are descriptors if BULK, else pointers
    b,  # (N, XD, XH, XW, CB) or None
    weights,  # (KD * KH * KW * K, CA + CB), tiles of (TK, TC)
    y,  # (N, D, H, W, K), or float32 (splits * N, D, H, W, K); tiles of (1, 1, TH, TW, TK)
    residual,  # (N, D, H, W, K) or None
    shift_ptr,  # (N, K) or (1, K), of any float type, or None
    statistics_ptr,  # (N, P, 3, K) float32 or None
    N,
    D,
    H,
    W,
    XD,
    XH,
    XW,
    eighths_a,  # CA / 8: so the compiler knows that rows are aligned to 16 bytes, whatever the number of channels
    eighths_b,
    eighths_k,
    before_d,
    before_h,
    before_w,
    splits,
    shift_stride,  # from row to row, or 0 when one shift serves the batch
    KD: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    TH: tl.constexpr,
    TW: tl.constexpr,
    TK: tl.constexpr,
    TC: tl.constexpr,
    SWAP: tl.constexpr,
    BULK: tl.constexpr,
    INNER_STAGES: tl.constexpr,
    OUTER_STAGES: tl.constexpr,
):
    VOXELS: tl.constexpr = TH * TW
    SHAPE: tl.constexpr = (TK, VOXELS) if SWAP else (VOXELS, TK)
    CA, CB, K = eighths_a * 8, eighths_b * 8, eighths_k * 8
    WIDTH = (eighths_a + eighths_b) * 8
    columns = (K + TK - 1) // TK
    # Neighbours in the grid share input: output channels first, then along w, h, d.
    tile, split = tl.program_id(0) // columns, tl.program_id(1)
    k0 = tl.program_id(0) % columns * TK
    across, down = (W + TW - 1) // TW, (H + TH - 1) // TH
    P = across * down * ((D + 1) // 2)
    n, p = tile // P, tile % P
    w0 = p % across * TW
    h0 = p // across % down * TH
    d0 = p // (across * down) * 2

    # Steps in this order: the first source's inner planes, the second's, then the outer planes of both.
    steps_a, steps_b = KH * KW * ((CA + TC - 1) // TC), KH * KW * ((CB + TC - 1) // TC)
    steps = KD * (steps_a + steps_b)
    first, last = steps * split // splits, steps * (split + 1) // splits
    lower = tl.zeros(SHAPE, tl.float32)
    upper = tl.zeros(SHAPE, tl.float32)
    size_a, size_b = (XD, XH, XW, CA), (XD, XH, XW, CB)
    matrix_a, matrix_b = (0, K, WIDTH), (CA, K, WIDTH)
    outer = (n, d0 - before_d, h0 - before_h, w0 - before_w, k0)
    if KD == 3:
        inner = (n, d0 - before_d + 1, h0 - before_h, w0 - before_w, k0)
        part = (tl.minimum(first, 2 * steps_a), tl.minimum(last, 2 * steps_a))
        lower, upper = _inner_planes(
            lower, upper, a, weights, part, inner, size_a, matrix_a, KH, KW, TH, TW, TK, TC, SWAP, BULK, INNER_STAGES
        )
        first, last = first - part[0], last - part[1]
        if b is not None:
            part = (tl.minimum(first, 2 * steps_b), tl.minimum(last, 2 * steps_b))
            lower, upper = _inner_planes(
                lower,
                upper,
                b,
                weights,
                part,
                inner,
                size_b,
                matrix_b,
                KH,
                KW,
                TH,
                TW,
                TK,
                TC,
                SWAP,
                BULK,
                INNER_STAGES,
            )
            first, last = first - part[0], last - part[1]
    part = (tl.minimum(first, steps_a), tl.minimum(last, steps_a))
    lower, upper = _outer_planes(
        lower, upper, a, weights, part, outer, size_a, matrix_a, KD, KH, KW, TH, TW, TK, TC, SWAP, BULK, OUTER_STAGES
    )
    if b is not None:
        part = (first - part[0], last - part[1])
        lower, upper = _outer_planes(
            lower,
            upper,
            b,
            weights,
            part,
            outer,
            size_b,
            matrix_b,
            KD,
            KH,
            KW,
            TH,
            TW,
            TK,
            TC,
            SWAP,
            BULK,
            OUTER_STAGES,
        )

    if SWAP:
        lower, upper = lower.T, upper.T
    k = k0 + tl.arange(0, TK)
    if shift_ptr is not None:
        shift = tl.load(shift_ptr + n * shift_stride + k, mask=k < K, other=0.0).to(tl.float32)
        lower += shift[None, :]
        upper += shift[None, :]
    if residual is not None:
        lower += load_voxels(residual, n, d0, h0, w0, k0, D, H, W, K, TH, TW, TK, BULK).to(tl.float32)
        upper += load_voxels(residual, n, d0 + 1, h0, w0, k0, D, H, W, K, TH, TW, TK, BULK).to(tl.float32)
    dtype: tl.constexpr = y.dtype if BULK else y.dtype.element_ty
    y_lower, y_upper = lower.to(dtype), upper.to(dtype)
    _store_plane(y, y_lower, split * N + n, d0, h0, w0, k0, D, H, W, K, TH, TW, TK, BULK)
    _store_plane(y, y_upper, split * N + n, d0 + 1, h0, w0, k0, D, H, W, K, TH, TW, TK, BULK)
    if statistics_ptr is not None:
        v = tl.arange(0, VOXELS)
        inside = ((h0 + v // TW < H) & (w0 + v % TW < W))[:, None]
        both = d0 + 1 < D
        lower = tl.where(inside, y_lower.to(tl.float32), 0.0)
        upper = tl.where(inside & both, y_upper.to(tl.float32), 0.0)
        count = (tl.minimum(TH, H - h0) * tl.minimum(TW, W - w0) * tl.minimum(2, D - d0)).to(tl.float32)
        mean = (tl.sum(lower, axis=0) + tl.sum(upper, axis=0)) / count
        lower = tl.where(inside, lower - mean[None, :], 0.0)
        upper = tl.where(inside & both, upper - mean[None, :], 0.0)
        at = statistics_ptr + tile.to(tl.int64) * 3 * K + k
        tl.store(at, tl.zeros_like(mean) + count, mask=k < K)
        tl.store(at + K, mean, mask=k < K)
        tl.store(at + 2 * K, tl.sum(lower * lower, axis=0) + tl.sum(upper * upper, axis=0), mask=k < K)


def why_not(  # noqa: PLR0911
    sources: tuple[Tensor, ...],
    packed: Tensor,
    shift_NC: Tensor | None = None,
    residual: Tensor | None = None,
    kernel: tuple[int, ...] = CUBE,
    padding: tuple[int, ...] = AROUND,
) -> str | None:
    """The reason why the kernels do not apply, or None."""
    first, K = sources[0], packed.shape[1]
    if (reason := why_not_weight(K, tuple(s.shape[1] for s in sources), kernel)) is not None:
        return reason
    if first.dtype not in (torch.bfloat16, torch.float16):
        return f"type {first.dtype} has no kernel"
    if any(s.dtype != first.dtype or s.shape[0] != first.shape[0] or s.shape[2:] != first.shape[2:] for s in sources):
        return "the sources differ in type, batch or size"
    taps = kernel[0] * kernel[1] * kernel[2]
    if packed.dtype != first.dtype or packed.shape != (taps, K, sum(s.shape[1] for s in sources)):
        return f"weights of {packed.dtype} and shape {tuple(packed.shape)} for a {kernel} kernel over sources of {first.dtype}"
    if not packed.is_contiguous() or packed.data_ptr() % 16:
        return "the weights are not contiguous, or not aligned"
    if min(padding) < 0:
        return "a negative padding"
    size = result_size(first, kernel, padding)
    tensors = (*sources, *(() if residual is None else (residual,)))
    if residual is not None and (residual.dtype != first.dtype or residual.shape != (first.shape[0], K, *size)):
        return f"a residual of {residual.dtype} and shape {tuple(residual.shape)}"
    if any(not t.movedim(1, -1).is_contiguous() for t in tensors):
        return "a source, or the residual, is not channels-last"
    if min(size) < 1 or any(t.numel() == 0 or t.data_ptr() % 16 for t in tensors):
        return "an empty or unaligned source, residual or result"
    # Offsets within a plane are 32-bit integers.
    if any(t.shape[3] * t.shape[4] * t.shape[1] >= 2**31 for t in tensors) or size[1] * size[2] * K >= 2**31:
        return "a plane of 2^31 values or more"
    return why_no_shift(shift_NC, first.shape[0], K)


def why_not_weight(K: int, channels: tuple[int, ...], kernel: tuple[int, ...]) -> str | None:
    """The part of `why_not` that a weight and the channels of the sources decide."""
    if len(kernel) != 3 or any(extent not in (1, 3) for extent in kernel):
        return f"a kernel of extents {kernel}: each must be 1 or 3"
    if len(channels) > 2:
        return f"{len(channels)} sources: at most two"
    odd = [c for c in (*channels, K) if c % 8]
    return f"{odd[0]} channels, not a multiple of 8" if odd else None


def conv3d(
    sources: tuple[Tensor, ...],
    packed: Tensor,
    shift_NC: Tensor | None = None,
    residual: Tensor | None = None,
    statistics: bool = False,
    kernel: tuple[int, ...] = CUBE,
    padding: tuple[int, ...] = AROUND,
    *,
    checked: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """conv(cat(sources)) + shift + residual, channels-last, and its statistics (N, P, 3, K) if requested.

    `why_not` must be None; `checked`: the caller has called it.
    """
    assert checked or (reason := why_not(sources, packed, shift_NC, residual, kernel, padding)) is None, reason
    D, H, W = result_size(sources[0], kernel, padding)
    channels, device = tuple(s.shape[1] for s in sources), Device.of(sources[0].device)
    N, K = sources[0].shape[0], packed.shape[1]
    tile = chosen(
        "conv3d",
        (N, D, H, W, *channels, K, *kernel),
        sources[0],
        lambda: tiles(N, D, H, W, channels, K, kernel=kernel, device=device),
    )
    return convolve(sources, packed, tile, shift_NC, residual, statistics, kernel, padding)


def convolve(
    sources: tuple[Tensor, ...],
    packed: Tensor,
    tile: Conv3dTile,
    shift_NC: Tensor | None = None,
    residual: Tensor | None = None,
    statistics: bool = False,
    kernel: tuple[int, ...] = CUBE,
    padding: tuple[int, ...] = AROUND,
    *,
    bulk: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """conv3d with a given tile. `bulk`: whether to load by descriptors (default: if the device has a copy engine)."""
    N, CA, XD, XH, XW = sources[0].shape
    D, H, W = result_size(sources[0], kernel, padding)
    K = packed.shape[1]
    CB = sources[1].shape[1] if len(sources) > 1 else 0
    inside = [channels_inside(s) for s in sources]
    r_NDHWK = None if residual is None else channels_inside(residual)
    assert packed.is_contiguous(), "the weights are not contiguous"
    shift_stride = row_stride(shift_NC)
    y_NDHWK = torch.empty((N, D, H, W, K), dtype=sources[0].dtype, device=sources[0].device)
    P = triton.cdiv(W, tile.w) * triton.cdiv(H, tile.h) * triton.cdiv(D, 2)
    stretches = P if tile.split == 1 else stretches_of_join(N, D * H * W, K)
    moments = torch.empty((N, stretches, 3, K), dtype=torch.float32, device=y_NDHWK.device) if statistics else None
    if tile.halo:
        from voxtune.kernels import conv3d_halo

        conv3d_halo.launch(inside, packed, y_NDHWK, r_NDHWK, shift_NC, moments, tile, shift_stride, padding[::2])
        return y_NDHWK.movedim(-1, 1), moments
    unsplit = tile.split == 1
    target = y_NDHWK if unsplit else y_NDHWK.new_empty((tile.split * N, D, H, W, K), dtype=torch.float32)
    bulk = has_copy_engine(y_NDHWK.device) if bulk is None else bulk

    def tiled(x: Tensor | None, *shape: int) -> Tensor | TensorDescriptor | None:
        return x if x is None or not bulk else TensorDescriptor.from_tensor(x, list(shape))

    box = (1, 1, tile.h, tile.w)
    ready(voxtune_conv3d)[(P * N * triton.cdiv(K, tile.k), tile.split)](
        tiled(inside[0], *box, tile.c),
        tiled(inside[1], *box, tile.c) if CB else None,
        tiled(packed.view(-1, CA + CB), tile.k, tile.c),
        tiled(target, *box, tile.k),
        tiled(r_NDHWK, *box, tile.k) if unsplit else None,
        shift_NC if unsplit else None,
        moments if unsplit else None,
        *(N, D, H, W, XD, XH, XW, CA // 8, CB // 8, K // 8),
        *padding[::2],
        tile.split,
        shift_stride,
        **dict(zip(("KD", "KH", "KW"), kernel, strict=True)),
        **tile.constants(),
        BULK=bulk,
        num_warps=tile.warps,
    )
    if not unsplit:
        join(target, y_NDHWK, r_NDHWK, shift_NC, moments, tile.split)
    return y_NDHWK.movedim(-1, 1), moments


def channels_inside(x: Tensor) -> Tensor:
    """A channels-last (N, C, D, H, W) tensor as (N, D, H, W, C), with regular strides also for dimensions of size 1."""
    x_NDHWC = x.movedim(1, -1)
    assert x_NDHWC.is_contiguous(), "a source or the residual is not channels-last"
    return x_NDHWC.reshape(-1).view(x_NDHWC.shape)


def arguments(
    tile: Conv3dTile,
    *,
    dtype: str,
    epilogue: bool = True,
    sources: int = 1,
    kernel: tuple[int, ...] = CUBE,
    bulk: bool = True,
) -> tuple[dict[str, str], dict]:
    """(types of the run-time arguments, constants) of voxtune_conv3d, to compile it without a device."""
    box, out = f"1,1,{tile.h},{tile.w}", dtype if tile.split == 1 else "fp32"
    with_epilogue = epilogue and tile.split == 1

    def tiled(kind: str, shape: str) -> str:
        return f"tensordesc<{kind}[{shape}]>" if bulk else f"*{kind}"

    signature = {
        "a": tiled(dtype, f"{box},{tile.c}"),
        "b": tiled(dtype, f"{box},{tile.c}"),
        "weights": tiled(dtype, f"{tile.k},{tile.c}"),
        "y": tiled(out, f"{box},{tile.k}"),
    }
    if with_epilogue:
        signature |= {"residual": signature["y"], "shift_ptr": "*fp32", "statistics_ptr": "*fp32"}
    absent = ([] if with_epilogue else ["residual", "shift_ptr", "statistics_ptr"]) + (["b"] if sources == 1 else [])
    extents = dict(zip(("KD", "KH", "KW"), kernel, strict=True))
    constants: dict[str, int | None] = {**tile.constants(), **extents, "BULK": bulk, **dict.fromkeys(absent)}
    sizes = [name for name in voxtune_conv3d.arg_names if name not in signature and name not in constants]
    signature |= dict.fromkeys(sizes, "i32")
    return {name: kind for name, kind in signature.items() if name not in constants}, constants

"""Convolutions that double the resolution of channels-last volumes and images, by the parity of the result's voxels.

Why: a decoder doubles a volume by a transposed convolution, or by nearest upsampling and a 3x3x3 convolution. The latter writes
a volume of eight times the size and reads it again, and computes 27 products a voxel although its 27 voxels hold at most 8
values. Both are one pattern: the results with odd or even positions along each axis (8 parities) are a small convolution of x,

    y[2v + p] = shift + sum over taps t of parity p of W[p, t] x[v + offset(p, t)].

Along an axis of stride 2 the taps are those of a transposed convolution (index in its kernel: offset):

    kernel  even results    odd results
    2       0: 0            1: 0
    3       1: 0            2: 0, 0: +1
    4       1: 0, 3: -1     2: 0, 0: +1

Kernel 2 has no padding, kernel 3 padding 1 and output padding 1, kernel 4 padding 1. Nearest upsampling and a convolution of 3
fold into kernel 4 (`pack_nearest`): 8 products a voxel. An axis of stride 1 has kernel 1 or 3. The last axis has stride 2.

1. A program computes the even and the odd results along w of one parity along d and h. The source tile at offset 0 serves
   both and is loaded once; the tiles at offsets -1 and +1 serve one each. The products of a step use different accumulators.
2. Loads fill what is outside the volume with zeros, which is the padding. Even and odd results are two tensor descriptors of y.
3. With kernel 2 along h and w no tap has an offset, and in memory both parities along w of a voxel are 2K contiguous values:
   they are the channels of a program whose even and odd results are those along h ("folded"). So 32 channels fill a product.
4. The epilogue adds the shift and computes the statistics of the result for the next norm: see group_norm.py for their form.

Legend: N batch, D H W voxels of the source, C channels of all sources, K output channels, P tiles of voxels.
"""

from __future__ import annotations

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from voxtune.kernels.group_norm import row_stride
from voxtune.kernels.measured_tiles import chosen
from voxtune.kernels.parity_tiles import ParityTile, doubling_tile
from voxtune.kernels.precompile import ready

# (kernel, stride) of an axis.
AXES = {(1, 1), (3, 1), (2, 2), (3, 2), (4, 2)}


def pack_transposed(weight: Tensor) -> Tensor:
    """A transposed convolution's weight (C, K, *kernel) as (taps, K, C): one contiguous matrix per tap."""
    return weight.flatten(2).permute(2, 1, 0).contiguous()


def unpack(packed: Tensor, kernel: tuple[int, ...]) -> Tensor:
    """The inverse of `pack_transposed`."""
    return packed.permute(2, 1, 0).unflatten(2, tuple(kernel))


def pack_nearest(weight: Tensor, scale: tuple[int, ...]) -> Tensor:
    """A convolution's weight (K, C, *kernel) after nearest upsampling by `scale`, as `pack_transposed` of `folded_kernel`.

    Sums are float64 and rounded once, to the weight's type: half precision is applied to the folded weight.
    """
    folded = weight.double()
    for axis, factor in enumerate(scale, start=2):
        if factor == 1:
            folded = folded.flip(axis)
        else:
            first, middle, last = folded.unbind(axis)
            folded = torch.stack([last, middle + last, first + middle, first], dim=axis)
    return pack_transposed(folded.transpose(0, 1)).to(weight.dtype)


def folded_kernel(kernel: tuple[int, ...], scale: tuple[int, ...]) -> tuple[int, ...]:
    """The kernel of the transposed convolution that `pack_nearest` makes."""
    return tuple(4 if factor == 2 else size for size, factor in zip(kernel, scale, strict=True))


def paddings(kernel: tuple[int, ...], stride: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(padding, output padding) of the transposed convolution."""
    sizes = list(zip(kernel, stride, strict=True))
    return tuple((k - 1) // 2 for k in kernel), tuple(int((k, s) == (3, 2)) for k, s in sizes)


def doubling_conv_reference(
    sources: tuple[Tensor, ...],
    packed: Tensor,
    shift_NC: Tensor | None,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    statistics: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The same in plain PyTorch, sums in float32 (float64 for float64); the statistics as one stretch."""
    x = torch.cat(sources, dim=1)
    wide = torch.promote_types(x.dtype, torch.float32)
    convolution = F.conv_transpose3d if len(kernel) == 3 else F.conv_transpose2d
    padding, output_padding = paddings(kernel, stride)
    y = convolution(
        x.to(wide),
        unpack(packed, kernel).to(wide),
        stride=tuple(stride),
        padding=padding,
        output_padding=output_padding,
    )
    if shift_NC is not None:
        y = y + shift_NC.to(wide).view(*shift_NC.shape, *[1] * len(kernel))
    y = y.to(x.dtype)
    return y, statistics_reference(y) if statistics else None


def statistics_reference(y: Tensor) -> Tensor:
    """Count, mean and sum of squares about the mean of each channel, as one stretch: (N, 1, 3, K)."""
    y_NCV = y.flatten(2).to(torch.promote_types(y.dtype, torch.float32))
    count = torch.full_like(y_NCV[..., 0], y_NCV.shape[2])
    mean = y_NCV.mean(dim=2)
    m2 = (y_NCV - mean[..., None]).square().sum(dim=2)
    return torch.stack([count, mean, m2], dim=1)[:, None].to(torch.float32)


@triton.jit
def _product(accumulator, x, w, SWAP: tl.constexpr):
    """One tap: x (voxels, channels), w (output channels, channels). SWAP makes output channels the rows of the product."""
    return tl.dot(w, x.T, accumulator) if SWAP else tl.dot(x, w.T, accumulator)


@triton.jit
def _count_taps(SIZE: tl.constexpr, STRIDE: tl.constexpr, parity):
    """The number of an axis's taps that results of this parity have."""
    if STRIDE == 1:
        count = SIZE
    elif SIZE == 3:
        count = 1 + parity
    else:
        count = SIZE // 2
    return count


@triton.jit
def _tap(SIZE: tl.constexpr, STRIDE: tl.constexpr, parity, j):
    """(index in the kernel, offset in the source) of tap j: see the table above."""
    if STRIDE == 1:
        index = j
        offset = SIZE // 2 - j
    else:
        index = tl.where(j == 0, parity + (1 if SIZE > 2 else 0), 3 - 3 * parity)
        offset = j * (2 * parity - 1)
    return index, offset


@triton.jit
def _add_source(
    even,
    odd,
    x_desc,
    w_desc,
    n,
    d,
    h,
    w,
    parity_d,
    parity_h,
    C,  # channels of this source
    first,  # its first column of the weights
    K,
    k0,
    KD: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SD: tl.constexpr,
    SH: tl.constexpr,
    VOXELS: tl.constexpr,
    TC: tl.constexpr,
    SWAP: tl.constexpr,
    STAGES: tl.constexpr,
    OUTER_STAGES: tl.constexpr,
):
    """Adds the products of one source to the even and the odd results along w.

    Beyond C a tile of x is zero, so it does not matter that the weights' tile continues with the next source.
    """
    chunks = (C + TC - 1) // TC
    taps_h = _count_taps(KH, SH, parity_h)
    steps = _count_taps(KD, SD, parity_d) * taps_h * chunks
    # Index along w of the taps at offset 0 of the even results; that of the odd ones is one more.
    CENTRE: tl.constexpr = 0 if KW == 2 else 1
    for step in tl.range(0, steps, num_stages=STAGES):
        tap = step // chunks
        c0 = step % chunks * TC
        index_d, offset_d = _tap(KD, SD, parity_d, tap // taps_h)
        index_h, offset_h = _tap(KH, SH, parity_h, tap % taps_h)
        row = (index_d * KH + index_h) * KW + CENTRE
        x = x_desc.load([n, d + offset_d, h + offset_h, w, c0]).reshape(VOXELS, TC)
        # All loads before the products: one barrier a step.
        w_even = w_desc.load([row * K + k0, first + c0])
        w_odd = w_desc.load([(row + 1) * K + k0, first + c0])
        even = _product(even, x, w_even, SWAP)
        odd = _product(odd, x, w_odd, SWAP)
    if KW > 2:
        for step in tl.range(0, steps, num_stages=OUTER_STAGES):
            tap = step // chunks
            c0 = step % chunks * TC
            index_d, offset_d = _tap(KD, SD, parity_d, tap // taps_h)
            index_h, offset_h = _tap(KH, SH, parity_h, tap % taps_h)
            row = (index_d * KH + index_h) * KW
            right = x_desc.load([n, d + offset_d, h + offset_h, w + 1, c0]).reshape(VOXELS, TC)
            w_odd = w_desc.load([row * K + k0, first + c0])
            if KW == 4:
                left = x_desc.load([n, d + offset_d, h + offset_h, w - 1, c0]).reshape(VOXELS, TC)
                w_even = w_desc.load([(row + 3) * K + k0, first + c0])
                even = _product(even, left, w_even, SWAP)
            odd = _product(odd, right, w_odd, SWAP)
    return even, odd


# Sizes are not specialised: one compiled kernel is used for all volume sizes and numbers of channels.
@triton.jit(do_not_specialize=["D", "H", "W", "A", "B", "K", "shift_width", "shift_stride"])
def voxtune_doubling_conv(
    a_desc,  # (N, D, H, W, A): the first source, tiles of (1, 1, TH, TW, TC)
    b_desc,  # (N, D, H, W, B): the second, or None
    w_desc,  # (KD * KH * KW * K, A + B), tiles of (TK, TC)
    even_desc,  # (N * D * SD, H, SH, W, K): y at even w (folded: h), tiles of (1, TH, 1, TW, TK)
    odd_desc,  # the same at odd w (h)
    shift_ptr,  # (N, K) or (1, K), of any float type, or None
    statistics_ptr,  # (N, P, 3, K) float32 or None
    D,
    H,
    W,
    A,
    B,
    K,
    shift_width,  # K, or K / 2 where both parities along w are in K
    shift_stride,  # from row to row, or 0 when one shift serves the batch
    KD: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SD: tl.constexpr,
    SH: tl.constexpr,
    TH: tl.constexpr,
    TW: tl.constexpr,
    TK: tl.constexpr,
    TC: tl.constexpr,
    SWAP: tl.constexpr,
    STAGES: tl.constexpr,
    OUTER_STAGES: tl.constexpr,
):
    VOXELS: tl.constexpr = TH * TW
    SHAPE: tl.constexpr = (TK, VOXELS) if SWAP else (VOXELS, TK)
    columns = (K + TK - 1) // TK
    across, down = (W + TW - 1) // TW, (H + TH - 1) // TH
    # Neighbours in the grid share input: output channels first, then parities along h and d, then along w, h, d.
    k0 = tl.program_id(0) % columns * TK
    row = tl.program_id(0) // columns  # of the statistics
    parity_h = row % SH
    parity_d = row // SH % SD
    tile = row // (SH * SD)
    w = tile % across * TW
    h = tile // across % down * TH
    d = tile // (across * down) % D
    n = tile // (across * down * D)

    even = tl.zeros(SHAPE, tl.float32)
    odd = tl.zeros(SHAPE, tl.float32)
    even, odd = _add_source(
        even, odd, a_desc, w_desc, n, d, h, w, parity_d, parity_h, A, 0, K, k0,
        KD, KH, KW, SD, SH, VOXELS, TC, SWAP, STAGES, OUTER_STAGES,
    )  # fmt: skip
    if b_desc is not None:
        even, odd = _add_source(
            even, odd, b_desc, w_desc, n, d, h, w, parity_d, parity_h, B, A, K, k0,
            KD, KH, KW, SD, SH, VOXELS, TC, SWAP, STAGES, OUTER_STAGES,
        )  # fmt: skip

    if SWAP:
        even, odd = even.T, odd.T
    k = k0 + tl.arange(0, TK)
    if shift_ptr is not None:
        at = shift_ptr + n * shift_stride + k % shift_width
        shift = tl.load(at, mask=k < K, other=0.0).to(tl.float32)
        even += shift[None, :]
        odd += shift[None, :]
    y_even, y_odd = even.to(even_desc.dtype), odd.to(odd_desc.dtype)
    plane = (n * D + d) * SD + parity_d
    even_desc.store([plane, h, parity_h, w, k0], y_even.reshape(1, TH, 1, TW, TK))
    odd_desc.store([plane, h, parity_h, w, k0], y_odd.reshape(1, TH, 1, TW, TK))
    if statistics_ptr is not None:
        v = tl.arange(0, VOXELS)
        inside = ((h + v // TW < H) & (w + v % TW < W))[:, None]
        even = tl.where(inside, y_even.to(tl.float32), 0.0)
        odd = tl.where(inside, y_odd.to(tl.float32), 0.0)
        count = (2 * tl.minimum(TH, H - h) * tl.minimum(TW, W - w)).to(tl.float32)
        mean = (tl.sum(even, axis=0) + tl.sum(odd, axis=0)) / count
        even = tl.where(inside, even - mean[None, :], 0.0)
        odd = tl.where(inside, odd - mean[None, :], 0.0)
        at = statistics_ptr + row.to(tl.int64) * 3 * K + k
        tl.store(at, tl.zeros_like(mean) + count, mask=k < K)
        tl.store(at + K, mean, mask=k < K)
        tl.store(at + 2 * K, tl.sum(even * even, axis=0) + tl.sum(odd * odd, axis=0), mask=k < K)


def unsupported(kernel: tuple[int, ...], stride: tuple[int, ...], channels: tuple[int, ...], K: int) -> str | None:
    """The reason why a convolution of this form has no kernel, or None."""
    if len(kernel) not in (2, 3) or any(axis not in AXES for axis in zip(kernel, stride, strict=True)):
        return f"kernel {tuple(kernel)} with stride {tuple(stride)}"
    if stride[-1] != 2:
        return "the last axis is not doubled"
    if len(channels) > 2:
        return f"{len(channels)} sources: at most two"
    odd = [c for c in (*channels, K) if c % 8]
    return f"{odd[0]} channels, not a multiple of 8" if odd else None


def why_not(
    sources: tuple[Tensor, ...], packed: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...]
) -> str | None:
    """The reason why the kernel does not apply, or None."""
    first = sources[0]
    channels = tuple(s.shape[1] for s in sources)
    if first.dtype not in (torch.bfloat16, torch.float16) or packed.dtype != first.dtype:
        return f"type {first.dtype} has no kernel"
    if packed.shape[0] != prod(kernel) or packed.shape[2] != sum(channels) or first.dim() != len(kernel) + 2:
        return "the weights do not fit the sources"
    if (reason := unsupported(kernel, stride, channels, packed.shape[1])) is not None:
        return reason
    if any(s.dtype != first.dtype or s.shape[0] != first.shape[0] or s.shape[2:] != first.shape[2:] for s in sources):
        return "the sources differ in type, batch or size"
    if any(not s.movedim(1, -1).is_contiguous() or s.data_ptr() % 16 for s in sources) or first.numel() == 0:
        return "a source is not channels-last, not aligned, or empty"
    return None


def doubling_conv(
    sources: tuple[Tensor, ...],
    packed: Tensor,
    shift_NC: Tensor | None,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    statistics: bool = False,
    *,
    checked: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The transposed convolution of cat(sources) + shift, channels-last, and its statistics (N, P, 3, K) if requested.

    `why_not` must be None; `checked`: the caller has called it.
    """
    assert checked or (reason := why_not(sources, packed, kernel, stride)) is None, reason
    N, _, *voxels = sources[0].shape
    D, H, W = (1, *voxels)[-3:]
    channels, K, fold = tuple(s.shape[1] for s in sources), packed.shape[1], folds(kernel, stride, statistics)
    tile = chosen(
        "doubling_conv",
        (N, D, H, W, *channels, K, *kernel, *stride, int(fold)),
        sources[0],
        lambda: doubling_tile(N, D, H, W, max(channels), K, fold),
    )
    return convolve(sources, packed, tile, shift_NC, kernel, stride, statistics)


def folds(kernel: tuple[int, ...], stride: tuple[int, ...], statistics: bool) -> bool:
    """Whether both parities along w are computed as 2K channels; the statistics would be of 2K channels too."""
    return tuple(kernel[-2:]) == tuple(stride[-2:]) == (2, 2) and not statistics


def convolve(
    sources: tuple[Tensor, ...],
    packed: Tensor,
    tile: ParityTile,
    shift_NC: Tensor | None,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    statistics: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """doubling_conv with a given tile."""
    volume = len(kernel) == 3
    views = [planes_of_channels(s) for s in sources]
    N, D, H, W, A = views[0].shape
    (KD, KH, KW), (SD, SH, _) = (kernel, stride) if volume else ((1, *kernel), (1, *stride))
    _, K, C = packed.shape
    assert packed.is_contiguous(), "the weights are not contiguous"
    y = torch.empty((N, D * SD, H * SH, 2 * W, K), dtype=sources[0].dtype, device=sources[0].device)
    moments, shift_width = None, K
    if folds(kernel, stride, statistics):
        pairs = y.view(N * D * SD, H, 2, W, 2 * K)
        halves = pairs[:, :, :1], pairs[:, :, 1:]
        KH, SH, K = 1, 1, 2 * K
    else:
        pairs = y.view(N * D * SD, H, SH, W, 2, K)
        halves = pairs[..., 0, :], pairs[..., 1, :]
    P = D * SD * SH * triton.cdiv(H, tile.h) * triton.cdiv(W, tile.w)
    if statistics:
        moments = torch.empty((N, P, 3, K), dtype=torch.float32, device=y.device)
    box = [1, 1, tile.h, tile.w, tile.c]
    second = TensorDescriptor.from_tensor(views[1], box) if len(views) == 2 else None
    ready(voxtune_doubling_conv)[(N * P * triton.cdiv(K, tile.k),)](
        TensorDescriptor.from_tensor(views[0], box),
        second,
        TensorDescriptor.from_tensor(packed.view(-1, C), [tile.k, tile.c]),
        *(TensorDescriptor.from_tensor(half, [1, tile.h, 1, tile.w, tile.k]) for half in halves),
        shift_NC,
        moments,
        D,
        H,
        W,
        A,
        C - A,
        K,
        shift_width,
        row_stride(shift_NC),
        **constants(tile, (KD, KH, KW), (SD, SH)),
        num_warps=tile.warps,
    )
    return (y if volume else y.squeeze(1)).movedim(-1, 1), moments


def planes_of_channels(x: Tensor) -> Tensor:
    """A channels-last volume or image as (N, D, H, W, C), with regular strides also for dimensions of size 1."""
    x_last = (x if x.dim() == 5 else x.unsqueeze(2)).movedim(1, -1)
    assert x_last.is_contiguous(), "a source is not channels-last"
    return x_last.reshape(-1).view(x_last.shape)


def constants(tile: ParityTile, kernel: tuple[int, ...], stride: tuple[int, ...]) -> dict[str, int | bool]:
    axes = dict(zip(("KD", "KH", "KW", "SD", "SH"), (*kernel, *stride[:2]), strict=True))
    return axes | tile.constants() | {"STAGES": tile.stages, "OUTER_STAGES": tile.outer_stages}


def arguments(
    tile: ParityTile,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    *,
    dtype: str,
    sources: int = 1,
    statistics: bool = True,
) -> tuple[dict[str, str], dict]:
    """(types of the run-time arguments, constants) of the kernel, to compile it without a device; folded, kernel and
    stride along h are 1."""
    box = f"{tile.h},{tile.w}"
    signature = {
        "a_desc": f"tensordesc<{dtype}[1,1,{box},{tile.c}]>",
        "w_desc": f"tensordesc<{dtype}[{tile.k},{tile.c}]>",
        "even_desc": f"tensordesc<{dtype}[1,{tile.h},1,{tile.w},{tile.k}]>",
        "shift_ptr": "*fp32",
    }
    signature["odd_desc"] = signature["even_desc"]
    if sources == 2:
        signature["b_desc"] = signature["a_desc"]
    if statistics:
        signature["statistics_ptr"] = "*fp32"
    signature |= dict.fromkeys(("D", "H", "W", "A", "B", "K", "shift_width", "shift_stride"), "i32")
    absent = {name: None for name in ("b_desc", "statistics_ptr") if name not in signature}
    return signature, constants(tile, kernel, stride) | absent

"""Convolutions of kernel 3 that halve the resolution of channels-last volumes and images, with the statistics for the next norm.

Why: the downsampling of U-Nets. PyTorch adds the bias in a pass of its own, and the norm that follows reads the result once more
for its statistics.

1. A tile of every second voxel is a rank-5 tensor descriptor of the contiguous source: of x (N, D, H, W, C), viewed as
   (N * D, H/2, 2, W/2, 2C), the tap kh of result row h reads row pair h + (kh + 1) // 2 - 1, the parity (kh + 1) % 2. Pairs
   along w share a row of 2C channels: the taps kw = 1 and 2 are its two halves, one product over 2C channels; the tap kw = 0
   is the second half of the pair before it. Loads outside of H and W fill with zeros, which is the padding; planes outside of the
   sample are skipped.
2. The epilogue adds the shift and computes the statistics: see group_norm.py for their form.
3. Small volumes fill too few multiprocessors: there several programs share the taps of a tile, as in conv3d.py, and its second
   kernel joins them.

An axis has kernel 3 and padding 1, or (not w) kernel 1; its stride is 1 or 2. H and W are even along an axis of stride 2.

Legend: N batch, D H W voxels of the source, E F G of the result, C input channels, K output channels, P tiles of voxels.
"""

from __future__ import annotations

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from voxtune.kernels.conv3d_join import join_block, voxtune_conv3d_join
from voxtune.kernels.doubling_conv import planes_of_channels, statistics_reference
from voxtune.kernels.group_norm import row_stride
from voxtune.kernels.measured_tiles import chosen
from voxtune.kernels.parity_tiles import ParityTile, strided_tile
from voxtune.kernels.precompile import ready


def pack_strided(weight: Tensor) -> Tensor:
    """A convolution's weight (K, C, *kernel) as (taps along d and h, K, taps along w * C): the taps along w are one row."""
    K, C, *kernel = weight.shape
    by_tap = weight.reshape(K, C, -1, kernel[-1]).permute(2, 0, 3, 1)
    return by_tap.reshape(-1, K, kernel[-1] * C).contiguous()


def unpack(packed: Tensor, kernel: tuple[int, ...]) -> Tensor:
    """The inverse of `pack_strided`."""
    K, width = packed.shape[1], kernel[-1]
    return packed.view(-1, K, width, packed.shape[2] // width).permute(1, 3, 0, 2).reshape(K, -1, *kernel)


def strided_conv_reference(
    x: Tensor,
    packed: Tensor,
    shift_NC: Tensor | None,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    statistics: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The same in plain PyTorch, sums in float32 (float64 for float64); the statistics as one stretch."""
    wide = torch.promote_types(x.dtype, torch.float32)
    convolution = F.conv3d if len(kernel) == 3 else F.conv2d
    padding = tuple(k // 2 for k in kernel)
    y = convolution(x.to(wide), unpack(packed, kernel).to(wide), stride=tuple(stride), padding=padding)
    if shift_NC is not None:
        y = y + shift_NC.to(wide).view(*shift_NC.shape, *[1] * len(kernel))
    y = y.to(x.dtype)
    return y, statistics_reference(y) if statistics else None


@triton.jit
def _product(accumulator, x, w, SWAP: tl.constexpr):
    """One step: x (voxels, channels), w (output channels, channels). SWAP makes output channels the rows of the product."""
    return tl.dot(w, x.T, accumulator) if SWAP else tl.dot(x, w.T, accumulator)


# Sizes are not specialised: one compiled kernel is used for all volume sizes and numbers of channels.
@triton.jit(do_not_specialize=["N", "D", "E", "F", "G", "C", "K", "splits", "shift_stride"])
def voxtune_strided_conv(  # noqa: PLR0915
    x_desc,  # (N * D, H / SH, SH, W / SW, SW * C), tiles of (1, TH, 1, TW, TC)
    w_desc,  # (KD * KH * K, 3 * C), tiles of (TK, TC)
    y_desc,  # (N, E, F, G, K), or float32 (splits * N, E, F, G, K); tiles of (1, 1, TH, TW, TK)
    shift_ptr,  # (N, K) or (1, K), of any float type, or None
    statistics_ptr,  # (N, P, 3, K) float32 or None
    N,
    D,
    E,
    F,
    G,
    C,
    K,
    splits,
    shift_stride,  # from row to row, or 0 when one shift serves the batch
    KD: tl.constexpr,
    KH: tl.constexpr,
    SD: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    TH: tl.constexpr,
    TW: tl.constexpr,
    TK: tl.constexpr,
    TC: tl.constexpr,
    SWAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    VOXELS: tl.constexpr = TH * TW
    SHAPE: tl.constexpr = (TK, VOXELS) if SWAP else (VOXELS, TK)
    columns = (K + TK - 1) // TK
    # Neighbours in the grid share input: output channels first, then along w, h, d.
    tile, split = tl.program_id(0) // columns, tl.program_id(1)
    k0 = tl.program_id(0) % columns * TK
    across, down = (G + TW - 1) // TW, (F + TH - 1) // TH
    w0 = tile % across * TW
    h0 = tile // across % down * TH
    d = tile // (across * down) % E
    n = tile // (across * down * E)

    # A row of taps along w is `parts` steps: first those of the pair at w0 (both parities), then those of the tap before it.
    chunks = (C + TC - 1) // TC
    both = (2 * C + TC - 1) // TC
    parts = both + chunks if SW == 2 else 3 * chunks
    # Taps along d whose plane is in the sample.
    plane = SD * d - KD // 2
    first_d, last_d = tl.maximum(0, -plane), tl.minimum(KD, D - plane)
    steps = (last_d - first_d) * KH * parts
    accumulator = tl.zeros(SHAPE, tl.float32)
    for step in tl.range(steps * split // splits, steps * (split + 1) // splits, num_stages=STAGES):
        row = first_d * KH + step // parts
        part = step % parts
        kh = row % KH + 1 - KH // 2
        if SH == 2:
            h, parity = h0 + (kh + 1) // 2 - 1, (kh + 1) % 2
        else:
            h, parity = h0 + kh - 1, 0
        if SW == 2:
            before = part >= both
            w = w0 - before.to(tl.int32)
            # Columns of the weights: C to 3C for the pair, 0 to C for the second half of the pair before.
            column = tl.where(before, (part - both) * TC, C + part * TC)
            c = tl.where(before, C + (part - both) * TC, part * TC)
        else:
            w = w0 + part // chunks - 1
            c = part % chunks * TC
            column = part // chunks * C + c
        # Beyond its channels a tile of x is zero, so it does not matter that the weights' tile continues with the next tap.
        x = x_desc.load([n * D + plane + row // KH, h, parity, w, c]).reshape(VOXELS, TC)
        weights = w_desc.load([row * K + k0, column])
        accumulator = _product(accumulator, x, weights, SWAP)

    if SWAP:
        accumulator = accumulator.T
    k = k0 + tl.arange(0, TK)
    if shift_ptr is not None:
        accumulator += tl.load(shift_ptr + n * shift_stride + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
    y = accumulator.to(y_desc.dtype)
    y_desc.store([split * N + n, d, h0, w0, k0], y.reshape(1, 1, TH, TW, TK))
    if statistics_ptr is not None:
        v = tl.arange(0, VOXELS)
        inside = ((h0 + v // TW < F) & (w0 + v % TW < G))[:, None]
        values = tl.where(inside, y.to(tl.float32), 0.0)
        count = (tl.minimum(TH, F - h0) * tl.minimum(TW, G - w0)).to(tl.float32)
        mean = tl.sum(values, axis=0) / count
        away = tl.where(inside, values - mean[None, :], 0.0)
        at = statistics_ptr + tile.to(tl.int64) * 3 * K + k
        tl.store(at, tl.zeros_like(mean) + count, mask=k < K)
        tl.store(at + K, mean, mask=k < K)
        tl.store(at + 2 * K, tl.sum(away * away, axis=0), mask=k < K)


def unsupported(
    kernel: tuple[int, ...], stride: tuple[int, ...], voxels: tuple[int, ...], channels: tuple[int, int]
) -> str | None:
    """The reason why a convolution of this form (`channels` in and out, source of `voxels`) has no kernel, or None."""
    if len(kernel) not in (2, 3) or kernel[-1] != 3 or any(k not in (1, 3) for k in kernel):
        return f"kernel {tuple(kernel)}"
    if any(s not in (1, 2) for s in stride) or max(stride) == 1:
        return f"stride {tuple(stride)}"
    # Along d planes are loaded one by one: any size is possible.
    pairs = [(size, s) for size, s in zip(voxels[-2:], stride[-2:], strict=True)]
    if any(size % s for size, s in pairs):
        return f"an odd size, {'x'.join(map(str, voxels))}"
    odd = [c for c in channels if c % 8]
    return f"{odd[0]} channels, not a multiple of 8" if odd else None


def why_not(x: Tensor, packed: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...]) -> str | None:
    """The reason why the kernels do not apply, or None."""
    if x.dtype not in (torch.bfloat16, torch.float16) or packed.dtype != x.dtype:
        return f"type {x.dtype} has no kernel"
    if x.dim() != len(kernel) + 2 or packed.shape[0] != prod(kernel[:-1]) or packed.shape[2] != kernel[-1] * x.shape[1]:
        return "the weights do not fit the source"
    if (reason := unsupported(kernel, stride, tuple(x.shape[2:]), (x.shape[1], packed.shape[1]))) is not None:
        return reason
    if not x.movedim(1, -1).is_contiguous() or x.numel() == 0 or x.data_ptr() % 16:
        return "the source is not channels-last, not aligned, or empty"
    return None


def strided_conv(
    x: Tensor,
    packed: Tensor,
    shift_NC: Tensor | None,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    statistics: bool = False,
    *,
    checked: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """conv(x) + shift, channels-last, and its statistics (N, P, 3, K) if requested; `why_not` must be None.

    `checked`: the caller has called `why_not`.
    """
    assert checked or (reason := why_not(x, packed, kernel, stride)) is None, reason
    N, C = x.shape[:2]
    E, F, G = (1, *result_voxels(tuple(x.shape[2:]), stride))[-3:]
    K, steps = packed.shape[1], prod(kernel) * triton.cdiv(C, 64)
    tile = chosen(
        "strided_conv",
        (N, E, F, G, C, K, *kernel, *stride),
        x,
        lambda: strided_tile(N, E, F, G, C, K, steps),
    )
    return convolve(x, packed, tile, shift_NC, kernel, stride, statistics)


def result_voxels(voxels: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    return tuple((size - 1) // s + 1 for size, s in zip(voxels, stride, strict=True))


def convolve(
    x: Tensor,
    packed: Tensor,
    tile: ParityTile,
    shift_NC: Tensor | None,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    statistics: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """strided_conv with a given tile."""
    volume = len(kernel) == 3
    x_NDHWC = planes_of_channels(x)
    N, D, H, W, C = x_NDHWC.shape
    (KD, KH, _), (SD, SH, SW) = (kernel, stride) if volume else ((1, *kernel), (1, *stride))
    E, F, G = result_voxels((D, H, W), (SD, SH, SW))
    rows, K, width = packed.shape
    assert packed.is_contiguous(), "the weights are not contiguous"
    y_NEFGK = torch.empty((N, E, F, G, K), dtype=x.dtype, device=x.device)
    P = E * triton.cdiv(F, tile.h) * triton.cdiv(G, tile.w)
    join_v, join_k = join_block(N, E * F * G, K)
    unsplit = tile.split == 1
    stretches = P if unsplit else triton.cdiv(E * F * G, join_v)
    moments = torch.empty((N, stretches, 3, K), dtype=torch.float32, device=x.device) if statistics else None
    target = y_NEFGK if unsplit else y_NEFGK.new_empty((tile.split * N, E, F, G, K), dtype=torch.float32)
    shift_stride = row_stride(shift_NC)
    ready(voxtune_strided_conv)[(N * P * triton.cdiv(K, tile.k), tile.split)](
        TensorDescriptor.from_tensor(x_NDHWC.view(N * D, H // SH, SH, W // SW, SW * C), [1, tile.h, 1, tile.w, tile.c]),
        TensorDescriptor.from_tensor(packed.view(rows * K, width), [tile.k, tile.c]),
        TensorDescriptor.from_tensor(target, [1, 1, tile.h, tile.w, tile.k]),
        shift_NC if unsplit else None,
        moments if unsplit else None,
        N,
        D,
        E,
        F,
        G,
        C,
        K,
        tile.split,
        shift_stride,
        **constants(tile, (KD, KH), (SD, SH, SW)),
        num_warps=tile.warps,
    )
    if not unsplit:
        ready(voxtune_conv3d_join)[(stretches, triton.cdiv(K, join_k), N)](
            target,
            y_NEFGK,
            None,
            shift_NC,
            moments,
            N,
            E * F * G,
            K,
            tile.split,
            shift_stride,
            BLOCK_V=join_v,
            BLOCK_K=join_k,
            num_warps=4,
        )
    return (y_NEFGK if volume else y_NEFGK.squeeze(1)).movedim(-1, 1), moments


def constants(tile: ParityTile, kernel: tuple[int, ...], stride: tuple[int, ...]) -> dict[str, int | bool]:
    axes = dict(zip(("KD", "KH", "SD", "SH", "SW"), (*kernel[:2], *stride), strict=True))
    return axes | tile.constants() | {"STAGES": tile.stages}


def arguments(
    tile: ParityTile, kernel: tuple[int, ...], stride: tuple[int, ...], *, dtype: str
) -> tuple[dict[str, str], dict]:
    """(types of the run-time arguments, constants) of the kernel with its epilogue, to compile it without a device."""
    unsplit = tile.split == 1
    signature = {
        "x_desc": f"tensordesc<{dtype}[1,{tile.h},1,{tile.w},{tile.c}]>",
        "w_desc": f"tensordesc<{dtype}[{tile.k},{tile.c}]>",
        "y_desc": f"tensordesc<{dtype if unsplit else 'fp32'}[1,1,{tile.h},{tile.w},{tile.k}]>",
    }
    if unsplit:
        signature |= {"shift_ptr": "*fp32", "statistics_ptr": "*fp32"}
    signature |= dict.fromkeys(("N", "D", "E", "F", "G", "C", "K", "splits", "shift_stride"), "i32")
    absent = {} if unsplit else dict.fromkeys(("shift_ptr", "statistics_ptr"))
    return signature, constants(tile, kernel, stride) | absent

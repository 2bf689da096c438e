"""The stem: a 3x3(x3) convolution with few channels in, stride 1, padding 1.

Why: general convolution kernels pad 3 input channels, or 1 output channel, to a width made for 64 and more, and take ten times
as long as the memory traffic requires: here the one wide tensor is moved once. A program gathers the patches of a run of voxels
straight from the sources, of any strides and types, as a matrix (taps x channels, voxels), and multiplies the weights by it.
The sources of conv(cat([x, mask])) are not concatenated.

Legend: N batch, D H W voxels (an image has D = 1), CA CB channels of the sources, M channels out, K = taps * channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from voxtune.kernels.group_norm import empty_channels_last, row_stride
from voxtune.kernels.pointwise import TYPES, why_no_shift
from voxtune.kernels.precompile import ready

FEW = 8


@dataclass(frozen=True, kw_only=True)
class PackedStem:
    weight: Tensor  # (M padded to whole blocks, all sources' K, each padded to whole chunks)
    channels: tuple[int, ...]  # of each source
    out_channels: int
    dimensions: int
    block_m: int
    chunks: tuple[int, ...]  # rows of one gather, for each source


def pack_stem(
    weight: Tensor, channels: tuple[int, ...], dtype: torch.dtype, *, widest: int | None = None
) -> PackedStem:
    """A convolution's weight (M, C, 3, 3(, 3)) for sources of the given channels, gathered `widest` rows at a time at most."""
    # A wide gather has more loads in flight, and more registers; float32 products keep their operands in registers.
    widest = widest or (16 if dtype == torch.float32 else 32)
    M, C = weight.shape[:2]
    assert sum(channels) == C, f"sources of {channels} channels for a weight that takes {C}"
    block_m = max(16, min(64, triton.next_power_of_2(M)))
    parts, chunks = [], []
    for part in weight.detach().split(channels, dim=1):
        w_MK = part.movedim(1, -1).reshape(M, -1)  # taps, then channels
        chunk = max(16, min(widest, triton.next_power_of_2(w_MK.shape[1])))
        chunks.append(chunk)
        parts.append(F.pad(w_MK, (0, -w_MK.shape[1] % chunk, 0, -M % block_m)))
    packed = torch.cat(parts, dim=1).to(dtype).contiguous()
    return PackedStem(
        weight=packed,
        channels=tuple(channels),
        out_channels=M,
        dimensions=weight.dim() - 2,
        block_m=block_m,
        chunks=tuple(chunks),
    )


def stem_reference(sources: tuple[Tensor, ...], weight: Tensor, shift_NC: Tensor | None = None) -> Tensor:
    """The same in plain PyTorch, in the weight's type."""
    x = torch.cat([s.to(weight.dtype) for s in sources], dim=1)
    y = (F.conv3d if x.dim() == 5 else F.conv2d)(x, weight, padding=1)
    return y if shift_NC is None else y + shift_NC.to(y.dtype).view(*shift_NC.shape, *[1] * (x.dim() - 2))


@triton.jit
def _gather_dot(
    acc,
    x_ptr,  # one source of any strides, at the run's first voxel
    w_ptr,  # (M, ...): the source's columns of the weights
    w_stride,
    m,
    d,
    h,
    w,
    D,
    H,
    W,
    sc,
    sd,
    sh,
    sw,
    CS: tl.constexpr,
    CHUNK: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PRECISION: tl.constexpr,
):
    for k0 in tl.static_range(0, TAPS * CS, CHUNK):
        # Voxels run along the lanes and k along the registers, so that all that depends on k alone is known when compiling.
        k = k0 + tl.arange(0, CHUNK)
        tap, c = k // CS, k % CS
        kd, kh, kw = tap // 9 - 1 if TAPS == 27 else tap * 0, tap // 3 % 3 - 1, tap % 3 - 1
        row = (tap < TAPS) & (d + kd >= 0) & (d + kd < D) & (h + kh >= 0) & (h + kh < H)
        column = w[None, :] + kw[:, None]
        keep = row[:, None] & (column >= 0) & (column < W)
        at = (kd * sd + kh * sh + kw * sw + c * sc)[:, None] + (tl.arange(0, BLOCK_W) * sw)[None, :]
        patch = tl.load(x_ptr + at, mask=keep, other=0.0).to(w_ptr.dtype.element_ty)
        weight = tl.load(w_ptr + m[:, None] * w_stride + k[None, :])
        acc = tl.dot(weight, patch, acc, input_precision=PRECISION)
    return acc


@triton.jit
def voxtune_stem(
    a_ptr,  # (N, CA, D, H, W) of any strides
    b_ptr,  # (N, CB, D, H, W) of any strides; unread when CB is 0
    w_ptr,  # (M padded, K padded)
    shift_ptr,  # (N, M) or (1, M), of any float type; unread when HAS_SHIFT is off
    y_ptr,  # (N, D, H, W, M)
    D,
    H,
    W,
    M,
    a_n,
    a_c,
    a_d,
    a_h,
    a_w,
    b_n,
    b_c,
    b_d,
    b_h,
    b_w,
    w_stride,
    shift_stride,
    CA: tl.constexpr,
    CB: tl.constexpr,
    CHUNK_A: tl.constexpr,
    CHUNK_B: tl.constexpr,
    TAPS: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    blocks_w = tl.cdiv(W, BLOCK_W)
    line, n = tl.program_id(0) // blocks_w, tl.program_id(2).to(tl.int64)
    w0, d, h = tl.program_id(0) % blocks_w * BLOCK_W, line // H, line % H
    w, m = w0 + tl.arange(0, BLOCK_W), tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    acc = tl.zeros((BLOCK_M, BLOCK_W), tl.float32)
    first = a_ptr + (n * a_n + d.to(tl.int64) * a_d + h * a_h + w0 * a_w)
    acc = _gather_dot(
        acc, first, w_ptr, w_stride, m, d, h, w, D, H, W, a_c, a_d, a_h, a_w, CA, CHUNK_A, TAPS, BLOCK_W, PRECISION
    )
    if CB > 0:
        first = b_ptr + (n * b_n + d.to(tl.int64) * b_d + h * b_h + w0 * b_w)
        columns = w_ptr + (TAPS * CA + CHUNK_A - 1) // CHUNK_A * CHUNK_A
        acc = _gather_dot(
            acc,
            first,
            columns,
            w_stride,
            m,
            d,
            h,
            w,
            D,
            H,
            W,
            b_c,
            b_d,
            b_h,
            b_w,
            CB,
            CHUNK_B,
            TAPS,
            BLOCK_W,
            PRECISION,
        )
    y = tl.trans(acc)
    inside = m < M
    if HAS_SHIFT:
        y += tl.load(shift_ptr + n * shift_stride + m, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = ((n * D + d) * H + h) * W + w0
    offset = tl.arange(0, BLOCK_W)[:, None] * M + m[None, :]
    tl.store(y_ptr + at * M + offset, y.to(y_ptr.dtype.element_ty), mask=(w < W)[:, None] & inside[None, :])


def why_not_stem(sources: tuple[Tensor, ...], packed: PackedStem, shift_NC: Tensor | None = None) -> str | None:
    """The reason why the stem's kernel does not apply, or None."""
    first = sources[0]
    if any(t.dtype not in TYPES for t in (*sources, packed.weight)):
        return f"types {[s.dtype for s in sources]} and {packed.weight.dtype}: one has no kernel"
    if tuple(s.shape[1] for s in sources) != packed.channels or len(sources) > 2 or max(packed.channels) > FEW:
        return (
            f"sources of {[s.shape[1] for s in sources]} channels: one or two, of up to {FEW}, as packed, are required"
        )
    if any(s.shape[0] != first.shape[0] or s.shape[2:] != first.shape[2:] for s in sources):
        return "the sources differ in batch or size"
    if first.dim() - 2 != packed.dimensions or packed.dimensions not in (2, 3):
        return f"{first.dim() - 2} voxel axes, and weights for {packed.dimensions}"
    if any(s.numel() == 0 or span(s) >= 2**31 for s in sources):
        return "an empty source, or one of 2^31 values or more"
    return why_no_shift(shift_NC, first.shape[0], packed.out_channels)


def stem(
    sources: tuple[Tensor, ...],
    packed: PackedStem,
    shift_NC: Tensor | None = None,
    *,
    tf32: bool = False,
    checked: bool = False,
) -> Tensor:
    """conv(cat(sources)) + shift, channels-last, in the packed weights' type; `why_not_stem` must be None.

    `checked`: the caller has called `why_not_stem`.
    """
    assert checked or (reason := why_not_stem(sources, packed, shift_NC)) is None, reason
    a, b = sources[0], sources[-1]
    N, _, D, H, W = as_volume(a).shape
    y = empty_channels_last(a, packed.out_channels, packed.weight.dtype)
    two = len(sources) == 2
    block_w = stem_run(W, packed.weight.dtype)
    grid = (D * H * triton.cdiv(W, block_w), packed.weight.shape[0] // packed.block_m, N)
    ready(voxtune_stem)[grid](
        a,
        b,
        packed.weight,
        packed.weight if shift_NC is None else shift_NC,
        y,
        D,
        H,
        W,
        packed.out_channels,
        *as_volume(a).stride(),
        *as_volume(b).stride(),
        packed.weight.shape[1],
        row_stride(shift_NC),
        CA=packed.channels[0],
        CB=packed.channels[1] if two else 0,
        CHUNK_A=packed.chunks[0],
        CHUNK_B=packed.chunks[1] if two else 16,
        TAPS=3**packed.dimensions,
        HAS_SHIFT=shift_NC is not None,
        PRECISION="tf32" if tf32 else "ieee",
        BLOCK_W=block_w,
        BLOCK_M=packed.block_m,
        num_warps=4,
    )
    return y


def stem_run(W: int, dtype: torch.dtype) -> int:
    """Voxels of a run: the longest one among those that waste least of a line."""
    runs = (128, 64, 32, 16) if dtype != torch.float32 else (32, 16)
    return min(runs, key=lambda run: (triton.cdiv(W, run) * run, -run))


def as_volume(x: Tensor) -> Tensor:
    return x if x.dim() == 5 else x.unsqueeze(2)


def span(x: Tensor) -> int:
    """From the first to the last value of one item of the batch, in values."""
    return sum((size - 1) * stride for size, stride in zip(x.shape[1:], x.stride()[1:], strict=True)) + 1

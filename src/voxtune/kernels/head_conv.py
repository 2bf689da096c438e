"""The head: a 3x3(x3) convolution with few channels out, stride 1, padding 1.

Why: general convolution kernels pad 3 input channels, or 1 output channel, to a width made for 64 and more, and take ten times
as long as the memory traffic requires: here the one wide tensor is moved once. Every voxel contributes to 27 results, so a
product of its channels with all taps' weights reads it once. A program takes a tile of a plane with its border and walks along
the depth. Taps of different depth are added in three running sums (results behind, at and ahead of the plane); those of one
plane are aligned by a gather inside the tile. Scale and offset of the GroupNorm before a head, and its SiLU, can be applied
when the tile is loaded: once per voxel, not once per tap. Volumes in half precision without a norm go to head_lines.py.

Legend: N batch, D H W voxels (an image has D = 1), C channels in, M channels out, T columns of a product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from voxtune.kernels.group_norm import empty_channels_last
from voxtune.kernels.head_lines import WIDEST, head_lines, pack_lines, why_not_lines
from voxtune.kernels.pointwise import TYPES
from voxtune.kernels.precompile import ready
from voxtune.kernels.stem_conv import FEW, as_volume, span

# Columns per output channel: the 9 taps of a plane, rounded up to a power of two.
COLUMNS = 16
# Shared memory for planes in flight, in bytes: a little less than the smallest GPUs allow per program.
SHARED = 64 << 10
# A walk along the depth is made longer only while there are at least this many programs: four per multiprocessor of a large GPU.
ENOUGH = 528


@dataclass(frozen=True, kw_only=True)
class PackedHead:
    weight: Tensor  # (depth taps, C padded, M padded * COLUMNS)
    channels: int
    out_channels: int
    dimensions: int
    lines: Tensor | None  # for head_lines.py, if that kernel can apply


def pack_head(weight: Tensor, dtype: torch.dtype) -> PackedHead:
    """A convolution's weight (M, C, 3, 3(, 3))."""
    M, C = weight.shape[:2]
    w_ZCMT = weight.detach().reshape(M, C, -1, 9).permute(2, 1, 0, 3)
    w_ZCMT = F.pad(w_ZCMT, (0, COLUMNS - 9, 0, triton.next_power_of_2(M) - M, 0, -C % chunk_of(C, dtype)))
    by_lines = weight.dim() == 5 and dtype in (torch.bfloat16, torch.float16) and C <= WIDEST and M <= FEW
    return PackedHead(
        weight=w_ZCMT.flatten(2).to(dtype).contiguous(),
        channels=C,
        out_channels=M,
        dimensions=weight.dim() - 2,
        lines=pack_lines(weight, dtype) if by_lines else None,
    )


def head_reference(x: Tensor, weight: Tensor, bias_M: Tensor | None = None, affine: Tensor | None = None) -> Tensor:
    """The same in plain PyTorch, in the weight's type; `affine` (N, 2, C) is a norm's scale and offset, then SiLU."""
    x = x.to(weight.dtype)
    if affine is not None:
        scale, offset = (a.to(weight.dtype).view(*a.shape, *[1] * (x.dim() - 2)) for a in affine.unbind(1))
        x = F.silu(x * scale + offset)
    return (F.conv3d if x.dim() == 5 else F.conv2d)(x, weight, bias_M, padding=1)


@triton.jit
def _columns(w_at, tap, VOLUME: tl.constexpr):
    """Weights (BLOCK_K, T) of what a plane gives to the results ahead of it, in it and behind it."""
    ahead = tl.load(w_at)
    if VOLUME:
        return ahead, tl.load(w_at + tap), tl.load(w_at + 2 * tap)
    return ahead, ahead, ahead


@triton.jit
def _activated(
    x,  # (BLOCK_V, BLOCK_K)
    affine_ptr,  # (2, C): scale and offset
    c,
    keep,
    C: tl.constexpr,
):
    scale = tl.load(affine_ptr + c, mask=c < C, other=0.0)
    offset = tl.load(affine_ptr + C + c, mask=c < C, other=0.0)
    y = x.to(tl.float32) * scale[None, :] + offset[None, :]
    # 1 / q as the square of 1 / sqrt(q): a division is several times the instructions.
    root = tl.rsqrt(1.0 + tl.exp(-y))
    # The padding's zeros come after the SiLU.
    return tl.where(keep, y * root * root, 0.0).to(x.dtype)


@triton.jit
def _voxels(x_at, affine_ptr, c, keep, C: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr):
    """A tile's channels c, activated when a norm comes with them."""
    if not EVEN:
        keep = keep & (c < C)[None, :]
    x = tl.load(x_at + c[None, :], mask=keep, other=0.0)
    return _activated(x, affine_ptr, c, keep, C) if NORM else x


@triton.jit
def _products(x, w_ahead, w_here, w_behind, ahead, here, behind, VOLUME: tl.constexpr, PRECISION: tl.constexpr):
    ahead = tl.dot(x, w_ahead, ahead, input_precision=PRECISION)
    if VOLUME:
        here = tl.dot(x, w_here, here, input_precision=PRECISION)
        behind = tl.dot(x, w_behind, behind, input_precision=PRECISION)
    return ahead, here, behind


@triton.jit
def voxtune_head(
    x_ptr,  # (N, D, H, W, C)
    affine_ptr,  # (N, 2, C) float32: scale and offset; unread when NORM is off
    w_ptr,  # (3, C padded, M padded * COLUMNS); an image has one depth tap
    bias_ptr,  # (M,) of any float type; unread when HAS_BIAS is off
    y_ptr,  # (N, M, D, H, W) of any strides
    D,
    H,
    W,
    M,
    y_n,
    y_m,
    y_d,
    y_h,
    y_w,
    columns,  # M padded * COLUMNS
    C: tl.constexpr,
    WALK: tl.constexpr,  # planes of the result for one program
    VOLUME: tl.constexpr,
    NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_H: tl.constexpr,  # with the border
    BLOCK_W: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    BLOCK_V: tl.constexpr = BLOCK_H * BLOCK_W
    T: tl.constexpr = BLOCK_M * COLUMNS
    CHUNKS: tl.constexpr = (C + BLOCK_K - 1) // BLOCK_K
    EDGE: tl.constexpr = 1 if VOLUME else 0
    blocks_w, blocks_h = tl.cdiv(W, BLOCK_W - 2), tl.cdiv(H, BLOCK_H - 2)
    block, n = tl.program_id(0), tl.program_id(2).to(tl.int64)
    d0 = block // (blocks_w * blocks_h) * WALK
    v = tl.arange(0, BLOCK_V)
    i, j = v // BLOCK_W, v % BLOCK_W
    h, w = block // blocks_w % blocks_h * (BLOCK_H - 2) - 1 + i, block % blocks_w * (BLOCK_W - 2) - 1 + j
    in_plane = (h >= 0) & (h < H) & (w >= 0) & (w < W)
    inner = in_plane & (i > 0) & (i < BLOCK_H - 1) & (j > 0) & (j < BLOCK_W - 1)
    # From which voxel of the tile the tap of a column comes; the border's own results are never stored, only kept in range.
    t = tl.arange(0, T) % COLUMNS
    shift = tl.where(t < 9, (t // 3 - 1) * BLOCK_W + t % 3 - 1, 0)
    source = tl.minimum(tl.maximum(v[:, None] + shift[None, :], 0), BLOCK_V - 1)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    bias = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + m, mask=m < M, other=0.0).to(tl.float32)
    y_at = h[:, None] * y_h + w[:, None] * y_w + m[None, :] * y_m
    k = tl.arange(0, BLOCK_K)
    w_at = w_ptr + k[:, None] * columns + (tl.program_id(1) * T + tl.arange(0, T))[None, :]
    tap = CHUNKS * BLOCK_K * columns  # from one depth tap's weights to the next one's
    if CHUNKS == 1:
        w_ahead, w_here, w_behind = _columns(w_at, tap, VOLUME)
    here = tl.zeros((BLOCK_V, T), tl.float32)
    behind = tl.zeros((BLOCK_V, T), tl.float32)
    for step in range(tl.minimum(WALK, D - d0) + 2 * EDGE):
        d = d0 - EDGE + step
        depth = d + tl.zeros_like(v)  # as a tile: the interpreter cannot join a tile's mask with a scalar's
        keep = (in_plane & (depth >= 0) & (depth < D))[:, None]
        plane = x_ptr + (n * D + d) * (H * W * C)
        ahead = tl.zeros((BLOCK_V, T), tl.float32)
        first = plane + (h * W + w)[:, None] * C
        norm = affine_ptr + n * 2 * C
        if CHUNKS == 1:
            x = _voxels(first, norm, k, keep, C, C % BLOCK_K == 0, NORM)
            ahead, here, behind = _products(x, w_ahead, w_here, w_behind, ahead, here, behind, VOLUME, PRECISION)
        else:  # a loop of its own: unrolled, wide networks would fill the shared memory, or the registers
            for k0 in range(0, C, BLOCK_K):
                x = _voxels(first, norm, k0 + k, keep, C, C % BLOCK_K == 0, NORM)
                w_ahead, w_here, w_behind = _columns(w_at + k0 * columns, tap, VOLUME)
                ahead, here, behind = _products(x, w_ahead, w_here, w_behind, ahead, here, behind, VOLUME, PRECISION)
        taps = tl.gather(behind if VOLUME else ahead, source, 0)
        y = tl.sum(tl.reshape(taps, (BLOCK_V, BLOCK_M, COLUMNS)), axis=2) + bias[None, :]
        # A plane of the result is whole when the input's next one has been added.
        keep_y = (inner & (depth >= d0 + EDGE))[:, None] & (m < M)[None, :]
        y_plane = y_ptr + (n * y_n + (d - EDGE).to(tl.int64) * y_d)
        tl.store(y_plane + y_at, y.to(y_ptr.dtype.element_ty), mask=keep_y)
        behind, here = here, ahead


def why_not_head(x: Tensor, packed: PackedHead, out: Tensor | None = None) -> str | None:
    """The reason why the head's kernel does not apply, or None."""
    if x.dtype not in TYPES or x.dtype != packed.weight.dtype:
        return f"type {x.dtype} with weights of {packed.weight.dtype}"
    if x.dim() - 2 != packed.dimensions or packed.dimensions not in (2, 3):
        return f"{x.dim() - 2} voxel axes, and weights for {packed.dimensions}"
    if x.shape[1] != packed.channels or packed.out_channels > FEW:
        return f"{x.shape[1]} channels to {packed.out_channels}: as packed, and at most {FEW} outputs, are required"
    if not x.movedim(1, -1).is_contiguous() or x.numel() == 0 or x.shape[-1] * x.shape[-2] * x.shape[1] >= 2**31:
        return "the source is not channels-last, or empty, or has a plane of 2^31 values or more"
    if out is not None and (out.shape != (x.shape[0], packed.out_channels, *x.shape[2:]) or span(out) >= 2**31):
        return f"an output of shape {tuple(out.shape)}"
    return None


def head(
    x: Tensor,
    packed: PackedHead,
    bias_M: Tensor | None = None,
    *,
    affine: Tensor | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    tf32: bool = False,
    checked: bool = False,
) -> Tensor:
    """conv(x) + bias for channels-last x, or conv(silu(x * scale + offset)) with a norm's `affine` (N, 2, C) float32.

    The result goes to `out`, of any strides, or to a channels-last tensor of `dtype` (default: x's). `why_not_head` must be
    None; `checked`: the caller has called it.
    """
    assert checked or (reason := why_not_head(x, packed, out)) is None, reason
    M, volume = packed.out_channels, packed.dimensions == 3
    y = empty_channels_last(x, M, dtype) if out is None else out
    if affine is None and packed.lines is not None and why_not_lines(x, M) is None:
        head_lines(x, packed.lines, bias_M, y)
        return y
    N, C, D, H, W = as_volume(x).shape
    tile = head_tile(C, M, x.dtype, volume=volume)
    blocks = triton.cdiv(H, tile["BLOCK_H"] - 2) * triton.cdiv(W, tile["BLOCK_W"] - 2)
    walk = head_walk(N * blocks, D) if volume else 1
    padded = triton.next_power_of_2(M)
    ready(voxtune_head)[(blocks * triton.cdiv(D, walk), padded // tile["BLOCK_M"], N)](
        x,
        x if affine is None else affine,
        packed.weight,
        packed.weight if bias_M is None else bias_M,
        y,
        D,
        H,
        W,
        M,
        *as_volume(y).stride(),
        padded * COLUMNS,
        C=C,
        WALK=walk,
        VOLUME=volume,
        NORM=affine is not None,
        HAS_BIAS=bias_M is not None,
        PRECISION="tf32" if tf32 else "ieee",
        BLOCK_K=chunk_of(C, x.dtype),
        COLUMNS=COLUMNS,
        **tile,
    )
    return y


def head_tile(C: int, M: int, dtype: torch.dtype, *, volume: bool) -> dict[str, int]:
    """The tile with its border, its warps and stages. Three sums of a column for every tap must stay in registers."""
    chunk, full = chunk_of(C, dtype), dtype == torch.float32
    block_m = 1 if full else min(2 if volume and chunk < C else 4, triton.next_power_of_2(M))
    warps = 4 if full or (M == 1 and chunk >= C) else 8
    block_w = 8 if full else 16
    weights = (3 if volume else 1) * block_m * COLUMNS if chunk < C else 0  # else they are fetched once
    fitting = SHARED // (chunk * (8 * block_w + weights) * dtype.itemsize)
    stages = max(1, min(2 if full else 3, fitting))
    return {"BLOCK_H": 8, "BLOCK_W": block_w, "BLOCK_M": block_m, "num_warps": warps, "num_stages": stages}


def head_walk(columns: int, D: int) -> int:
    """Planes of the result per program: the planes at its two ends are read twice, but the programs must fill the GPU."""
    walk = 32
    while walk > 2 and columns * triton.cdiv(D, walk) < ENOUGH:
        walk //= 2
    return walk


def chunk_of(C: int, dtype: torch.dtype) -> int:
    """Channels per product of the head; few for float32, whose products keep their operands in registers."""
    return max(16, min(16 if dtype == torch.float32 else 64, triton.next_power_of_2(C)))

"""The gradient of upsample.py's doubling: linear and nearest, for channels-last images and volumes.

Why: PyTorch's backward pass of a linear upsampling works in float32 and NCDHW, so in half precision most of its time is casts and
layout copies of the result's gradient, which is eight times as large as the source's. Here each voxel of the source gathers its
gradient, in a fixed order and without atomics. Along each axis

    dx[i] = 1/4 dy[2i - 1] + 3/4 dy[2i] + 3/4 dy[2i + 1] + 1/4 dy[2i + 2],

with dy beyond the border equal to dy at the border, since there the source's border voxel was read twice. A program takes a tile
of a plane, with all channels, and walks along the depth: every plane of dy is gathered once, and what the next voxel needs of it
stays in registers.

Legend: N batch, D H W sizes of the source, C channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from voxtune.kernels.group_norm import channel_block, empty_channels_last
from voxtune.kernels.pointwise import TYPES
from voxtune.kernels.precompile import ready
from voxtune.kernels.upsample import MODES

# Bytes of a tile: with 8 warps, one 16-byte vector per lane.
TILE = 4096
# A walk along the depth is made longer only while there are at least this many programs.
ENOUGH = 1024
LONGEST_WALK = 8


def upsample_backward_reference(dy: Tensor, mode: str) -> Tensor:
    """The same by PyTorch, in float32, or in float64 for float64."""
    wide = dy.to(torch.promote_types(dy.dtype, torch.float32)).contiguous()
    volume, double = dy.dim() == 5, list(dy.shape[2:])
    kind = f"nearest{len(double)}d" if mode == "nearest" else "trilinear3d" if volume else "bilinear2d"
    gradient = getattr(torch.ops.aten, f"upsample_{kind}_backward").default
    corners = [] if mode == "nearest" else [False]
    shape = [*dy.shape[:2], *(side // 2 for side in double)]
    dx: Tensor = gradient(wide, double, shape, *corners, *[2.0] * len(double))
    return dx.to(dy.dtype)


@triton.jit
def _line(row_ptr, w_0, w_1, w_2, w_3, keep):
    """What a line of dy gives to the source's voxels; w_0 to w_3 are the offsets of its four voxels."""
    y_0 = tl.load(row_ptr + w_0, mask=keep, other=0.0).to(tl.float32)
    y_1 = tl.load(row_ptr + w_1, mask=keep, other=0.0).to(tl.float32)
    y_2 = tl.load(row_ptr + w_2, mask=keep, other=0.0).to(tl.float32)
    y_3 = tl.load(row_ptr + w_3, mask=keep, other=0.0).to(tl.float32)
    return 0.25 * (y_0 + y_3) + 0.75 * (y_1 + y_2)


@triton.jit
def _plane(
    plane_ptr,  # (2H, 2W, C): one plane of dy
    h,
    w,
    c,
    H,
    W,
    C,
    keep,
):
    """What a plane of dy gives to the source's voxels."""
    row = 2 * W * C
    h_0, h_3 = tl.maximum(2 * h - 1, 0) * row, tl.minimum(2 * h + 2, 2 * H - 1) * row
    w_0, w_3 = tl.maximum(2 * w - 1, 0) * C + c, tl.minimum(2 * w + 2, 2 * W - 1) * C + c
    w_1, w_2 = 2 * w * C + c, (2 * w + 1) * C + c
    outer = _line(plane_ptr + h_0, w_0, w_1, w_2, w_3, keep) + _line(plane_ptr + h_3, w_0, w_1, w_2, w_3, keep)
    inner = _line(plane_ptr + 2 * h * row, w_0, w_1, w_2, w_3, keep)
    inner += _line(plane_ptr + (2 * h + 1) * row, w_0, w_1, w_2, w_3, keep)
    return 0.25 * outer + 0.75 * inner


@triton.jit
def voxtune_upsample_linear_backward(
    dy_ptr,  # (N, 2D, 2H, 2W, C); an image has no depth
    dx_ptr,  # (N, D, H, W, C)
    D,
    H,
    W,
    C,
    WALK: tl.constexpr,  # planes of dx for one program
    VOLUME: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    blocks_c, blocks_w = tl.cdiv(C, BLOCK_C), tl.cdiv(W, BLOCK_W)
    c = (tl.program_id(0) % blocks_c * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    tile, n = tl.program_id(0) // blocks_c, tl.program_id(2).to(tl.int64)
    v = tl.arange(0, BLOCK_H * BLOCK_W)[:, None]
    h, w = tile // blocks_w * BLOCK_H + v // BLOCK_W, tile % blocks_w * BLOCK_W + v % BLOCK_W
    keep = (h < H) & (w < W) & (c < C)
    plane, at = H * W * C, (h * W + w) * C + c
    if not VOLUME:
        dx = _plane(dy_ptr + n * 4 * plane, h, w, c, H, W, C, keep)
        tl.store(dx_ptr + n * plane + at, dx.to(dx_ptr.dtype.element_ty), mask=keep)
    else:
        d0 = tl.program_id(1) * WALK
        planes = dy_ptr + n * 2 * D * 4 * plane
        before = _plane(planes + tl.maximum(2 * d0 - 1, 0).to(tl.int64) * (4 * plane), h, w, c, H, W, C, keep)
        here = _plane(planes + (2 * d0).to(tl.int64) * (4 * plane), h, w, c, H, W, C, keep)
        dx = 0.25 * before + 0.75 * here
        following = tl.zeros_like(dx)
        # One plane a step, though two make a result: with both at once, their loads fill the registers.
        for step in range(2 * tl.minimum(WALK, D - d0)):
            y_d = tl.minimum(2 * d0 + 1 + step, 2 * D - 1)
            y = _plane(planes + y_d.to(tl.int64) * (4 * plane), h, w, c, H, W, C, keep)
            last = (
                step % 2 + tl.zeros_like(v)
            ) == 1  # as a tile: the interpreter cannot join a tile's mask with a scalar's
            dx += tl.where(last, 0.25, 0.75) * y
            following += tl.where(last, 0.75, 0.25) * y
            x_plane = dx_ptr + (n * D + d0 + step // 2) * plane
            tl.store(x_plane + at, dx.to(dx_ptr.dtype.element_ty), mask=keep & last)
            dx, following = tl.where(last, following, dx), tl.where(last, 0.0, following)


@triton.jit
def voxtune_upsample_nearest_backward(
    dy_ptr,  # (N, 2D, 2H, 2W, C); an image has no depth
    dx_ptr,  # (N, D, H, W, C)
    D,
    H,
    W,
    C,
    VOLUME: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    blocks_c = tl.cdiv(C, BLOCK_C)
    c = (tl.program_id(0) % blocks_c * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    q = (tl.program_id(0) // blocks_c * BLOCK_Q + tl.arange(0, BLOCK_Q))[:, None]
    d, n = tl.program_id(1), tl.program_id(2).to(tl.int64)
    h, w = q // W, q % W
    keep = (h < H) & (c < C)
    plane, row = H * W * C, 2 * W * C
    at = (2 * h * (2 * W) + 2 * w) * C + c
    dx = tl.zeros((BLOCK_Q, BLOCK_C), tl.float32)
    PLANES: tl.constexpr = 2 if VOLUME else 1
    for copy in tl.static_range(PLANES):
        y_plane = dy_ptr + ((n * D + d) * PLANES + copy) * (4 * plane)
        dx += tl.load(y_plane + at, mask=keep, other=0.0).to(tl.float32)
        dx += tl.load(y_plane + at + C, mask=keep, other=0.0).to(tl.float32)
        dx += tl.load(y_plane + at + row, mask=keep, other=0.0).to(tl.float32)
        dx += tl.load(y_plane + at + row + C, mask=keep, other=0.0).to(tl.float32)
    tl.store(dx_ptr + (n * D + d) * plane + q * C + c, dx.to(dx_ptr.dtype.element_ty), mask=keep)


def why_not(dy: Tensor, mode: str) -> str | None:
    """The reason why the kernels do not apply, or None."""
    if mode not in MODES or dy.dim() not in (4, 5):
        return f"mode {mode!r} with {dy.dim()} dimensions"
    if dy.dtype not in TYPES:
        return f"type {dy.dtype} has no kernel"
    if not dy.movedim(1, -1).is_contiguous() or dy.numel() == 0:
        return "the gradient is not channels-last, or empty"
    if dy.shape[-1] * dy.shape[-2] * dy.shape[1] >= 2**31:
        return "a plane of the gradient has 2^31 values or more"
    return None


def upsample_backward(dy: Tensor, mode: str, *, checked: bool = False) -> Tensor:
    """The source's gradient from the result's, in its type, channels-last; `why_not` must be None.

    `checked`: the caller has called `why_not`.
    """
    assert checked or (reason := why_not(dy, mode)) is None, reason
    volume = dy.dim() == 5
    N, C, *double = dy.shape
    voxels = tuple(side // 2 for side in double)
    H, W = voxels[-2:]
    D = voxels[0] if volume else 1
    dx = empty_channels_last(dy, C, voxels=voxels)
    block_c = channel_block(C)
    block_v, blocks_c = TILE // (block_c * dy.element_size()), triton.cdiv(C, block_c)
    if mode == "nearest":
        ready(voxtune_upsample_nearest_backward)[(blocks_c * triton.cdiv(H * W, block_v), D, N)](
            dy, dx, D, H, W, C, VOLUME=volume, BLOCK_Q=block_v, BLOCK_C=block_c, num_warps=8
        )
        return dx
    block_h, block_w = tile_of(block_v)
    columns = blocks_c * triton.cdiv(H, block_h) * triton.cdiv(W, block_w)
    walk = walk_of(N * columns, D) if volume else 1
    ready(voxtune_upsample_linear_backward)[(columns, triton.cdiv(D, walk), N)](
        dy, dx, D, H, W, C, WALK=walk, VOLUME=volume, BLOCK_H=block_h, BLOCK_W=block_w, BLOCK_C=block_c, num_warps=8
    )
    return dx


def tile_of(voxels: int) -> tuple[int, int]:
    """(height, width) of a tile: nearly square, since its border is read by its neighbours too."""
    width = 1 << (voxels.bit_length() // 2)
    return voxels // width, width


def walk_of(columns: int, D: int) -> int:
    """Planes a program walks along the depth: longer walks read less, as long as the programs still fill the GPU."""
    walk = LONGEST_WALK
    while walk > 1 and columns * triton.cdiv(D, walk) < ENOUGH:
        walk //= 2
    return walk

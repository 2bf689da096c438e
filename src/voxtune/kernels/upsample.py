"""Doubling of channels-last images and volumes: linear (bilinear, trilinear; align_corners off) and nearest.

Why: the result is eight times as large as the source, so most of the time is spent writing it. A cell is the space between
neighbouring voxels; its 8 corners determine exactly 8 results, which no other cell shares (in 2D 4 and 4):

    y[2i + 1] = 3/4 x[i] + 1/4 x[i + 1],    y[2i + 2] = 1/4 x[i] + 3/4 x[i + 1],    i = -1 .. size - 1,

with x beyond the border equal to x at the border. A program processes a stretch of cells of a plane, with all channels, and
walks along the depth: of each cell only the far face is read; the interpolated near face stays in registers.

Legend: N batch, D H W sizes of the source, C channels, Q cells of a plane, (H + 1) * (W + 1).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from voxtune.kernels.group_norm import channel_block, empty_channels_last
from voxtune.kernels.pointwise import TYPES
from voxtune.kernels.precompile import ready

MODES = ("linear", "nearest")
# Elements of a tile: with 4 warps, one 16-byte vector of 16-bit values per lane.
TILE = 1024
# A walk along the depth is made longer only while there are at least this many programs.
ENOUGH = 2048
LONGEST_WALK = 8


def upsample_reference(x: Tensor, mode: str) -> Tensor:
    """The same by PyTorch, in float32, or in float64 for float64."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if mode == "nearest":
        return F.interpolate(wide, scale_factor=2, mode="nearest").to(x.dtype)
    kind = "trilinear" if x.dim() == 5 else "bilinear"
    return F.interpolate(wide, scale_factor=2, mode=kind, align_corners=False).to(x.dtype)


@triton.jit
def _face(
    plane_ptr,  # (H, W, C): one plane of the source
    corner_ll,  # offsets in the plane of a cell's corners: low or high h, low or high w
    corner_lh,
    corner_hl,
    corner_hh,
    keep,
):
    """A cell's four results in the plane: low or high h, low or high w."""
    x_ll = tl.load(plane_ptr + corner_ll, mask=keep, other=0.0).to(tl.float32)
    x_lh = tl.load(plane_ptr + corner_lh, mask=keep, other=0.0).to(tl.float32)
    x_hl = tl.load(plane_ptr + corner_hl, mask=keep, other=0.0).to(tl.float32)
    x_hh = tl.load(plane_ptr + corner_hh, mask=keep, other=0.0).to(tl.float32)
    a_l, a_h = 0.75 * x_ll + 0.25 * x_lh, 0.25 * x_ll + 0.75 * x_lh
    b_l, b_h = 0.75 * x_hl + 0.25 * x_hh, 0.25 * x_hl + 0.75 * x_hh
    return 0.75 * a_l + 0.25 * b_l, 0.75 * a_h + 0.25 * b_h, 0.25 * a_l + 0.75 * b_l, 0.25 * a_h + 0.75 * b_h


@triton.jit
def _write_face(
    plane_ptr,  # (2H, 2W, C): one plane of the result
    y_ll,
    y_lh,
    y_hl,
    y_hh,
    at,  # the low, low result's offset; the border's cells begin before the plane
    row,  # 2W * C
    C,
    low_h,  # which results of a cell lie in the plane
    high_h,
    low_w,
    high_w,
    valid,
):
    kind = plane_ptr.dtype.element_ty
    tl.store(plane_ptr + at, y_ll.to(kind), mask=valid & low_h & low_w)
    tl.store(plane_ptr + at + C, y_lh.to(kind), mask=valid & low_h & high_w)
    tl.store(plane_ptr + at + row, y_hl.to(kind), mask=valid & high_h & low_w)
    tl.store(plane_ptr + at + row + C, y_hh.to(kind), mask=valid & high_h & high_w)


@triton.jit
def voxtune_upsample_linear(
    x_ptr,  # (N, D, H, W, C)
    y_ptr,  # (N, 2D, 2H, 2W, C); an image keeps its D of 1
    D,
    H,
    W,
    C,
    WALK: tl.constexpr,  # cells a program walks along the depth
    VOLUME: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    blocks_c = tl.cdiv(C, BLOCK_C)
    c = (tl.program_id(0) % blocks_c * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    q = (tl.program_id(0) // blocks_c * BLOCK_Q + tl.arange(0, BLOCK_Q))[:, None]
    n = tl.program_id(2).to(tl.int64)
    h, w = q // (W + 1) - 1, q % (W + 1) - 1
    keep = (h < H) & (c < C)
    h_l, h_h, w_l, w_h = tl.maximum(h, 0) * W, tl.minimum(h + 1, H - 1) * W, tl.maximum(w, 0), tl.minimum(w + 1, W - 1)
    ll, lh, hl, hh = (h_l + w_l) * C + c, (h_l + w_h) * C + c, (h_h + w_l) * C + c, (h_h + w_h) * C + c
    at, row = ((2 * h + 1) * (2 * W) + 2 * w + 1) * C + c, 2 * W * C
    low_h, high_h, low_w, high_w = h >= 0, h < H - 1, w >= 0, w < W - 1
    plane = H * W * C
    if not VOLUME:
        y_ll, y_lh, y_hl, y_hh = _face(x_ptr + n * plane, ll, lh, hl, hh, keep)
        _write_face(y_ptr + n * 4 * plane, y_ll, y_lh, y_hl, y_hh, at, row, C, low_h, high_h, low_w, high_w, keep)
    else:
        d0 = tl.program_id(1) * WALK - 1
        n_ll, n_lh, n_hl, n_hh = _face(x_ptr + (n * D + tl.maximum(d0, 0)) * plane, ll, lh, hl, hh, keep)
        for step in range(tl.minimum(WALK, D - d0)):
            d = d0 + step
            depth = d + tl.zeros_like(h)  # as a tile: the interpreter cannot join a tile's mask with a scalar's
            f_ll, f_lh, f_hl, f_hh = _face(x_ptr + (n * D + tl.minimum(d + 1, D - 1)) * plane, ll, lh, hl, hh, keep)
            y_plane = y_ptr + (n * 2 * D + 2 * d + 1) * (4 * plane)
            _write_face(
                y_plane,
                0.75 * n_ll + 0.25 * f_ll,
                0.75 * n_lh + 0.25 * f_lh,
                0.75 * n_hl + 0.25 * f_hl,
                0.75 * n_hh + 0.25 * f_hh,
                at, row, C, low_h, high_h, low_w, high_w, keep & (depth >= 0),
            )  # fmt: skip
            _write_face(
                y_plane + 4 * plane,
                0.25 * n_ll + 0.75 * f_ll,
                0.25 * n_lh + 0.75 * f_lh,
                0.25 * n_hl + 0.75 * f_hl,
                0.25 * n_hh + 0.75 * f_hh,
                at, row, C, low_h, high_h, low_w, high_w, keep & (depth < D - 1),
            )  # fmt: skip
            n_ll, n_lh, n_hl, n_hh = f_ll, f_lh, f_hl, f_hh


@triton.jit
def voxtune_upsample_nearest(
    x_ptr,  # (N, D, H, W, C)
    y_ptr,  # (N, 2D, 2H, 2W, C); an image keeps its D of 1
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
    plane = H * W * C
    x = tl.load(x_ptr + (n * D + d) * plane + q * C + c, mask=keep, other=0.0)
    at, row = (2 * h * (2 * W) + 2 * w) * C + c, 2 * W * C
    PLANES: tl.constexpr = 2 if VOLUME else 1
    for copy in tl.static_range(PLANES):
        y_plane = y_ptr + ((n * D + d) * PLANES + copy) * (4 * plane)
        tl.store(y_plane + at, x, mask=keep)
        tl.store(y_plane + at + C, x, mask=keep)
        tl.store(y_plane + at + row, x, mask=keep)
        tl.store(y_plane + at + row + C, x, mask=keep)


def why_not(x: Tensor, mode: str) -> str | None:
    """The reason why the kernels do not apply, or None."""
    if mode not in MODES:
        return f"unknown mode {mode!r}; choose from {', '.join(MODES)}"
    if x.dim() not in (4, 5):
        return f"{x.dim()} dimensions: an image has 4, a volume 5"
    if x.dtype not in TYPES:
        return f"type {x.dtype} has no kernel"
    if not x.movedim(1, -1).is_contiguous() or x.numel() == 0:
        return "the source is not channels-last, or empty"
    if 4 * x.shape[-1] * x.shape[-2] * x.shape[1] >= 2**31:
        return "a plane of the result has 2^31 values or more"
    return None


def upsample(x: Tensor, mode: str, *, checked: bool = False) -> Tensor:
    """x doubled along every voxel axis; `mode` is "linear" or "nearest"; `why_not` must be None.

    `checked`: the caller has called `why_not`.
    """
    assert checked or (reason := why_not(x, mode)) is None, reason
    volume = x.dim() == 5
    N, C, *voxels = x.shape
    H, W = voxels[-2:]
    D = voxels[0] if volume else 1
    y = empty_channels_last(x, C, voxels=tuple(2 * side for side in voxels))
    block_c = channel_block(C)
    block_q = TILE // block_c
    blocks_c = triton.cdiv(C, block_c)
    if mode == "nearest":
        grid: tuple[int, ...] = (blocks_c * triton.cdiv(H * W, block_q), D, N)
        ready(voxtune_upsample_nearest)[grid](
            x, y, D, H, W, C, VOLUME=volume, BLOCK_Q=block_q, BLOCK_C=block_c, num_warps=4
        )
        return y
    columns = blocks_c * triton.cdiv((H + 1) * (W + 1), block_q)
    walk = walk_of(N * columns, D) if volume else 1
    grid = (columns, triton.cdiv(D + 1, walk) if volume else 1, N)
    ready(voxtune_upsample_linear)[grid](
        x, y, D, H, W, C, WALK=walk, VOLUME=volume, BLOCK_Q=block_q, BLOCK_C=block_c, num_warps=4
    )
    return y


def walk_of(columns: int, D: int) -> int:
    """Cells a program walks along the depth: longer walks read less, as long as the programs still fill the GPU."""
    walk = LONGEST_WALK
    while walk > 1 and columns * triton.cdiv(D + 1, walk) < ENOUGH:
        walk //= 2
    return walk

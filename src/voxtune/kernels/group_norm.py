"""GroupNorm + SiLU for channels-last volumes, over one or two sources.

Why: PyTorch's GroupNorm takes NCDHW, so under channels-last every norm buys two layout copies; and with batch 1 it gives
each of 32 groups to one block, on a card of 132. Here the reduction runs over the whole device:

1. moments: each program reduces a stretch of voxels to per-channel sums, about a pivot (the first voxel's value), so that a
   large mean does not cancel the variance away;
2. finalize: per-channel sums become per-group statistics, and these a scale and an offset for every channel;
3. apply: y = silu(x * scale + offset), last-read voxels first, since the L2 still holds them.

A shift per channel (a convolution's bias, the time embedding) moves a channel's mean and leaves its spread: it is folded into
step 2 and costs no pass. Of two sources, cat([a, b]) on channels, each is reduced and applied on its own into its slice: the
concatenation is never written, although groups straddle the seam.

Legend: N batch, V voxels (D*H*W), C channels of all sources, G groups, P stretches of voxels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

# Programs of step 1 for each multiprocessor: enough loads in flight to fill the memory system.
WAVES = 4
MIN_VOXELS = 64


def group_norm_silu_reference(
    sources: tuple[Tensor, ...],
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float = 1e-5,
    shift_NC: Tensor | None = None,
    silu: bool = True,
) -> Tensor:
    """The same in plain PyTorch; statistics in float32, or float64 for float64 sources."""
    x = torch.cat(sources, dim=1)
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide)
    if shift_NC is not None:
        y = y + shift_NC.to(wide).view(*shift_NC.shape, *[1] * (x.dim() - 2))
    y = torch.group_norm(y, groups, weight.to(wide), bias.to(wide), eps)
    return (F.silu(y) if silu else y).to(x.dtype)


@triton.jit
def voxtune_moments(
    x_ptr,  # (N, V, CS): one source
    pivot_ptr,  # (N, C) float32
    partial_ptr,  # (N, P, 2, C) float32: sums and sums of squares about the pivot
    V,
    CS,
    C,
    first,  # this source's first channel among C
    stretch,  # voxels a program reduces
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    p, cb, n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    P = tl.num_programs(0)
    c = cb * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < CS
    base = x_ptr + n.to(tl.int64) * V * CS
    pivot = tl.load(base + c, mask=inside, other=0.0).to(tl.float32)
    if p == 0:
        tl.store(pivot_ptr + n * C + first + c, pivot, mask=inside)
    # One sum a lane, reduced over voxels once at the end: a reduction in the loop would wait for all warps each time.
    total = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    squares = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    start = p * stretch
    end = tl.minimum(start + stretch, V)
    for v0 in range(start, end, BLOCK_V):
        v = v0 + tl.arange(0, BLOCK_V)
        keep = (v < end)[:, None] & inside[None, :]
        x = tl.load(base + v[:, None].to(tl.int64) * CS + c[None, :], mask=keep, other=0.0).to(tl.float32)
        d = tl.where(keep, x - pivot[None, :], 0.0)
        total += d
        squares += d * d
    at = partial_ptr + ((n * P + p) * 2).to(tl.int64) * C + first + c
    tl.store(at, tl.sum(total, axis=0), mask=inside)
    tl.store(at + C, tl.sum(squares, axis=0), mask=inside)


@triton.jit
def voxtune_finalize(
    pivot_ptr,  # (N, C)
    partial_ptr,  # (N, P, 2, C)
    shift_ptr,  # (N, C) or (1, C), of any float type; unread when HAS_SHIFT is off
    weight_ptr,  # (C,)
    bias_ptr,  # (C,)
    affine_ptr,  # (N, 2, C) float32: scale and offset
    V,
    C,
    P,
    eps,
    shift_stride,  # C, or 0 when one shift serves the batch
    GROUP: tl.constexpr,  # channels a group
    BLOCK_G: tl.constexpr,  # GROUP, rounded up to a power of two
    BLOCK_P: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
):
    g, n = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, BLOCK_G)
    inside = lane < GROUP
    c = g * GROUP + lane
    total = tl.zeros((BLOCK_G,), tl.float32)
    squares = tl.zeros((BLOCK_G,), tl.float32)
    for p0 in range(0, P, BLOCK_P):
        p = p0 + tl.arange(0, BLOCK_P)
        keep = (p < P)[:, None] & inside[None, :]
        at = partial_ptr + ((n * P + p) * 2).to(tl.int64)[:, None] * C + c[None, :]
        total += tl.sum(tl.load(at, mask=keep, other=0.0), axis=0)
        squares += tl.sum(tl.load(at + C, mask=keep, other=0.0), axis=0)
    from_pivot = total / V
    spread = squares - total * from_pivot  # sum of squares about the channel's own mean
    mean_c = tl.load(pivot_ptr + n * C + c, mask=inside, other=0.0) + from_pivot
    shift = tl.zeros((BLOCK_G,), tl.float32)
    if HAS_SHIFT:
        shift = tl.load(shift_ptr + n * shift_stride + c, mask=inside, other=0.0).to(tl.float32)
    mean_c += shift
    mean = tl.sum(tl.where(inside, mean_c, 0.0), axis=0) / GROUP
    away = tl.where(inside, mean_c - mean, 0.0)
    variance = (tl.sum(tl.where(inside, spread, 0.0), axis=0) / V + tl.sum(away * away, axis=0)) / GROUP
    scale = tl.load(weight_ptr + c, mask=inside, other=0.0).to(tl.float32) / tl.sqrt(variance + eps)
    offset = tl.load(bias_ptr + c, mask=inside, other=0.0).to(tl.float32) + (shift - mean) * scale
    at = affine_ptr + n * 2 * C + c
    tl.store(at, scale, mask=inside)
    tl.store(at + C, offset, mask=inside)


@triton.jit
def voxtune_normalize(
    x_ptr,  # (N, V, CS): one source
    affine_ptr,  # (N, 2, C) float32
    y_ptr,  # (N, V, C)
    V,
    CS,
    C,
    first,
    SILU: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    # Last voxels first: step 1 read them last, so the L2 still has them.
    block, cb, n = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    c = cb * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < CS
    scale = tl.load(affine_ptr + n * 2 * C + first + c, mask=inside, other=0.0)
    offset = tl.load(affine_ptr + (n * 2 + 1) * C + first + c, mask=inside, other=0.0)
    v = block * BLOCK_V + tl.arange(0, BLOCK_V)
    keep = (v < V)[:, None] & inside[None, :]
    row = (n.to(tl.int64) * V + v)[:, None]
    x = tl.load(x_ptr + row * CS + c[None, :], mask=keep, other=0.0).to(tl.float32)
    y = x * scale[None, :] + offset[None, :]
    if SILU:
        y = y / (1.0 + tl.exp(-y))
    tl.store(y_ptr + row * C + first + c[None, :], y.to(y_ptr.dtype.element_ty), mask=keep)


def channel_block(channels: int) -> int:
    """The largest power of two that divides the channels, up to 128; where that is under 16, one masked block."""
    block = min(128, channels & -channels)
    return block if block >= 16 else min(128, triton.next_power_of_2(channels))


def voxels_last(x: Tensor) -> Tensor:
    """A channels-last (N, C, *voxels) tensor as its free view (N, V, C)."""
    x_NVC = x.movedim(1, -1)
    assert x_NVC.is_contiguous(), "the source is not channels-last"
    return x_NVC.view(x.shape[0], -1, x.shape[1])


def why_not(sources: tuple[Tensor, ...], groups: int) -> str | None:
    """The reason why the kernels do not apply, or None."""
    first = sources[0]
    channels = sum(s.shape[1] for s in sources)
    if first.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"type {first.dtype} has no kernel"
    if any(s.dtype != first.dtype or s.shape[0] != first.shape[0] or s.shape[2:] != first.shape[2:] for s in sources):
        return "the sources differ in type, batch or size"
    if any(not s.movedim(1, -1).is_contiguous() for s in sources):
        return "a source is not channels-last"
    if channels % groups:
        return f"{channels} channels do not divide into {groups} groups"
    if first.numel() == 0 or triton.next_power_of_2(channels // groups) > 1024:
        return "an empty source, or more than 1024 channels a group"
    return None


def group_norm_silu(
    sources: tuple[Tensor, ...],
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float = 1e-5,
    shift_NC: Tensor | None = None,
    silu: bool = True,
) -> Tensor:
    """silu(group_norm(cat(sources) + shift)) for channels-last sources (N, C_i, *voxels); `why_not` must be None."""
    assert (reason := why_not(sources, groups)) is None, reason
    views = [voxels_last(s) for s in sources]
    N, V, _ = views[0].shape
    C = sum(view.shape[2] for view in views)
    device = sources[0].device
    stretch, P = stretches(V, N, C, device)
    pivot = torch.empty((N, C), dtype=torch.float32, device=device)
    partial = torch.empty((N, P, 2, C), dtype=torch.float32, device=device)
    affine = torch.empty((N, 2, C), dtype=torch.float32, device=device)
    first = 0
    for view in views:
        CS = view.shape[2]
        block_c = channel_block(CS)
        voxtune_moments[(P, triton.cdiv(CS, block_c), N)](
            view, pivot, partial, V, CS, C, first, stretch, BLOCK_V=4096 // block_c, BLOCK_C=block_c, num_warps=8
        )
        first += CS
    group = C // groups
    voxtune_finalize[(groups, N)](
        pivot,
        partial,
        pivot if shift_NC is None else shift_NC,
        weight,
        bias,
        affine,
        V,
        C,
        P,
        eps,
        0 if shift_NC is None or shift_NC.shape[0] == 1 else C,
        GROUP=group,
        BLOCK_G=triton.next_power_of_2(group),
        BLOCK_P=max(1, min(128, 2048 // triton.next_power_of_2(group))),
        HAS_SHIFT=shift_NC is not None,
        num_warps=4,
    )
    y = _like(sources[0], C)
    y_NVC = voxels_last(y)
    first = 0
    for view in views:
        CS = view.shape[2]
        block_c = channel_block(CS)
        block_v = 4096 // block_c
        voxtune_normalize[(triton.cdiv(V, block_v), triton.cdiv(CS, block_c), N)](
            view, affine, y_NVC, V, CS, C, first, SILU=silu, BLOCK_V=block_v, BLOCK_C=block_c, num_warps=8
        )
        first += CS
    return y


def stretches(V: int, N: int, C: int, device: torch.device) -> tuple[int, int]:
    """(voxels a program reduces, how many programs share V): about WAVES programs a multiprocessor in all."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    columns = N * triton.cdiv(C, 128)
    wanted = max(1, WAVES * processors // columns)
    stretch = max(MIN_VOXELS, triton.cdiv(V, wanted))
    return stretch, triton.cdiv(V, stretch)


def _like(source: Tensor, channels: int) -> Tensor:
    """An empty channels-last tensor of `channels` beside `source`."""
    N, _, *voxels = source.shape
    return torch.empty((N, *voxels, channels), dtype=source.dtype, device=source.device).movedim(-1, 1)

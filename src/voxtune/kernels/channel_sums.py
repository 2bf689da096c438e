"""Sums of a channels-last volume over its voxels, for each channel: the gradients of biases and of shifts per channel.

Why: a convolution's bias needs the sum of the gradient that the convolution receives. PyTorch sums 16-bit values at a quarter of
the memory's speed, and often the sum is known already: the norm that computed the gradient has it (group_norm_backward.py), or
another convolution received the same gradient through a residual connection. `remember_sums` attaches it to the tensor;
`remembered_sums` returns it unless the tensor was written to since (PyTorch may add another gradient in place).

The kernel reduces a stretch of voxels per program, in float32 and a fixed order. Sums are passed on as those of the stretches:
each user adds them into memory of its own, which then may become a parameter's gradient.

Legend: N batch, V voxels (D*H*W), C channels, P stretches of voxels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from voxtune.kernels.group_norm import channel_block, stretches, unit_of, voxels_last
from voxtune.kernels.pointwise import TYPES
from voxtune.kernels.precompile import ready

# Bytes of a tile: with 8 warps, two 16-byte vectors per lane; and tiles in flight.
TILE = 8192
STAGES = 4
_SUMS = "_voxtune_channel_sums"


def channel_sums_reference(x: Tensor) -> Tensor:
    """(N, 1, C) by PyTorch, in float32 or wider."""
    voxels = tuple(range(2, x.dim()))
    return x.sum(voxels, dtype=torch.promote_types(x.dtype, torch.float32)).unsqueeze(1)


@triton.jit
def voxtune_channel_sums(
    x_ptr,  # (N, V, C)
    sums_ptr,  # (N, P, C) float32
    V,
    C,  # in units of UNIT
    stretch,  # voxels a program reduces
    UNIT: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,  # tiles in flight
):
    C *= UNIT
    p, cb, n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    c = cb * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < C
    base = x_ptr + n.to(tl.int64) * V * C
    start = p * stretch
    end = tl.minimum(start + stretch, V)
    # One sum a lane, reduced over voxels once at the end.
    total = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    for v0 in tl.range(start, end, BLOCK_V, num_stages=STAGES):
        v = v0 + tl.arange(0, BLOCK_V)
        keep = (v < end)[:, None] & inside[None, :]
        total += tl.load(base + v[:, None].to(tl.int64) * C + c[None, :], mask=keep, other=0.0).to(tl.float32)
    at = sums_ptr + (n * tl.num_programs(0) + p).to(tl.int64) * C + c
    tl.store(at, tl.sum(total, axis=0), mask=inside)


def why_not(x: Tensor) -> str | None:
    """The reason why the kernel does not apply, or None."""
    if x.dtype not in TYPES:
        return f"type {x.dtype} has no kernel"
    if not x.movedim(1, -1).is_contiguous() or x.numel() == 0:
        return "the volume is not channels-last, or empty"
    return None


def channel_sums(x: Tensor) -> Tensor:
    """(N, P, C) float32: the sums of P stretches, by the kernel; `why_not` must be None."""
    view = voxels_last(x)
    N, V, C = view.shape
    stretch, P = stretches(V, N, C, x.device)
    sums = torch.empty((N, P, C), dtype=torch.float32, device=x.device)
    block_c, unit = channel_block(C), unit_of(C)
    block_v = TILE // (block_c * x.element_size())
    ready(voxtune_channel_sums)[(P, triton.cdiv(C, block_c), N)](
        *(view, sums, V, C // unit, stretch),
        UNIT=unit,
        BLOCK_V=block_v,
        BLOCK_C=block_c,
        STAGES=STAGES,
        num_warps=8,
    )
    return sums


def remember_sums(x: Tensor, sums_NPC: Tensor) -> None:
    """Attaches a tensor's sums to it. They live as long as the tensor, and hold until it is written to."""
    setattr(x, _SUMS, (x._version, sums_NPC))


def remembered_sums(x: Tensor) -> Tensor | None:
    version, sums_NPC = getattr(x, _SUMS, (None, None))
    return sums_NPC if version == x._version else None

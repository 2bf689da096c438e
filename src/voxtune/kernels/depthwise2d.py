"""Depthwise 2D convolution (3x3, 5x5, 7x7) + bias + addend per channel, with the sums for the norm that follows.

Why: cuDNN's depthwise kernel for channels-last images takes ten microseconds at 64 x 64 pixels and 32 channels, and the addition
of the time embedding and the norm's statistics read its result again. The kernel is that of kernels/convnext/depthwise.py.

Legend: N batch, C channels, T tiles per sample.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from voxtune.kernels.conv2d import TYPES, processors_of
from voxtune.kernels.convnext.depthwise import depthwise_work, pack_depthwise
from voxtune.kernels.convnext.tiles import DepthwiseTile, depthwise_tile, power_of_two
from voxtune.kernels.group_norm import empty_channels_last, row_stride
from voxtune.kernels.precompile import ready

SIDES = (3, 5, 7)


def pack_taps(weight_C1ij: Tensor, dtype: torch.dtype) -> Tensor:
    """(rows of taps, rounded up to a power of two, times columns of taps, C)."""
    return pack_depthwise(weight_C1ij, dtype)


def depthwise2d_reference(
    sources: tuple[Tensor, ...], packed: Tensor, bias_C: Tensor | None, term_NC: Tensor | None, side: int
) -> Tensor:
    """The same in plain PyTorch; float32 arithmetic, or float64 for float64 sources."""
    x = torch.cat(sources, 1)
    wide = torch.promote_types(x.dtype, torch.float32)
    weight = packed[: side * side].to(wide).t().reshape(-1, 1, side, side)
    bias = None if bias_C is None else bias_C.to(wide)
    y = F.conv2d(x.to(wide), weight, bias, padding=side // 2, groups=x.shape[1])
    return (y if term_NC is None else y + term_NC.to(wide)[..., None, None]).to(x.dtype)


@triton.jit
def voxtune_depthwise2d(
    x_ptr, xb_ptr, w_ptr, bias_ptr, term_ptr, y_ptr, sums_ptr,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, CA: tl.constexpr, LDT: tl.constexpr, SIDE: tl.constexpr,
    BIAS: tl.constexpr, RUN: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """The arguments are those of `depthwise_work`; all images are dense."""
    LDX: tl.constexpr = CA if CA else C
    depthwise_work(
        tl.program_id(0), x_ptr, w_ptr, term_ptr, y_ptr, sums_ptr, H, W, C, LDX, RUN, BLOCK_P, BLOCK_C, BLOCK_I,
        C % BLOCK_C != 0, SIDE, xb_ptr, bias_ptr, BIAS, CA, C - CA, LDT,
    )  # fmt: skip


def why_not(sources: tuple[Tensor, ...], side: int) -> str | None:
    """The reason why the kernel does not apply, or None."""
    first = sources[0]
    if first.dtype not in TYPES or any(s.dtype != first.dtype for s in sources):
        return f"type {first.dtype}, or sources of several types"
    if any(not s.movedim(1, -1).is_contiguous() for s in sources):
        return "a source is not channels-last"
    if len(sources) > 2 or side not in SIDES or first.numel() == 0:
        return f"{len(sources)} sources, {side}x{side}"
    return None


@cache
def tile_for(rows: int, size: tuple[int, int], channels: int, side: int, processors: int) -> DepthwiseTile:
    tile = depthwise_tile(rows, size, channels, processors)
    # The rows of taps in parallel are at most those of the packed weight.
    return replace(tile, block_i=min(tile.block_i, power_of_two(side)))


def depthwise2d(
    sources: tuple[Tensor, ...],
    packed: Tensor,
    bias_C: Tensor | None,
    term_NC: Tensor | None,
    side: int,
    *,
    tile: DepthwiseTile | None = None,
    checked: bool = False,
) -> tuple[Tensor, Tensor]:
    """The image in channels-last, and its sums (N, 2, T). `why_not` must be None; `checked`: the caller has called it."""
    assert checked or (reason := why_not(sources, side)) is None, reason
    first = sources[0]
    (N, CA, H, W), C = first.shape, sum(s.shape[1] for s in sources)
    tile = tile or tile_for(N * H * W, (H, W), C, side, processors_of(first.device))
    tiles = tile.tiles(H * W, C)
    y = empty_channels_last(first, C)
    sums = torch.empty((N, 2, tiles), device=first.device)
    # One addend is enough: without a term per sample, the bias takes its place.
    bias, term = (None, bias_C) if term_NC is None else (bias_C, term_NC)
    term = torch.zeros(C, device=first.device) if term is None else term
    ready(voxtune_depthwise2d)[(N * tiles,)](
        first, sources[-1], packed, term if bias is None else bias, term, y, sums,
        H=H, W=W, C=C, CA=CA if len(sources) == 2 else 0, LDT=0 if term_NC is None else row_stride(term_NC), SIDE=side,
        BIAS=bias is not None, RUN=tile.run, BLOCK_P=tile.block_p, BLOCK_C=tile.block_c, BLOCK_I=tile.block_i,
        num_warps=tile.warps,
    )  # fmt: skip
    return y, sums

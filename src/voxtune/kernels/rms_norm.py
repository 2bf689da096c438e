"""RMS norm over the channels of each voxel + activation, for channels-last volumes.

Why: the video autoencoders write it as normalize(x, dim=1) * sqrt(C) * weight + bias, then SiLU: PyTorch reads and writes the
volume five to six times. In a channels-last volume the channels of a voxel are one row: each program reads its rows once,
reduces and scales them in registers, and writes them once.

Legend: N batch, V voxels of the whole batch, C channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from voxtune.kernels.group_norm import (
    TYPES,
    activate,
    activation_reference,
    empty_channels_last,
    unit_of,
    why_not_activation,
)
from voxtune.kernels.precompile import ready

MAX_CHANNELS = 4096


def rms_norm_act_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, floor: float, activation: str = "none"
) -> Tensor:
    """activation(x * weight / max(sqrt(mean(x^2) + eps), floor) + bias), the mean over the channels, in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide)
    rms = (y.square().mean(dim=1, keepdim=True) + eps).sqrt().clamp(min=floor)
    ones = [1] * (x.dim() - 2)
    y = y / rms * weight.to(wide).view(-1, *ones)
    if bias is not None:
        y = y + bias.to(wide).view(-1, *ones)
    return activation_reference(y, activation).to(x.dtype)


@triton.jit
def voxtune_rms_norm(
    x_ptr,  # (V, C)
    weight_ptr,  # (C,)
    bias_ptr,  # (C,); unread when HAS_BIAS is off
    y_ptr,  # (V, C)
    V,
    C,  # in units of UNIT
    eps,
    floor,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,  # at least C
):
    C *= UNIT
    c = tl.arange(0, BLOCK_C)
    inside = c < C
    v = tl.program_id(0).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    keep = (v < V)[:, None] & inside[None, :]
    at = v[:, None] * C + c[None, :]
    x = tl.load(x_ptr + at, mask=keep, other=0.0).to(tl.float32)
    rms = tl.sqrt(tl.sum(x * x, axis=1) / C + eps)
    scale = 1.0 / tl.where(rms < floor, floor, rms)
    weight = tl.load(weight_ptr + c, mask=inside, other=0.0).to(tl.float32)
    y = x * scale[:, None] * weight[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + c, mask=inside, other=0.0).to(tl.float32)[None, :]
    y = activate(y, 0.0, ACTIVATION)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=keep)


def why_not(x: Tensor, activation: str = "none") -> str | None:
    """The reason why the kernel does not apply, or None."""
    if x.dtype not in TYPES:
        return f"type {x.dtype} has no kernel"
    if not x.movedim(1, -1).is_contiguous():
        return "the source is not channels-last"
    if x.numel() == 0 or x.shape[1] > MAX_CHANNELS:
        return f"an empty source, or more than {MAX_CHANNELS} channels"
    if activation in ("leaky_relu", "prelu"):
        return f"activation {activation} has no kernel"
    return why_not_activation(activation, x.shape[1], None)


def rms_norm_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    floor: float,
    activation: str = "none",
    *,
    checked: bool = False,
) -> Tensor:
    """The same by the kernel for channels-last x (N, C, *voxels); `why_not` must be None.

    `checked`: the caller has called `why_not`.
    """
    assert checked or (reason := why_not(x, activation)) is None, reason
    C = x.shape[1]
    V = x.numel() // C
    y = empty_channels_last(x, C)
    block_c, unit = triton.next_power_of_2(C), unit_of(C)
    block_v = max(1, 4096 // block_c)
    ready(voxtune_rms_norm)[(triton.cdiv(V, block_v),)](
        x,
        weight,
        x if bias is None else bias,
        y,
        V,
        C // unit,
        eps,
        floor,
        ACTIVATION=activation,
        HAS_BIAS=bias is not None,
        UNIT=unit,
        BLOCK_V=block_v,
        BLOCK_C=block_c,
        num_warps=8,
    )
    return y

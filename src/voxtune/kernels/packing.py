"""Weights of convolutions on their way between parameters and kernels, in training.

Why: in every training step each weight is packed and cast for the forward pass, its taps are turned around and its channels
exchanged for the data gradient, and the gradient goes the way back. With PyTorch's operators these are eight passes over all
weights, half of them strided, which takes milliseconds for 40 million parameters. Here they are three transpositions.

    pack:     (K, C, taps) -> (taps, K, C), cast to the type of the product; its gradient is the way back
    opposite: (taps, K, C) -> (taps in reverse, C, K), of one source's channels

Legend: K channels out, C channels in, R = K * C, T taps.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from voxtune.kernels import conv3d
from voxtune.kernels.ops import runs_kernel
from voxtune.kernels.pointwise import TYPES
from voxtune.kernels.precompile import ready


def pack_as(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """conv3d.pack(weight).to(dtype), with a gradient that is written in the weight's own layout and type."""
    packed: Tensor = _Packed.apply(weight, dtype)
    return packed


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.shape, ctx.dtype = weight.shape, weight.dtype
        if runs_kernel(weight, why_not(weight, dtype), "packing of a weight"):
            return pack_taps(weight, dtype)
        return conv3d.pack(weight).to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        packed = gradients[0].contiguous()
        if runs_kernel(packed, why_not(packed, ctx.dtype), "the gradient of packing"):
            return unpack_taps(packed, ctx.shape, ctx.dtype), None
        return conv3d.unpack(packed.to(ctx.dtype), tuple(ctx.shape[2:])).contiguous(), None


def opposite_reference(packed: Tensor, first: int, channels: int) -> Tensor:
    """The weight of the data gradient of the source whose channels begin at `first`, in plain PyTorch."""
    return packed[:, :, first : first + channels].flip(0).transpose(1, 2).contiguous()


@triton.jit
def voxtune_pack_taps(
    weight_ptr,  # (R, T)
    packed_ptr,  # (T, R)
    R,
    T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    r, t = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_T)
    w = tl.load(weight_ptr + r[:, None] * T + t[None, :], mask=(r < R)[:, None] & (t < T)[None, :], other=0.0)
    packed = tl.trans(w).to(packed_ptr.dtype.element_ty)
    tl.store(packed_ptr + t[:, None] * R + r[None, :], packed, mask=(t < T)[:, None] & (r < R)[None, :])


@triton.jit
def voxtune_unpack_taps(
    packed_ptr,  # (T, R)
    weight_ptr,  # (R, T)
    R,
    T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    r, t = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_T)
    packed = tl.load(packed_ptr + t[:, None] * R + r[None, :], mask=(t < T)[:, None] & (r < R)[None, :], other=0.0)
    w = tl.trans(packed).to(weight_ptr.dtype.element_ty)
    tl.store(weight_ptr + r[:, None] * T + t[None, :], w, mask=(r < R)[:, None] & (t < T)[None, :])


@triton.jit
def voxtune_opposite_taps(
    packed_ptr,  # (T, K, C)
    opposite_ptr,  # (T, CS, K)
    K,
    C,
    CS,  # channels of one source
    first,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    t, T = tl.program_id(2), tl.num_programs(2)
    k, c = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    keep = (k < K)[:, None] & (c < CS)[None, :]
    w = tl.load(packed_ptr + (T - 1 - t) * K * C + k[:, None] * C + first + c[None, :], mask=keep, other=0.0)
    keep = (c < CS)[:, None] & (k < K)[None, :]
    tl.store(opposite_ptr + t * CS * K + c[:, None] * K + k[None, :], tl.trans(w), mask=keep)


def why_not(weight: Tensor, dtype: torch.dtype) -> str | None:
    """The reason why the kernels do not apply, or None."""
    if weight.dtype not in TYPES or dtype not in TYPES:
        return f"types {weight.dtype} and {dtype}: one has no kernel"
    if not weight.is_contiguous() or not 0 < weight.numel() < 2**31:
        return f"a weight of shape {tuple(weight.shape)} that is not contiguous, or empty, or has 2^31 values or more"
    return None


def pack_taps(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """(T, K, C) of `dtype` from a contiguous weight (K, C, *taps); `why_not` must be None."""
    K, C = weight.shape[:2]
    packed = weight.new_empty((weight.numel() // (K * C), K, C), dtype=dtype)
    grid, tile = _taps_tile(K * C, packed.shape[0])
    ready(voxtune_pack_taps)[grid](weight, packed, K * C, T=packed.shape[0], **tile)
    return packed


def unpack_taps(packed: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The inverse of `pack_taps`: a weight of `shape` and `dtype`."""
    weight = packed.new_empty(shape, dtype=dtype)
    T, K, C = packed.shape
    grid, tile = _taps_tile(K * C, T)
    ready(voxtune_unpack_taps)[grid](packed, weight, K * C, T=T, **tile)
    return weight


def _taps_tile(rows: int, taps: int) -> tuple[tuple[int], dict[str, int]]:
    block_t = triton.next_power_of_2(taps)
    block_r = max(16, 4096 // block_t)
    return (triton.cdiv(rows, block_r),), {"BLOCK_R": block_r, "BLOCK_T": block_t, "num_warps": 4}


def opposite_taps(packed: Tensor, first: int, channels: int) -> Tensor:
    """The same as `opposite_reference`; `why_not(packed, packed.dtype)` must be None."""
    T, K, C = packed.shape
    opposite = packed.new_empty((T, channels, K))
    grid = (triton.cdiv(K, 64), triton.cdiv(channels, 64), T)
    ready(voxtune_opposite_taps)[grid](packed, opposite, K, C, channels, first, BLOCK_K=64, BLOCK_C=64, num_warps=4)
    return opposite


def opposite(packed: Tensor, first: int, channels: int) -> Tensor:
    if runs_kernel(packed, why_not(packed, packed.dtype), "the weight of a data gradient"):
        return opposite_taps(packed, first, channels)
    return opposite_reference(packed, first, channels)

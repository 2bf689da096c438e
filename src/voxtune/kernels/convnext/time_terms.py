"""The time network in one kernel: sinusoid, two layers, and the time layers of all blocks, for all steps at once.

Why: some forty small layers, whose input is one number per step, would be one launch each. All timesteps are known before the
first step, so one launch computes a table of all terms. Each program computes a few terms of one step; it recomputes the two
small layers before them, which avoids synchronisation.

Legend: S steps, E width of the time embedding, D width of the sinusoid, T terms of all blocks.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from voxtune.kernels.convnext.common import gelu


def time_terms_reference(
    t_S: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, w_TE: Tensor, b_T: Tensor
) -> Tensor:
    """(S, T): reference in plain PyTorch."""
    half = w1.shape[1] // 2
    rate = torch.exp(-math.log(10000) * torch.arange(half, dtype=w1.dtype, device=w1.device) / (half - 1))
    angle = t_S[:, None].to(w1.dtype) * rate
    time_SE = F.linear(F.gelu(F.linear(torch.cat([angle.sin(), angle.cos()], 1), w1, b1)), w2, b2)
    return F.linear(F.gelu(time_SE), w_TE, b_T)


@triton.jit
def voxtune_time_terms(
    t_ptr,  # (S,) int64
    w1_ptr,  # (E, D) float32
    b1_ptr,  # (E,)
    w2_ptr,  # (E, E)
    b2_ptr,  # (E,)
    w_ptr,  # (T, E): the time layers of all blocks, concatenated
    b_ptr,  # (T,): their biases, plus other terms added to each channel
    y_ptr,  # (S, T)
    T,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    step = tl.program_id(1)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    rows = tl.arange(0, BLOCK_E)
    HALF: tl.constexpr = D // 2
    index = (d % HALF).to(tl.float32)
    angle = tl.load(t_ptr + step).to(tl.float32) * tl.exp(index * (-9.210340371976184 / (HALF - 1)))
    wave = tl.where(d < HALF, tl.sin(angle), tl.cos(angle))
    keep = (rows < E)[:, None] & (d < D)[None, :]
    w1 = tl.load(w1_ptr + rows[:, None] * D + d[None, :], mask=keep, other=0.0)
    first = gelu(tl.sum(w1 * wave[None, :], axis=1) + tl.load(b1_ptr + rows, mask=rows < E, other=0.0))
    keep = (e < E)[:, None] & (rows < E)[None, :]
    # Loaded with the input along the first axis, so that the reduction needs no layout conversion.
    w2 = tl.load(w2_ptr + rows[None, :] * E + e[:, None], mask=keep, other=0.0)
    second = tl.sum(w2 * first[:, None], axis=0) + tl.load(b2_ptr + rows, mask=rows < E, other=0.0)
    second = gelu(second)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    keep = (t < T)[:, None] & (e < E)[None, :]
    w = tl.load(w_ptr + t[:, None] * E + e[None, :], mask=keep, other=0.0)
    y = tl.sum(w * second[None, :], axis=1) + tl.load(b_ptr + t, mask=t < T, other=0.0)
    tl.store(y_ptr + step * T + t, y, mask=t < T)

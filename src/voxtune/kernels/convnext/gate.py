"""The attention gate: one value a pixel, by which the skip is multiplied in place.

Why: sigmoid(v . relu(A decoder + B skip + b)) * skip is seven operations over tensors that fit in one program's registers. The
skip already lies in its slice of the decoder block's input, beside the decoder: one launch reads both and writes that slice.

Legend: M pixels of all samples, C channels of the decoder (and of the hidden layer), CS of the skip.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from voxtune.kernels.convnext.common import release, wait


def gate_reference(x_MC: Tensor, skip_MS: Tensor, a_CC: Tensor, b_CS: Tensor, bias_C: Tensor, v_C: Tensor, v0: float):
    """The gated skip in plain PyTorch; `bias_C` is the sum of both inner biases."""
    hidden = (x_MC @ a_CC.t() + skip_MS @ b_CS.t() + bias_C).relu()
    return (hidden @ v_C + v0).sigmoid()[:, None] * skip_MS


@triton.jit
def voxtune_gate(
    x_ptr,  # (M, C + CS), rows of LD: decoder, then skip
    w_ptr,  # (C padded + CS padded, CP)
    bias_ptr,  # (CP,) float32
    v_ptr,  # (CP,) float32; zero in the padding
    v0_ptr,  # (1,) float32
    C: tl.constexpr,
    CS: tl.constexpr,
    CP: tl.constexpr,  # C, rounded up to a power of two
    LD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,  # CS, rounded up to a power of two
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):
    CHUNKS: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    CHUNKS_S: tl.constexpr = (CS + BLOCK_C - 1) // BLOCK_C
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, CP)
    column = tl.arange(0, BLOCK_C)
    x_at = x_ptr + row[:, None] * LD
    release(CHAINED)
    wait(CHAINED)
    acc = tl.zeros((BLOCK_M, CP), tl.float32)
    for chunk in range(CHUNKS + CHUNKS_S):
        of_skip = chunk >= CHUNKS
        c = tl.where(of_skip, chunk - CHUNKS, chunk) * BLOCK_C + column
        keep = c < tl.where(of_skip, CS, C)
        a = tl.load(x_at + (tl.where(of_skip, C, 0) + c)[None, :], mask=keep[None, :], other=0.0)
        b = tl.load(w_ptr + (chunk * BLOCK_C + column)[:, None] * CP + k[None, :])
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    hidden = tl.maximum(acc + tl.load(bias_ptr + k)[None, :], 0.0)
    logit = tl.sum(hidden * tl.load(v_ptr + k)[None, :], axis=1) + tl.load(v0_ptr)
    weight = 1.0 / (1.0 + tl.exp(-logit))
    c = tl.arange(0, BLOCK_S)
    keep = (c < CS)[None, :]
    skip = tl.load(x_at + (C + c)[None, :], mask=keep, other=0.0).to(tl.float32)
    tl.store(x_at + (C + c)[None, :], (skip * weight[:, None]).to(x_ptr.dtype.element_ty), mask=keep)

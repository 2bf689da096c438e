"""The attention gate: multiplies the skip by one value per pixel.

Why: sigmoid(v . relu(A decoder + B skip + b)) * skip is seven operations on tensors that fit in the registers of one program. One
launch reads decoder and skip, and writes the gated skip: elsewhere, or in place, where both are slices of one buffer. With few
pixels, the hidden channels are divided among programs: each stores its partial logits, and the last one to finish a tile adds
them in a fixed order and applies the gate. Every program reads the skip before it increments the counter, so none reads gated
values.

Legend: M pixels of all samples, C channels of the decoder, CS channels of the skip.
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
    x_ptr,  # (M, C + CS), row stride LD: decoder, then skip
    w_ptr, bias_ptr, v_ptr, v0_ptr, parts_ptr, count_ptr,
    C: tl.constexpr, CS: tl.constexpr, CP: tl.constexpr, LD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr,
    PRECISION: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """In place; the arguments are those of `gate_work`."""
    release(CHAINED)
    wait(CHAINED)
    gate_work(
        x_ptr, x_ptr + C, w_ptr, bias_ptr, v_ptr, v0_ptr, x_ptr + C, parts_ptr, count_ptr, C, CS, CP, LD, LD, LD,
        BLOCK_M, BLOCK_C, BLOCK_H, BLOCK_S, PRECISION,
    )  # fmt: skip


@triton.jit
def gate_work(
    x_ptr,  # (M, C), row stride LDX: the decoder's image
    skip_ptr,  # (M, CS), row stride LDS
    w_ptr,  # (C padded + CS padded, CP)
    bias_ptr,  # (CP,) float32
    v_ptr,  # (CP,) float32; zero in the padding
    v0_ptr,  # (1,) float32
    y_ptr,  # (M, CS), row stride LDY: the gated skip, which may be the skip itself
    parts_ptr,  # (tiles, CP / BLOCK_H, BLOCK_M) float32; not written if BLOCK_H is CP
    count_ptr,  # (tiles,) int32; zero before and after the launch
    C: tl.constexpr,
    CS: tl.constexpr,
    CP: tl.constexpr,  # hidden channels, rounded up to a power of two
    LDX: tl.constexpr,
    LDS: tl.constexpr,
    LDY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,  # hidden channels per program
    BLOCK_S: tl.constexpr,  # CS rounded up to a power of two
    PRECISION: tl.constexpr,
):
    PARTS: tl.constexpr = CP // BLOCK_H
    CHUNKS: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    CHUNKS_S: tl.constexpr = (CS + BLOCK_C - 1) // BLOCK_C
    tile, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    k = part * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_C)
    skip_at, y_at = skip_ptr + row[:, None] * LDS, y_ptr + row[:, None] * LDY
    acc = tl.zeros((BLOCK_M, BLOCK_H), tl.float32)
    for chunk in range(CHUNKS + CHUNKS_S):
        of_skip = chunk >= CHUNKS
        c = tl.where(of_skip, chunk - CHUNKS, chunk) * BLOCK_C + column
        keep = c < tl.where(of_skip, CS, C)
        base, stride = tl.where(of_skip, skip_ptr, x_ptr), tl.where(of_skip, LDS, LDX)
        a = tl.load(base + row[:, None] * stride + c[None, :], mask=keep[None, :], other=0.0)
        b = tl.load(w_ptr + (chunk * BLOCK_C + column)[:, None] * CP + k[None, :])
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    hidden = tl.maximum(acc + tl.load(bias_ptr + k)[None, :], 0.0)
    logit = tl.sum(hidden * tl.load(v_ptr + k)[None, :], axis=1)
    if PARTS == 1:
        gated(skip_at, y_at, logit + tl.load(v0_ptr), CS, BLOCK_S)
    else:
        at = parts_ptr + tile * (PARTS * BLOCK_M) + tl.arange(0, BLOCK_M)
        tl.store(at + part * BLOCK_M, logit)
        tl.debug_barrier()
        before = tl.atomic_add(count_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if before == PARTS - 1:
            tl.store(count_ptr + tile, 0)
            total = tl.load(at, cache_modifier=".cg") + tl.load(v0_ptr)
            for one in tl.static_range(1, PARTS):
                total += tl.load(at + one * BLOCK_M, cache_modifier=".cg")
            gated(skip_at, y_at, total, CS, BLOCK_S)


@triton.jit
def gated(
    skip_at,  # (BLOCK_M, 1): pixels
    y_at,
    logit,  # (BLOCK_M,)
    CS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    weight = 1.0 / (1.0 + tl.exp(-logit))
    c = tl.arange(0, BLOCK_S)
    keep = (c < CS)[None, :]
    skip = tl.load(skip_at + c[None, :], mask=keep, other=0.0).to(tl.float32)
    tl.store(y_at + c[None, :], (skip * weight[:, None]).to(y_at.dtype.element_ty), mask=keep)

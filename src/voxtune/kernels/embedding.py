"""Three linear layers with an activation between them, for a few rows: the time embedding and its projections of all blocks.

Why: a time network is five tiny launches, two of which hold a few thousand values. Each program computes a few outputs of one
row; it recomputes the two small layers before them, which avoids synchronisation. All in float32.

Legend: N rows, D inputs, E and F widths of the hidden layers, T outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from voxtune.kernels.convnext.tiles import power_of_two
from voxtune.kernels.group_norm import activate, activation_reference
from voxtune.kernels.precompile import ready

MOST_WIDTH, MOST_ROWS = 256, 64
ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu")


def embedding_reference(x_ND: Tensor, weights: list[Tensor], biases: list[Tensor], activation: str) -> Tensor:
    y = x_ND
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        y = functional.linear(activation_reference(y, activation) if index else y, weight, bias)
    return y


@triton.jit
def voxtune_embedding(
    x_ptr,  # (N, D) float32
    w1_ptr,  # (E, D) float32
    b1_ptr,  # (E,)
    w2_ptr,  # (F, E)
    b2_ptr,  # (F,)
    w3_ptr,  # (T, F)
    b3_ptr,  # (T,)
    y_ptr,  # (N, T)
    T,
    D: tl.constexpr,
    E: tl.constexpr,
    F: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,  # hidden values at once
    BLOCK_F: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    n = tl.program_id(1)
    d, f = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_F)
    x = tl.load(x_ptr + n * D + d, mask=d < D, other=0.0)
    second = tl.load(b2_ptr + f, mask=f < F, other=0.0)
    for e0 in tl.static_range(0, E, BLOCK_E):
        e = e0 + tl.arange(0, BLOCK_E)
        keep = (e < E)[:, None] & (d < D)[None, :]
        w1 = tl.load(w1_ptr + e[:, None] * D + d[None, :], mask=keep, other=0.0)
        first = tl.sum(w1 * x[None, :], axis=1) + tl.load(b1_ptr + e, mask=e < E, other=0.0)
        first = activate(first, 0.0, ACTIVATION)
        # With the input along the first axis the reduction needs no layout conversion.
        keep = (e < E)[:, None] & (f < F)[None, :]
        w2 = tl.load(w2_ptr + f[None, :] * E + e[:, None], mask=keep, other=0.0)
        second += tl.sum(w2 * first[:, None], axis=0)
    second = activate(second, 0.0, ACTIVATION)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    keep = (t < T)[:, None] & (f < F)[None, :]
    w3 = tl.load(w3_ptr + t[:, None] * F + f[None, :], mask=keep, other=0.0)
    y = tl.sum(w3 * second[None, :], axis=1) + tl.load(b3_ptr + t, mask=t < T, other=0.0)
    tl.store(y_ptr + n * T + t, y, mask=t < T)


def unsupported(rows: int, widths: list[int]) -> str | None:
    """The reason why the kernel does not apply to these inputs and hidden widths, or None."""
    if rows > MOST_ROWS or max(widths) > MOST_WIDTH:
        return f"{rows} rows, widths {widths}"
    return None


def why_not(x: Tensor, weights: list[Tensor], biases: list[Tensor], activation: str) -> str | None:
    """The reason why the kernel does not apply, or None."""
    if any(a.dtype != torch.float32 or not a.is_contiguous() for a in (x, *weights, *biases)):
        return "the embedding is not in float32, or not contiguous"
    if len(weights) != 3 or activation not in ACTIVATIONS:
        return f"{len(weights)} layers with {activation}"
    return unsupported(x.shape[0], [w.shape[1] for w in weights])


def embedding(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], activation: str, *, checked: bool = False
) -> Tensor:
    """(N, T). `why_not` must be None; `checked`: the caller has called it."""
    assert checked or (reason := why_not(x, weights, biases, activation)) is None, reason
    (N, D), (E, F, T) = x.shape, (w.shape[0] for w in weights)
    block_d, block_f, block_t = power_of_two(D), power_of_two(F), 32
    block_e = min(power_of_two(E), 16384 // max(block_d, block_f))
    y = x.new_empty((N, T))
    layers = [a for pair in zip(weights, biases, strict=True) for a in pair]
    ready(voxtune_embedding)[(triton.cdiv(T, block_t), N)](
        x, *layers, y, T, D=D, E=E, F=F, ACTIVATION=activation,
        BLOCK_D=block_d, BLOCK_E=block_e, BLOCK_F=block_f, BLOCK_T=block_t, num_warps=8,
    )  # fmt: skip
    return y

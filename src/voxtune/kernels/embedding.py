"""Three linear layers with an activation between them, for a few rows: the time embedding and its projections of all blocks.

Why: a time network is ten tiny launches (sines and cosines of the time, two layers of a few thousand values, the projections).
Each program computes a few outputs of one row; it recomputes what comes before them, which avoids synchronisation. In float32.

Legend: N rows, D inputs, of which D / 2 are sines of the time, E and F widths of the hidden layers, T outputs.
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
TIMES = (torch.float32, torch.int64, torch.int32)
ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu")


def embedding_reference(
    x: Tensor,
    frequencies: Tensor | None,
    cosines_first: bool,
    weights: list[Tensor],
    biases: list[Tensor],
    activation: str,
) -> Tensor:
    """`x`: rows (N, D); or times of N values, and D / 2 frequencies."""
    y = x
    if frequencies is not None:
        angle = x.flatten()[:, None].to(frequencies.dtype) * frequencies.flatten()
        waves = (angle.cos(), angle.sin()) if cosines_first else (angle.sin(), angle.cos())
        y = torch.cat(waves, 1)
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        y = functional.linear(activation_reference(y, activation) if index else y, weight, bias)
    return y


@triton.jit
def voxtune_embedding(
    x_ptr,  # (N, D) float32, or (N,) of any type with WAVES
    frequencies_ptr,  # (D / 2,) float32; not read without WAVES
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
    WAVES: tl.constexpr,  # 0 none, 1 sines first, 2 cosines first
    ACTIVATION: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,  # hidden values at once
    BLOCK_F: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    n = tl.program_id(1)
    d, f = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_F)
    if WAVES == 0:
        x = tl.load(x_ptr + n * D + d, mask=d < D, other=0.0)
    else:
        frequency = tl.load(frequencies_ptr + d % (D // 2), mask=d < D, other=0.0)
        angle = tl.load(x_ptr + n).to(tl.float32) * frequency
        x = tl.where((d < D // 2) == (WAVES == 1), tl.sin(angle), tl.cos(angle))
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


def why_not(
    x: Tensor, frequencies: Tensor | None, weights: list[Tensor], biases: list[Tensor], activation: str
) -> str | None:
    """The reason why the kernel does not apply, or None."""
    rows = x if frequencies is None else frequencies
    if any(a.dtype != torch.float32 for a in (rows, *weights, *biases)) or x.dtype not in TIMES:
        return "the embedding is not in float32"
    if any(not a.is_contiguous() for a in (x, rows, *weights, *biases)):
        return "the embedding is not contiguous"
    if len(weights) != 3 or activation not in ACTIVATIONS:
        return f"{len(weights)} layers with {activation}"
    return unsupported(x.shape[0], [w.shape[1] for w in weights])


def embedding(
    x: Tensor,
    frequencies: Tensor | None,
    cosines_first: bool,
    weights: list[Tensor],
    biases: list[Tensor],
    activation: str,
    *,
    checked: bool = False,
) -> Tensor:
    """(N, T); see `embedding_reference`. `why_not` must be None; `checked`: the caller has called it."""
    assert checked or (reason := why_not(x, frequencies, weights, biases, activation)) is None, reason
    N, D, (E, F, T) = x.shape[0], weights[0].shape[1], (w.shape[0] for w in weights)
    block_d, block_f, block_t = power_of_two(D), power_of_two(F), 32
    block_e = min(power_of_two(E), 16384 // max(block_d, block_f))
    y = x.new_empty((N, T), dtype=torch.float32)
    waves = 0 if frequencies is None else 2 if cosines_first else 1
    layers = [a for pair in zip(weights, biases, strict=True) for a in pair]
    ready(voxtune_embedding)[(triton.cdiv(T, block_t), N)](
        x, x if frequencies is None else frequencies, *layers, y, T, D=D, E=E, F=F, WAVES=waves, ACTIVATION=activation,
        BLOCK_D=block_d, BLOCK_E=block_e, BLOCK_F=block_f, BLOCK_T=block_t, num_warps=8,
    )  # fmt: skip
    return y

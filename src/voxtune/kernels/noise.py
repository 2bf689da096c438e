"""The sampler's noise, generated on the GPU.

Why: diffusion/noise.py computes each draw from its number alone (Philox 4x32-10). In plain PyTorch this takes about 130 passes
over a quarter of the volume, here one: each program computes the Philox words of its counters and writes four normal values per
counter. The random integers are identical on all devices; the normal values agree up to the rounding of log, sin and cos.

Legend: N samples, V values per sample, B = ceil(V / 4) counters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from voxtune.kernels.precompile import ready

BLOCK = 512


@triton.jit(do_not_specialize=["seed", "draw"])
def voxtune_noise(
    index_ptr,  # (N,) int64: sample numbers
    y_ptr,  # (N, V) float32
    seed,
    draw,
    V,
    BLOCK_B: tl.constexpr,
):
    n = tl.program_id(1)
    block = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    index = tl.load(index_ptr + n)
    low = (index & 0xFFFFFFFF).to(tl.uint32)
    high = (index >> 32).to(tl.uint32)
    zero = tl.zeros((BLOCK_B,), tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, block.to(tl.uint32), zero + draw.to(tl.uint32), zero + low, zero + high)
    # 24 bits of each word, at the centre of the interval: never 0, so that the logarithm is finite.
    u0 = ((w0 >> 8).to(tl.float32) + 0.5) * 5.9604644775390625e-08
    u1 = ((w1 >> 8).to(tl.float32) + 0.5) * 5.9604644775390625e-08
    u2 = ((w2 >> 8).to(tl.float32) + 0.5) * 5.9604644775390625e-08
    u3 = ((w3 >> 8).to(tl.float32) + 0.5) * 5.9604644775390625e-08
    # Box-Muller: two uniform values give two normal values.
    r0, a0 = tl.sqrt(-2.0 * tl.log(u0)), 6.283185307179586 * u1
    r1, a1 = tl.sqrt(-2.0 * tl.log(u2)), 6.283185307179586 * u3
    even = tl.join(r0 * tl.cos(a0), r1 * tl.cos(a1))  # values 0 and 2 of each four
    odd = tl.join(r0 * tl.sin(a0), r1 * tl.sin(a1))  # values 1 and 3
    values = tl.reshape(tl.join(even, odd), (BLOCK_B * 4,))
    at = tl.program_id(0) * BLOCK_B * 4 + tl.arange(0, BLOCK_B * 4)
    tl.store(y_ptr + n.to(tl.int64) * V + at, values, mask=at < V)


def normal_batch(seed: int, indices: Tensor, draw: int, shape: Sequence[int]) -> Tensor:
    """As voxtune.diffusion.noise.normal_batch, on the device of `indices` (N,) int64."""
    V = math.prod(shape)
    assert V < 2**31, "a sample must have fewer than 2**31 values"
    y = torch.empty((indices.shape[0], V), dtype=torch.float32, device=indices.device)
    grid = (triton.cdiv(V, 4 * BLOCK), indices.shape[0])
    with torch.cuda.device(y.device) if y.is_cuda else nullcontext():
        ready(voxtune_noise)[grid](indices, y, seed, draw, V, BLOCK_B=BLOCK, num_warps=4)
    return y.view(indices.shape[0], *shape)


def noise_source(
    seed: int, indices: Sequence[int], shape: Sequence[int], device: torch.device | str
) -> Callable[[int], Tensor]:
    """As voxtune.diffusion.noise_source; copies the sample numbers to the device once."""
    numbers = torch.tensor(list(indices), dtype=torch.int64, device=device)
    return lambda draw: normal_batch(seed, numbers, draw, shape)

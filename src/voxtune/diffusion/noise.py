"""Gaussian noise that depends on the seed, the sample's number and the draw alone.

A counter-based generator (Philox 4x32-10, Salmon et al., SC'11) needs no state: any draw of any sample can be made on
any device, in any batch, in any order, and is the same noise. Integers are exact everywhere; the normal values agree
between devices to the rounding of log, sin and cos.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from voxtune.errors import InputError

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def check_seed(seed: int) -> int:
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise InputError(f"the seed must be a whole number from 0 to 2^63 - 1, found {seed}")
    return seed


def philox(counter: Sequence[Tensor], key: tuple[int, int]) -> list[Tensor]:
    """Four 32-bit words for each counter; words are int64 tensors, since torch has little uint32 arithmetic."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product wraps modulo 2^64, so its bits are right although int64 is signed.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return [c0, c1, c2, c3]


def normal_batch(
    seed: int, indices: Sequence[int], draw: int, shape: Sequence[int], device: torch.device | str = "cpu"
) -> Tensor:
    """Standard normal float32 values (len(indices), *shape): draw number `draw` of each sample under `seed`."""
    count = math.prod(shape)
    block_B = torch.arange((count + 3) // 4, dtype=torch.int64, device=device)
    index_N1 = torch.tensor(indices, dtype=torch.int64, device=device)[:, None]
    counter = [block_B, torch.full_like(block_B, draw), index_N1 & _MASK, index_N1 >> 32]
    words = philox(counter, (check_seed(seed) & _MASK, seed >> 32))
    # 24 bits of each word, at the middle of its interval: never 0, so the logarithm is finite.
    u = [((w >> 8).float() + 0.5) * 2.0**-24 for w in words]
    # Box and Muller: two uniforms give two normals.
    values = []
    for radius, angle in ((u[0], u[1]), (u[2], u[3])):
        r, theta = (-2 * radius.log()).sqrt(), 2 * math.pi * angle
        values += [r * theta.cos(), r * theta.sin()]
    return torch.stack(values, dim=-1).flatten(1)[:, :count].reshape(len(indices), *shape)


def normal(seed: int, index: int, draw: int, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """The noise of one sample, of `shape`."""
    return normal_batch(seed, [index], draw, shape, device)[0]


def noise_source(
    seed: int, indices: Sequence[int], shape: Sequence[int], device: torch.device | str = "cpu"
) -> Callable[[int], Tensor]:
    """draw number -> noise of a batch whose samples are numbered `indices`; draw 0 is the start of the sampling."""
    return lambda draw: normal_batch(seed, indices, draw, shape, device)

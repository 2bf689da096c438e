"""Gaussian noise that depends only on the seed, the index of the sample (63 bits) and the number of the draw.

A counter-based generator (Philox 4x32-10, Salmon et al., SC'11) has no state: the noise is the same on any device, in any
batch and in any order. Its integers are exact everywhere; the normal values agree between devices up to the rounding of log,
sin and cos.
"""

from __future__ import annotations

import hashlib
import math
import operator
import unicodedata
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from voxtune.errors import InputError

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

# What determines the index of a volume: its mask and number, or its place in the job, as in version 0.1.
NoiseRule = Literal["identity", "position"]


def check_seed(seed: int) -> int:
    try:
        number = -1 if isinstance(seed, bool) else operator.index(seed)
    except TypeError:
        number = -1
    if not 0 <= number < 2**63:
        raise InputError(f"seed must be a whole number from 0 to 2^63 - 1, got {str(seed)[:40]}")
    return number


def identity_index(name: str, replicate: int) -> int:
    """The index of sample number `replicate` (1, 2, ...) of the mask `name`, whatever else is sampled.

    The first 63 bits of SHA-256 of "NAME\\nREPLICATE" in UTF-8, with the name in Unicode's normal form C.
    """
    text = f"{unicodedata.normalize('NFC', name)}\n{replicate}"
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def philox(counter: Sequence[Tensor], key: tuple[int, int]) -> list[Tensor]:
    """Four 32-bit words for each counter, as int64 tensors because torch supports little uint32 arithmetic."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product wraps modulo 2^64, so its bits are correct although int64 is signed.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return [c0, c1, c2, c3]


def normal_batch(
    seed: int, indices: Sequence[int], draw: int, shape: Sequence[int], device: torch.device | str = "cpu"
) -> Tensor:
    """Standard normal float32 values (len(indices), *shape): draw number `draw` of each sample."""
    count = math.prod(shape)
    block_B = torch.arange((count + 3) // 4, dtype=torch.int64, device=device)
    index_N1 = torch.tensor(indices, dtype=torch.int64, device=device)[:, None]
    counter = [block_B, torch.full_like(block_B, draw), index_N1 & _MASK, index_N1 >> 32]
    seed = check_seed(seed)
    words = philox(counter, (seed & _MASK, seed >> 32))
    # 24 bits of each word, at the centre of its interval: never 0, so the logarithm is finite.
    u = [((w >> 8).float() + 0.5) * 2.0**-24 for w in words]
    # Box-Muller transform: two uniform values give two normal values.
    values = []
    for radius, angle in ((u[0], u[1]), (u[2], u[3])):
        r, theta = (-2 * radius.log()).sqrt(), 2 * math.pi * angle
        values += [r * theta.cos(), r * theta.sin()]
    return torch.stack(values, dim=-1).flatten(1)[:, :count].reshape(len(indices), *shape)


def normal(seed: int, index: int, draw: int, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Noise of one sample, with `shape`."""
    return normal_batch(seed, [index], draw, shape, device)[0]


def noise_source(
    seed: int, indices: Sequence[int], shape: Sequence[int], device: torch.device | str = "cpu"
) -> Callable[[int], Tensor]:
    """A function from the number of the draw to the noise of a batch of samples `indices`; draw 0 starts the sampling."""
    return lambda draw: normal_batch(seed, indices, draw, shape, device)


# Draws of the values that offset noise adds to whole images; samplers draw far fewer times.
OFFSETS = 2**31


def offset_batch(seed: int, indices: Sequence[int], draw: int, channels: int, dimensions: int) -> Tensor:
    """A standard normal value for each channel of each sample, (N, channels, 1, ...), to add to draw `draw` of its noise."""
    return normal_batch(seed, indices, draw, (channels, *[1] * dimensions))


def with_offset(
    noise: Callable[[int], Tensor], strength: float, seed: int, indices: Sequence[int], shape: Sequence[int]
) -> Callable[[int], Tensor]:
    """Noise of samples with `shape` whose mean varies with standard deviation `strength`, as a network saw it in training."""
    if not strength:
        return noise

    def draw(number: int) -> Tensor:
        x = noise(number)
        offsets = offset_batch(seed, indices, OFFSETS + number, shape[0], len(shape) - 1)
        return x + strength * offsets.to(x)

    return draw

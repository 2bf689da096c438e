"""The tiles of doubling_conv.py and strided_conv.py: by arithmetic, not measured yet (benchmarks/gpu_doubling_conv.py does).

Arithmetic: 64 or 128 output channels are the rows of a product and voxels its columns, 128 of them with four warps, so that the
float32 sums take 128 registers of a thread or fewer; two programs share a multiprocessor's 227 KB. Few channels take the
narrowest tile that contains them, since a product over padding costs as much as one over channels.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton import cdiv, next_power_of_2

from voxtune.kernels.conv3d_tiles import shape_of_tile

# Programs that fill a large GPU, two per multiprocessor; with fewer, programs share the taps of a tile.
ENOUGH = 264
# Steps of a product below which a shared tile costs more than it gains.
MIN_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class ParityTile:
    """What a program computes: h x w voxels of a plane, k output channels, c input channels per step."""

    h: int
    w: int
    k: int = 64
    c: int = 64
    swap: bool = True  # output channels, not voxels, are the rows of the product
    warps: int = 4
    stages: int = 3  # tiles in flight
    outer_stages: int = 2  # doubling_conv: tiles in flight of the outer neighbours along w
    split: int = 1  # strided_conv: programs that share the taps of a tile

    def constants(self) -> dict[str, int | bool]:
        """The kernels' compile-time arguments that both have."""
        return {"TH": self.h, "TW": self.w, "TK": self.k, "TC": self.c, "SWAP": self.swap}


def shared_memory(tile: ParityTile, *, doubling: bool, kernel_w: int = 3) -> int:
    """Bytes of the tile's loads in flight; the kernels use a few more for barriers."""
    x, w = tile.h * tile.w * tile.c * 2, tile.k * tile.c * 2
    if not doubling:
        return tile.stages * (x + w)
    outer = kernel_w - 2 if kernel_w > 2 else 0
    return max(tile.stages * (x + 2 * w), tile.outer_stages * outer * (x + w))


def channel_tile(channels: int, most: int) -> int:
    """The narrowest tile for this many channels: a product has at least 16."""
    return max(16, min(most, next_power_of_2(channels)))


def doubling_tile(N: int, D: int, H: int, W: int, C: int, K: int, fold: bool) -> ParityTile:
    """The tile for sources of this size, C the channels of the widest one; `fold`: both parities along w are channels."""
    V = N * D * H * W
    h, w = shape_of_tile(64 if V <= 8**3 else 128, H, W)[0]
    k, c = channel_tile(2 * K if fold else K, 64), channel_tile(C, 64)
    if fold and V > 8**3:
        # Few products: bound by the result's traffic, so more warps and programs on a multiprocessor.
        return ParityTile(h=h, w=w, k=k, c=c, swap=k >= 64, warps=8, stages=2 if C <= 128 else 3)
    return ParityTile(h=h, w=w, k=k, c=c, swap=k >= 64)


def strided_tile(N: int, D: int, H: int, W: int, C: int, K: int, steps_of_64: int) -> ParityTile:
    """The tile for a result of N x D x H x W voxels; `steps_of_64`: taps x input channels / 64."""
    V = N * D * H * W
    k = channel_tile(K, 128 if V >= 16**3 else 64)
    h, w = shape_of_tile(64 if V <= 8**3 else 128, H, W)[0]
    programs = N * D * cdiv(H, h) * cdiv(W, w) * cdiv(K, k)
    split = 1
    while programs * split < ENOUGH // 2 and steps_of_64 // (2 * split) >= MIN_STEPS:
        split *= 2
    return ParityTile(
        h=h, w=w, k=k, c=channel_tile(C, 64), swap=k >= 64, warps=8 if k == 128 else 4, stages=4, split=split
    )

"""The tile of each convolution: chosen from measurements, not searched at run time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Conv3dTile:
    """What a program of voxtune_conv3d computes: two planes of h x w voxels, k output channels, c input channels per step."""

    h: int
    w: int
    k: int = 64
    c: int = 64
    swap: bool = True  # output channels, not voxels, are the rows of the product
    warps: int = 4
    inner_stages: int = 3  # tiles in flight: of the inner input planes, and of the outer ones
    outer_stages: int = 2
    split: int = 1  # programs that share the taps of a tile
    halo: bool = False  # by conv3d_halo.py; then tiles in flight of x (2 or 4), and of weights (3)

    def constants(self) -> dict[str, int | bool]:
        """The kernel's compile-time arguments."""
        return {
            "TH": self.h,
            "TW": self.w,
            "TK": self.k,
            "TC": self.c,
            "SWAP": self.swap,
            "INNER_STAGES": self.inner_stages,
            "OUTER_STAGES": self.outer_stages,
        }


def shared_memory(tile: Conv3dTile) -> int:
    """Bytes of the tile's loads in flight; the kernel uses a few more for barriers."""
    x, w = tile.h * tile.w * tile.c * 2, tile.k * tile.c * 2
    if tile.halo:
        return tile.inner_stages * (tile.h + 2) * tile.w * tile.c * 2 + tile.outer_stages * 3 * w
    return max(tile.inner_stages * (x + 2 * w), tile.outer_stages * (2 * x + 2 * w))


def shape_of_tile(voxels: int, H: int, W: int) -> list[tuple[int, int]]:
    """Every (h, w) with this many voxels: those that waste least at the edges of an H x W plane first, then the widest."""
    shapes = [(voxels // w, w) for w in (64, 32, 16, 8, 4) if w <= voxels]

    def computed(shape: tuple[int, int]) -> int:
        h, w = shape
        return -(-H // h) * h * -(-W // w) * w

    return sorted(shapes, key=computed)


def tiles(N: int, D: int, H: int, W: int, C: int, K: int, *, hopper: bool = True) -> Conv3dTile:
    """The tile for a convolution of this size; without Hopper's instructions, one that fits any device.

    Measured on an H200 over every shape of the whole-head network (benchmarks/results/h200/conv3d.json).
    """
    if not hopper:
        h, w = shape_of_tile(128, H, W)[0]
        return Conv3dTile(h=h, w=w, swap=False, warps=8)
    V = N * D * H * W
    if V >= 32**3:
        h, w = (8, 16) if K <= 64 else (16, 8)
        return Conv3dTile(h=h, w=w, inner_stages=2, outer_stages=3, halo=True)
    # Too few tiles to fill the GPU: several programs share one.
    h, w = shape_of_tile(64, H, W)[0]
    if V > 12**3:
        return Conv3dTile(
            h=h, w=w, k=128 if C >= 192 else 64, inner_stages=4, outer_stages=3, split=2 if C >= 192 else 1
        )
    return Conv3dTile(h=h, w=w, inner_stages=4, outer_stages=3, split=9 if C <= 256 else 12)

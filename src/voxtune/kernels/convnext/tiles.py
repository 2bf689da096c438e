"""Which tile a launch takes.

At batch 1 a step is a chain of launches that each do little: a tile is small enough that every multiprocessor has one, K is long
in one piece where that fills the card and split where it does not. With many images a tile is as large as the registers allow.
"""

from __future__ import annotations

from dataclasses import dataclass

# (pixels, channels out), large to small.
SHAPES = ((128, 128), (128, 64), (128, 32), (64, 64), (64, 32), (32, 32), (32, 16), (16, 16))


@dataclass(frozen=True, kw_only=True)
class Tile:
    block_m: int
    block_k: int
    block_c: int
    ways: int = 1  # chunks of a turn, each with an accumulator
    split: int = 1
    warps: int = 4
    stages: int = 4

    def turns(self, depth: int) -> int:
        return -(-depth // (self.block_c * self.ways))

    def parts(self, *, residual: bool) -> int:
        """Programs of a tile; where the sum is split the residual's product is one more."""
        return self.split + (residual and self.split > 1)


# What beat the model below when measured on an H200 in BF16: (pixels in all, of a sample, depth, channels out) -> tile.
MEASURED: dict[tuple[int, int, int, int], Tile] = {}
MEASURED_ON = 132  # multiprocessors


def power_of_two(x: int) -> int:
    return 1 << max(0, x - 1).bit_length()


def divisor(x: int, most: int) -> int:
    """The largest power of two that divides x, up to `most`."""
    return min(most, x & -x)


def conv_tile(rows: int, pixels: int, depth: int, channels: int, *, processors: int, bytes_each: int = 2) -> Tile:
    """For `rows` pixels in all, of samples of `pixels`, a sum over `depth` values, to `channels` out."""
    known = MEASURED.get((rows, pixels, depth, channels))
    if known is not None and processors == MEASURED_ON and bytes_each == 2:
        return known
    wide = max(16, power_of_two(channels))
    most = max(16, divisor(pixels, 128))
    choices = [
        _tile(m, k, depth, split=split, block_c=c)
        for m, k in SHAPES
        if m <= most and k <= wide
        for c in ((64, 128) if bytes_each == 2 else (64,))
        for split in (1, 2, 4, 8, 16)
    ]
    if processors == 1:
        # The interpreter: its time is the number of operations, whatever their size.
        return max(choices, key=lambda tile: (tile.block_m * tile.block_k, tile.block_c, -tile.split))
    return min(choices, key=lambda tile: cost(tile, rows, depth, channels, processors))


def cost(tile: Tile, rows: int, depth: int, channels: int, processors: int) -> float:
    """Microseconds, roughly: what bounds a small product is the chain of its chunks, or what it reads from the L2."""
    tiles = rows // tile.block_m * -(-channels // tile.block_k)
    chunks = -(-depth // tile.block_c)
    each = -(-chunks // tile.split)
    moved = (tile.block_m + tile.block_k) * tile.block_c * 2
    chunk = max(0.08, moved / 90e3, 2 * tile.block_m * tile.block_k * tile.block_c / 4e6)
    alone = -(-tiles * tile.split // processors) * each * chunk
    together = tiles * tile.split * each * moved / 6e6
    parts = 2.2 + tile.split * rows * channels * 8 / 3e6 if tile.split > 1 else 0.0
    return max(alone, together) + parts


def _tile(m: int, k: int, depth: int, *, split: int, block_c: int) -> Tile:
    block_c = max(16, min(block_c, power_of_two(depth)))
    chunks = -(-depth // block_c)
    each = -(-chunks // split)
    stages = max(2, min(4, 160_000 // ((m + k) * block_c * 2)))
    return Tile(block_m=m, block_k=k, block_c=block_c, split=-(-chunks // each), warps=_warps(m, k), stages=stages)


def _warps(m: int, k: int) -> int:
    return 8 if m * k >= 128 * 128 else 4 if m * k >= 32 * 16 else 2


@dataclass(frozen=True, kw_only=True)
class DepthwiseTile:
    run: int  # pixels of a row that a lane takes
    block_p: int  # runs
    block_c: int
    block_i: int  # rows of taps beside each other
    warps: int

    def tiles(self, pixels: int, channels: int) -> int:
        """Of a sample."""
        return pixels // (self.run * self.block_p) * -(-channels // self.block_c)


def depthwise_tile(rows: int, side: tuple[int, int], channels: int, processors: int) -> DepthwiseTile:
    """Two channels a lane. Rows of taps lie beside each other until every multiprocessor has some twenty warps."""
    run = 1 if side[1] % 4 else 4
    runs = side[0] * side[1] // run
    block_c = min(32, power_of_two(channels))
    if processors == 1:
        return DepthwiseTile(run=run, block_p=divisor(runs, 64), block_c=block_c, block_i=8, warps=4)
    needed = rows // run * -(-channels // block_c) * block_c // 64
    block_i = 8
    while block_i > 1 and needed * block_i > 24 * processors:
        block_i //= 2
    block_p = divisor(runs, 16)
    while block_p > 1 and (
        block_i * block_p * block_c > 512 or rows // (run * block_p) * -(-channels // block_c) < processors
    ):
        block_p //= 2
    warps = max(1, min(8, block_i * block_p * block_c // 64))
    return DepthwiseTile(run=run, block_p=block_p, block_c=block_c, block_i=block_i, warps=warps)

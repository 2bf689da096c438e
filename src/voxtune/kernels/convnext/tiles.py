"""Which tile a launch takes.

At batch 1 a step is a chain of launches that each do little: a tile is small enough that most multiprocessors have one, the sum
is shared among a program's warps, and split among programs where that is not enough. With many images a tile is as large as
the registers allow.
"""

from __future__ import annotations

from dataclasses import dataclass

# (pixels, channels out), large to small; above these a residual's second accumulator no longer fits beside the first.
SHAPES = ((128, 64), (128, 32), (64, 64), (64, 32), (32, 64), (32, 32), (32, 16), (16, 32), (16, 16))


@dataclass(frozen=True, kw_only=True)
class Tile:
    block_m: int
    block_k: int
    block_c: int
    ways: int = 1  # chunks of a turn, shared among the warps: 1, 2 or 4
    split: int = 1
    warps: int = 4
    stages: int = 4
    near: bool = True  # the image by the L1

    def turns(self, depth: int) -> int:
        return -(-depth // (self.block_c * self.ways))

    def room(self, rows: int, channels: int) -> tuple[int, int]:
        """Float32 values for the parts of a split sum, and tiles to count."""
        tiles = rows // self.block_m * -(-channels // self.block_k)
        return (tiles * (self.split + 1) * self.block_m * self.block_k if self.split > 1 else 0), tiles

    def parts(self, *, residual: bool) -> int:
        """Programs of a tile; where the sum is split the residual's product is one more."""
        return self.split + (residual and self.split > 1)


# What beat the model below when measured on an H200 in BF16: (pixels in all, of a sample, depth, channels out) -> tile.
MEASURED: dict[tuple[int, int, int, int], Tile] = {
    (4096, 4096, 288, 64): Tile(block_m=64, block_k=32, block_c=32, ways=1, split=1, warps=4, stages=4, near=True),
    (4096, 4096, 576, 32): Tile(block_m=32, block_k=32, block_c=64, ways=1, split=1, warps=4, stages=4, near=True),
    (1024, 1024, 576, 32): Tile(block_m=16, block_k=32, block_c=64, ways=4, split=1, warps=4, stages=4, near=True),
    (256, 256, 576, 128): Tile(block_m=16, block_k=16, block_c=64, ways=2, split=1, warps=4, stages=4, near=True),
    (256, 256, 1152, 64): Tile(block_m=32, block_k=16, block_c=128, ways=1, split=3, warps=4, stages=4, near=True),
    (64, 64, 1152, 256): Tile(block_m=16, block_k=16, block_c=128, ways=2, split=1, warps=4, stages=4, near=True),
    (64, 64, 2304, 128): Tile(block_m=32, block_k=16, block_c=128, ways=1, split=6, warps=4, stages=4, near=True),
    (64, 64, 2304, 512): Tile(block_m=32, block_k=32, block_c=32, ways=4, split=3, warps=4, stages=4, near=True),
    (64, 64, 4608, 256): Tile(block_m=32, block_k=32, block_c=128, ways=1, split=6, warps=4, stages=4, near=True),
    (64, 64, 3456, 512): Tile(block_m=64, block_k=32, block_c=128, ways=1, split=7, warps=4, stages=3, near=True),
    (256, 256, 2304, 128): Tile(block_m=32, block_k=32, block_c=32, ways=4, split=3, warps=4, stages=4, near=True),
    (1024, 1024, 1152, 64): Tile(block_m=64, block_k=32, block_c=128, ways=1, split=3, warps=4, stages=3, near=True),
    (4096, 4096, 576, 64): Tile(block_m=64, block_k=32, block_c=64, ways=1, split=1, warps=4, stages=4, near=True),
}
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
    choices = candidates(rows, pixels, depth, channels, processors=processors, bytes_each=bytes_each)
    if processors == 1:
        # The interpreter: its time is the number of operations, whatever their size.
        return max(choices, key=lambda tile: (tile.block_m * tile.block_k, tile.block_c, -tile.split, -tile.ways))
    return min(choices, key=lambda tile: cost(tile, rows, depth, channels, processors))


def candidates(
    rows: int, pixels: int, depth: int, channels: int, *, processors: int, bytes_each: int = 2
) -> list[Tile]:
    wide, most = max(16, power_of_two(channels)), max(16, divisor(pixels, 128))
    found = []
    for m, k in SHAPES:
        if m > most or k > wide:
            continue
        tiles = rows // m * -(-channels // k)
        # Where the sum is split the residual may be one more part; a second wave of programs would double the time.
        splits = [s for s in range(1, 17) if s == 1 or tiles * (s + 1) <= processors]
        for c in (32, 64, 128) if bytes_each == 2 else (64,):
            # A chunk within one tap: else every column has its own address.
            if c > 32 and depth % c and bytes_each == 2:
                continue
            for ways in (1, 2, 4) if bytes_each == 2 and m * k <= 64 * 64 else (1,):
                turn = (m + k) * c * ways * bytes_each
                found += [
                    _tile(m, k, depth, split=split, block_c=c, ways=ways) for split in splits if 2 * turn <= room(split)
                ]
    return list(dict.fromkeys(found))


def cost(tile: Tile, rows: int, depth: int, channels: int, processors: int) -> float:
    """Microseconds, roughly, of one launch in a chain of launches; its constants are fitted to an H200.

    A turn of the loop is a chain: what it waits for (0.12), then a step of 16 channels after the other, each at least the
    latency of the matrix units. Beside that stand what a multiprocessor takes in, what all of them take from the L2, and the
    arithmetic. The taps read most of the image by the L1. A split sum pays for its parts' way to memory and back.
    """
    m, k, turn = tile.block_m, tile.block_k, tile.block_c * tile.ways
    tiles = rows // m * -(-channels // k)
    each = -(-tile.turns(depth) // tile.split)
    a_processor = -(-tiles * tile.split // processors)
    products = m // 16 * max(1, k // 8) * tile.ways / tile.warps  # of a step and warp
    chain = 0.12 + tile.block_c / 16 * max(0.0225, 0.0037 * products)
    moved = (m * (0.5 if tile.near else 1.0) + k) * turn * 2
    arithmetic = 2 * m * k * turn / (4e6 if m >= 64 and tile.ways == 1 else 2.5e6)
    alone = each * max(chain * (1 + 0.5 * (a_processor - 1)), a_processor * moved / 90e3, a_processor * arithmetic)
    # Of tiles that move as much, the one with fewer turns.
    together = tiles * tile.split * each * moved / 6e6 + 0.01 * each * a_processor
    after = 0.05 * m * k / (32 * tile.warps) * a_processor + (0.1 if tile.ways > 1 else 0.0)
    parts = 0.9 + tile.split * m * k * 4 / 90e3 if tile.split > 1 else 0.0
    return 1.5 + max(alone, together) + after + parts


def room(split: int) -> int:
    """Bytes of shared memory for a loop's turns. A split sum's residual is a part with a loop of its own, beside the other."""
    return 98_304 if split == 1 else 49_152


def _tile(m: int, k: int, depth: int, *, split: int, block_c: int, ways: int) -> Tile:
    block_c = max(16, min(block_c, power_of_two(depth)))
    turns = -(-depth // (block_c * ways))
    each = -(-turns // split)
    stages = max(2, min(4, 1 + room(split) // ((m + k) * block_c * ways * 2), each + 1))
    warps = 8 if m * k >= 128 * 64 else 4 if m * k * ways >= 32 * 16 else 2
    return Tile(block_m=m, block_k=k, block_c=block_c, ways=ways, split=-(-turns // each), warps=warps, stages=stages)


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

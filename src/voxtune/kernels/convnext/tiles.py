"""Selects the tile of each launch.

At batch 1, a step is a chain of small launches. Tiles are small, so that most multiprocessors have one; the reduction is divided
among the warps of a program and, if that is not enough, split among programs. With large batches, tiles are as large as the
registers allow.
"""

from __future__ import annotations

from dataclasses import dataclass

# (pixels, output channels), in decreasing size. Larger ones leave no registers for the residual's accumulator.
SHAPES = ((128, 64), (128, 32), (64, 64), (64, 32), (32, 64), (32, 32), (32, 16), (16, 32), (16, 16))


@dataclass(frozen=True, kw_only=True)
class Tile:
    block_m: int
    block_k: int
    block_c: int
    ways: int = 1  # chunks per loop iteration, divided among the warps: 1, 2 or 4
    split: int = 1
    warps: int = 4
    stages: int = 4
    near: bool = True  # cache the image in L1

    def turns(self, depth: int) -> int:
        """Loop iterations of a reduction over `depth` values."""
        return -(-depth // (self.block_c * self.ways))

    def scratch_size(self, rows: int, channels: int) -> tuple[int, int]:
        """(float32 values for the partial sums, number of tile counters)."""
        tiles = rows // self.block_m * -(-channels // self.block_k)
        return (tiles * (self.split + 1) * self.block_m * self.block_k if self.split > 1 else 0), tiles

    def parts(self, *, residual: bool) -> int:
        """Programs per tile; with a split reduction, the residual is computed by one more."""
        return self.split + (residual and self.split > 1)


# Tiles that were faster than those of the cost model, measured on an H200 in BF16:
# (pixels of all samples, pixels per sample, depth, output channels) -> tile.
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
    """The largest power of two that divides x, at most `most`."""
    return min(most, x & -x)


def conv_tile(rows: int, pixels: int, depth: int, channels: int, *, processors: int, bytes_each: int = 2) -> Tile:
    """For `rows` pixels of all samples, `pixels` per sample, a reduction over `depth` values and `channels` outputs."""
    measured = MEASURED.get((rows, pixels, depth, channels))
    if measured is not None and processors == MEASURED_ON and bytes_each == 2:
        return measured
    choices = candidates(rows, pixels, depth, channels, processors=processors, bytes_each=bytes_each)
    if processors == 1:
        # The interpreter's time depends on the number of operations, not on their size.
        return max(choices, key=lambda tile: (tile.block_m * tile.block_k, tile.block_c, -tile.split, -tile.ways))
    return min(choices, key=lambda tile: cost(tile, rows, depth, channels, processors))


def candidates(
    rows: int, pixels: int, depth: int, channels: int, *, processors: int, bytes_each: int = 2
) -> list[Tile]:
    wide, most = max(16, power_of_two(channels)), max(16, divisor(pixels, 128))
    tiles = []
    for m, k in SHAPES:
        if m > most or k > wide:
            continue
        count = rows // m * -(-channels // k)
        # A split reduction may have one more part for the residual. A second wave of programs would double the time.
        splits = [s for s in range(1, 17) if s == 1 or count * (s + 1) <= processors]
        for c in (32, 64, 128) if bytes_each == 2 else (64,):
            # A chunk must not span several taps, or every column has its own address.
            if c > 32 and depth % c and bytes_each == 2:
                continue
            for ways in (1, 2, 4) if bytes_each == 2 and m * k <= 64 * 64 else (1,):
                stage = (m + k) * c * ways * bytes_each
                tiles += [
                    _tile(m, k, depth, split=split, block_c=c, ways=ways)
                    for split in splits
                    if 2 * stage <= shared_memory_limit(split)
                ]
    return list(dict.fromkeys(tiles))


def cost(tile: Tile, rows: int, depth: int, channels: int, processors: int) -> float:
    """Approximate microseconds of one launch in a chain of launches; the constants are fitted to an H200.

    The time of a loop iteration is the largest of: its latency (0.12 for synchronisation, then one tensor core instruction
    after another, each for 16 channels), the bandwidth of a multiprocessor, and the arithmetic. All programs together are
    limited by the bandwidth of the L2 cache. L1 serves most reads of the image. A split reduction also writes and reads its
    partial sums.
    """
    m, k, channels_each = tile.block_m, tile.block_k, tile.block_c * tile.ways
    tiles = rows // m * -(-channels // k)
    iterations = -(-tile.turns(depth) // tile.split)
    load = -(-tiles * tile.split // processors)  # programs per multiprocessor
    products = m // 16 * max(1, k // 8) * tile.ways / tile.warps  # per instruction step and warp
    latency = 0.12 + tile.block_c / 16 * max(0.0225, 0.0037 * products)
    moved = (m * (0.5 if tile.near else 1.0) + k) * channels_each * 2  # bytes per iteration
    arithmetic = 2 * m * k * channels_each / (4e6 if m >= 64 and tile.ways == 1 else 2.5e6)
    processor = iterations * max(latency * (1 + 0.5 * (load - 1)), load * moved / 90e3, load * arithmetic)
    # The last term prefers fewer iterations among tiles that move the same number of bytes.
    cache = tiles * tile.split * iterations * moved / 6e6 + 0.01 * iterations * load
    epilogue = 0.05 * m * k / (32 * tile.warps) * load + (0.1 if tile.ways > 1 else 0.0)
    parts = 0.9 + tile.split * m * k * 4 / 90e3 if tile.split > 1 else 0.0
    return 1.5 + max(processor, cache) + epilogue + parts


def shared_memory_limit(split: int) -> int:
    """Bytes of shared memory for the stages of a loop. In a split reduction the residual has a second loop."""
    return 98_304 if split == 1 else 49_152


def _tile(m: int, k: int, depth: int, *, split: int, block_c: int, ways: int) -> Tile:
    block_c = max(16, min(block_c, power_of_two(depth)))
    turns = -(-depth // (block_c * ways))
    iterations = -(-turns // split)
    stages = max(2, min(4, 1 + shared_memory_limit(split) // ((m + k) * block_c * ways * 2), iterations + 1))
    warps = 8 if m * k >= 128 * 64 else 4 if m * k * ways >= 32 * 16 else 2
    return Tile(
        block_m=m, block_k=k, block_c=block_c, ways=ways, split=-(-turns // iterations), warps=warps, stages=stages
    )


@dataclass(frozen=True, kw_only=True)
class DepthwiseTile:
    run: int  # adjacent pixels per thread
    block_p: int  # runs per tile
    block_c: int
    block_i: int  # rows of taps computed in parallel
    warps: int

    def tiles(self, pixels: int, channels: int) -> int:
        """Number of tiles per sample."""
        return pixels // (self.run * self.block_p) * -(-channels // self.block_c)


def depthwise_tile(rows: int, side: tuple[int, int], channels: int, processors: int) -> DepthwiseTile:
    """Two channels per thread. Rows of taps run in parallel until every multiprocessor has about twenty warps."""
    run = 1 if side[1] % 4 else 4
    runs = side[0] * side[1] // run
    block_c = min(32, power_of_two(channels))
    if processors == 1:
        return DepthwiseTile(run=run, block_p=divisor(runs, 64), block_c=block_c, block_i=8, warps=4)
    warps_needed = rows // run * -(-channels // block_c) * block_c // 64
    block_i = 8
    while block_i > 1 and warps_needed * block_i > 24 * processors:
        block_i //= 2
    block_p = divisor(runs, 16)
    while block_p > 1 and (
        block_i * block_p * block_c > 512 or rows // (run * block_p) * -(-channels // block_c) < processors
    ):
        block_p //= 2
    warps = max(1, min(8, block_i * block_p * block_c // 64))
    return DepthwiseTile(run=run, block_p=block_p, block_c=block_c, block_i=block_i, warps=warps)

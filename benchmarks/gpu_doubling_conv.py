"""Convolutions that change the resolution: the kernels of doubling_conv.py and strided_conv.py with each candidate tile, compared
with cuDNN (channels-last, benchmark mode), at the shapes of nnU-Net, MONAI UNet, DiffusionModelUNet and the MAISI decoder.

Nearest upsampling with its convolution is compared with PyTorch, and with this project's own two kernels. A candidate must be
exact on integers, at a small odd size, before it is timed. `ideal_us` is the larger of the two bounds: the bytes of sources and
result at the copy rate, and the products at 700 TFLOP/s. The best tiles are printed beside those of kernels/parity_tiles.py.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from gpu_group_norm import copy_bandwidth
from results_file import RESULTS, measure, row, write
from torch import Tensor
from torch.nn import functional as F

from voxtune.kernels import conv3d, doubling_conv, strided_conv, upsample
from voxtune.kernels.compiled import compiled
from voxtune.kernels.conv3d_tiles import shape_of_tile
from voxtune.kernels.parity_tiles import ParityTile, channel_tile, doubling_tile, shared_memory, strided_tile
from voxtune.kernels.precompile import compiled_ahead

SHARED_LIMIT = 232448 - 1024  # bytes of shared memory per program, without barriers
PEAK = 700e12  # BF16 operations per second, about the best rate of a matrix product


@dataclass(frozen=True)
class Shape:
    kind: str  # "transposed", "nearest" or "strided"
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    channels: tuple[int, ...]  # of each source
    out: int
    voxels: tuple[int, ...]  # of the source

    @property
    def doubling(self) -> bool:
        return self.kind != "strided"

    @property
    def result(self) -> tuple[int, ...]:
        if self.doubling:
            return tuple(size * s for size, s in zip(self.voxels, self.stride, strict=True))
        return strided_conv.result_voxels(self.voxels, self.stride)

    @property
    def products(self) -> int:
        """Multiplications and additions that the kernels compute, padding included."""
        taps, V = _product(self.kernel), _product(self.voxels if self.doubling else self.result)
        return 2 * taps * V * sum(self.channels) * self.out

    @property
    def traffic(self) -> int:
        return 2 * (_product(self.voxels) * sum(self.channels) + _product(self.result) * self.out)

    def __str__(self) -> str:
        kernel = "nearest+3" if self.kind == "nearest" else f"{self.kind} {'x'.join(map(str, self.kernel))}"
        sizes = f"{'x'.join(map(str, self.voxels))} to {'x'.join(map(str, self.result))}"
        return f"{kernel}, {'+'.join(map(str, self.channels))} to {self.out} channels, {sizes}"


def _product(values: tuple[int, ...]) -> int:
    total = 1
    for value in values:
        total *= value
    return total


def cube(kind: str, kernel: int, channels: tuple[int, ...], out: int, side: int) -> Shape:
    return Shape(kind, (kernel,) * 3, (2,) * 3, channels, out, (side,) * 3)


SHAPES = [
    # nnU-Net's decoder at 128^3, deepest level last; one anisotropic level.
    *(cube("transposed", 2, (c,), k, side) for c, k, side in ((64, 32, 64), (128, 64, 32), (256, 128, 16))),
    *(cube("transposed", 2, (c,), k, side) for c, k, side in ((320, 256, 8), (320, 320, 4))),
    Shape("transposed", (1, 2, 2), (1, 2, 2), (64,), 32, (20, 160, 128)),
    # MONAI UNet: the result of the level below and the skip connection are two sources.
    *(cube("transposed", 3, (c, c), k, side) for c, k, side in ((32, 16, 64), (64, 32, 32), (128, 64, 16))),
    # DiffusionModelUNet at 128^3, then the MAISI decoder to 128^3 and to 256^3.
    *(cube("nearest", 4, (c,), c, side) for c, side in ((64, 64), (128, 32), (192, 16), (256, 8))),
    *(cube("nearest", 4, (c,), c, side) for c, side in ((256, 32), (128, 64), (64, 128))),
    # nnU-Net's encoder at 128^3, one anisotropic level; DiffusionModelUNet.
    *(cube("strided", 3, (c,), k, side) for c, k, side in ((32, 64, 128), (64, 128, 64), (128, 256, 32))),
    *(cube("strided", 3, (c,), k, side) for c, k, side in ((256, 320, 16), (320, 320, 8), (64, 64, 128))),
    Shape("strided", (1, 3, 3), (1, 2, 2), (32,), 64, (20, 320, 256)),
]


def default_tile(shape: Shape) -> ParityTile:
    if shape.doubling:
        fold = doubling_conv.folds(shape.kernel, shape.stride, False)
        return doubling_tile(1, *shape.voxels, max(shape.channels), shape.out, fold)
    steps = _product(shape.kernel) * -(-shape.channels[0] // 64)
    return strided_tile(1, *shape.result, shape.channels[0], shape.out, steps)


def candidates(shape: Shape) -> list[ParityTile]:
    """The default tile first, then others that fit into shared memory and fill the GPU about as well."""
    default = default_tile(shape)
    fold = shape.doubling and doubling_conv.folds(shape.kernel, shape.stride, False)
    K = 2 * shape.out if fold else shape.out
    planes = shape.voxels if shape.doubling else shape.result
    small = _product(planes) <= 16**3
    tiles = [default]
    for voxels, widest, warps in ((64, 64, 4), (128, 64, 4), (128, 64, 8), (256, 64, 8), (128, 128, 8), (64, 128, 4)):
        if widest > max(64, K) or (small and voxels > 128):
            continue
        k = channel_tile(K, widest)
        h, w = shape_of_tile(voxels, *planes[-2:])[0]
        for stages, outer in ((3, 2), (4, 3)) if small else ((2, 2), (3, 2)):
            tile = replace(default, h=h, w=w, k=k, swap=k >= 64, warps=warps, stages=stages)
            tile = replace(tile, outer_stages=outer) if max(shape.kernel) > 2 and shape.doubling else tile
            for split in (1,) if shape.doubling or not small else (default.split, 2 * default.split):
                tiles.append(replace(tile, split=split))
    # Other forms of the plane's tile.
    tiles += [replace(default, h=h, w=w) for h, w in shape_of_tile(default.h * default.w, *planes[-2:])[1:3]]
    if default.c == 32:
        tiles.append(replace(default, c=64))
    kernel_w = shape.kernel[-1]
    fits = [t for t in tiles if shared_memory(t, doubling=shape.doubling, kernel_w=kernel_w) <= SHARED_LIMIT]
    return list(dict.fromkeys(fits))


def label(tile: ParityTile) -> str:
    roles = "swap" if tile.swap else "plain"
    stages = f"s{tile.stages}/{tile.outer_stages}"
    return f"{tile.h}x{tile.w} k{tile.k} c{tile.c} {roles} w{tile.warps} {stages} x{tile.split}"


class Problem:
    """Inputs of one shape; integers for the exact check."""

    def __init__(self, shape: Shape, dtype: torch.dtype, whole: bool = False):
        self.shape = shape
        generator = torch.Generator("cuda").manual_seed(0)

        def draw(high: int, *size: int) -> Tensor:
            if whole:
                return torch.randint(-high, high + 1, size, device="cuda", generator=generator).to(dtype)
            return torch.randn(size, device="cuda", generator=generator).to(dtype)

        def last(x: Tensor) -> Tensor:
            return x.contiguous(memory_format=torch.channels_last_3d)

        C, K = sum(shape.channels), shape.out
        self.sources = tuple(last(draw(2, 1, c, *shape.voxels)) for c in shape.channels)
        scale = 1.0 if whole else (C * _product(shape.kernel)) ** -0.5
        kernel = (3,) * 3 if shape.kind == "nearest" else shape.kernel
        size = (C, K, *kernel) if shape.kind == "transposed" else (K, C, *kernel)
        weight = draw(1, *size) * scale
        self.weight, self.bias = last(weight), draw(3, K)
        self.shift = self.bias[None].float()
        if shape.kind == "strided":
            self.packed = strided_conv.pack_strided(weight)
        elif shape.kind == "nearest":
            self.packed = doubling_conv.pack_nearest(weight.float(), shape.stride).to(dtype)
            self.packed_whole = conv3d.pack(weight)
        else:
            self.packed = doubling_conv.pack_transposed(weight)

    def run(self, tile: ParityTile, statistics: bool = False) -> Tensor:
        rest = (self.packed, tile, self.shift, self.shape.kernel, self.shape.stride, statistics)
        if self.shape.doubling:
            return doubling_conv.convolve(self.sources, *rest)[0]
        return strided_conv.convolve(self.sources[0], *rest)[0]

    def torch(self) -> Tensor:
        """PyTorch with cuDNN."""
        x = torch.cat(self.sources, 1) if len(self.sources) == 2 else self.sources[0]
        stride, padding = self.shape.stride, tuple(k // 2 for k in self.shape.kernel)
        if self.shape.kind == "strided":
            return F.conv3d(x, self.weight.to(x.dtype), self.bias.to(x.dtype), stride, padding)
        if self.shape.kind == "nearest":
            up = F.interpolate(x, scale_factor=2.0, mode="nearest")
            return F.conv3d(up, self.weight.to(x.dtype), self.bias.to(x.dtype), padding=1)
        paddings = doubling_conv.paddings(self.shape.kernel, stride)
        return F.conv_transpose3d(x, self.weight.to(x.dtype), self.bias.to(x.dtype), stride, *paddings)

    def two_kernels(self) -> Tensor:
        """Nearest upsampling and the 3x3x3 convolution by this project's kernels."""
        return conv3d.conv3d(upsample.upsample(self.sources[0], "nearest"), self.packed_whole, self.shift)[0]

    def truth(self) -> Tensor:
        """In float32: sums of small integers are exact in any order."""
        exact = Problem.__new__(Problem)
        exact.__dict__ = {**self.__dict__, "sources": tuple(s.float() for s in self.sources)}
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=False, allow_tf32=False):
            return exact.torch()


def small_problem(shape: Shape, dtype: torch.dtype) -> Problem:
    """The same convolution of a small volume, ragged for every tile."""
    even = [s if not shape.doubling else 1 for s in shape.stride]
    return Problem(replace(shape, voxels=(3, 19 * even[1], 37 * even[2])), dtype, whole=True)


def exact_tiles(shape: Shape, dtype: torch.dtype, tiles: list[ParityTile]) -> Iterator[ParityTile]:
    problem = small_problem(shape, dtype)
    truth = problem.truth().to(dtype)
    for tile in tiles:
        try:
            right = torch.equal(problem.run(tile), truth)
        except Exception as error:
            print(f"  FAILED {label(tile)}: {error!r:.160}", flush=True)
            continue
        if right:
            yield tile
        else:
            print(f"  WRONG {label(tile)}", flush=True)


def rehearse(shape: Shape, dtype: torch.dtype, tiles: list[ParityTile]) -> None:
    problem = small_problem(shape, dtype)
    for tile in tiles:
        problem.run(tile)


def difference(y: Tensor, other: Tensor) -> float:
    """Relative difference in slabs: a whole volume in float64 would be large."""
    pairs = list(zip(y.split(16, dim=2), other.split(16, dim=2), strict=True))
    squares = sum((a.double() - b.double()).square().sum().item() for a, b in pairs)
    return (squares / sum(b.double().square().sum().item() for _, b in pairs)) ** 0.5


def bench(shape: Shape, dtype: torch.dtype, bandwidth: float, deadline: float) -> list[dict]:
    """Rows of PyTorch, of the default and of the fastest tile."""
    tiles = candidates(shape)
    with compiled_ahead(lambda: rehearse(shape, dtype, tiles)):
        pass
    problem, timed = Problem(shape, dtype), list[tuple[float, ParityTile]]()
    for tile in exact_tiles(shape, dtype, tiles):
        if timed and time.monotonic() > deadline:
            break
        timed.append((min(measure(lambda tile=tile: problem.run(tile), 4, 6)), tile))
    if not timed:
        print(f"{shape}: no tile works")
        return []
    best = min(timed, key=lambda pair: pair[0])[1]
    default = tiles[0] if any(tile == tiles[0] for _, tile in timed) else best
    methods: dict[str, tuple[ParityTile | None, Callable[[], Tensor]]] = {"torch": (None, problem.torch)}
    if shape.kind == "nearest":
        methods["voxtune, two kernels"] = (None, problem.two_kernels)
    methods["voxtune"] = (default, lambda: problem.run(default))
    methods["voxtune, best tile"] = (best, lambda: problem.run(best))
    methods["voxtune, best tile, statistics"] = (best, lambda: problem.run(best, statistics=True))
    ideal = max(shape.traffic / bandwidth / 1e3, shape.products / PEAK)
    reference, rows = problem.torch(), []
    for name, (tile, method) in methods.items():
        try:
            error = difference(method(), reference)
            entry = row(f"{name}: {shape}", list(shape.result), measure(method), 0.0, error)
        except Exception as problem_of_method:
            print(f"  FAILED {name}: {problem_of_method!r:.160}", flush=True)
            continue
        entry |= {"ideal_us": round(ideal * 1e6, 1), "tile": tile and asdict(tile)}
        rows.append(entry)
    texts = [f"{r['name'].partition(':')[0]} {r['p50_ms'] * 1e3:.0f}" for r in rows]
    print(f"{shape}: ideal {ideal * 1e6:.0f} | {' | '.join(texts)} us", flush=True)
    print(f"  default {label(default)}, difference from PyTorch {rows[-1]['error']:.1e}")
    fastest = sorted(timed, key=lambda pair: pair[0])[:4]
    print("  fastest " + ", ".join(f"{label(tile)}: {ms * 1e3:.0f}" for ms, tile in fastest), flush=True)
    return rows


def dry(shapes: list[Shape], every: bool) -> None:
    """Registers, spills and shared memory of the tiles; needs no GPU."""
    done = set()
    for shape in shapes:
        for tile in candidates(shape)[: None if every else 1]:
            if shape.doubling:
                fold = doubling_conv.folds(shape.kernel, shape.stride, False)
                kernel, stride = (
                    ((shape.kernel[0], 1, 2), (shape.stride[0], 1, 2)) if fold else (shape.kernel, shape.stride)
                )
                given = doubling_conv.arguments(
                    tile, kernel, stride, dtype="bf16", sources=len(shape.channels), statistics=not fold
                )
                function = doubling_conv.voxtune_doubling_conv
            else:
                given = strided_conv.arguments(
                    replace(tile, split=min(tile.split, 2)), shape.kernel, shape.stride, dtype="bf16"
                )
                function = strided_conv.voxtune_strided_conv
            if (key := str(given)) in done:
                continue
            done.add(key)
            made = compiled(function, *given, arch=90, warps=tile.warps)
            bad = "BAD " if made.spills or made.serialised else ""
            usage = (
                f"registers {made.registers}, spills {made.spills}, shared {made.shared}, serialised {made.serialised}"
            )
            print(f"{bad}{shape.kind} {shape.kernel} {label(tile)}: {usage}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=RESULTS / "h200" / "doubling_conv.json")
    parser.add_argument("--type", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--kind", choices=["transposed", "nearest", "strided"], help="only these shapes")
    parser.add_argument("--seconds", type=float, default=240, help="time limit; after it, each shape has one tile")
    parser.add_argument("--dry", action="store_true", help="only compile the default tiles for sm_90 (needs no GPU)")
    parser.add_argument("--every", action="store_true", help="with --dry: all candidates")
    arguments = parser.parse_args()
    shapes = [s for s in SHAPES if arguments.kind in (None, s.kind)]
    if arguments.dry:
        return dry(shapes, arguments.every)
    started = time.monotonic()
    torch.backends.cudnn.benchmark = True  # the fastest setting for PyTorch
    torch.backends.cuda.matmul.allow_tf32 = False
    bandwidth, dtype, rows = copy_bandwidth(), getattr(torch, arguments.type), list[dict]()
    print(f"copy {bandwidth / 1e9:.2f} TB/s; times in us")
    for shape in shapes:
        rows += bench(shape, dtype, bandwidth, started + arguments.seconds)
        torch.cuda.empty_cache()
    write(arguments.out, rows, copy_tb_s=round(bandwidth / 1e9, 3), type=arguments.type)
    print(f"{time.monotonic() - started:.0f} s")
    return None


if __name__ == "__main__":
    main()

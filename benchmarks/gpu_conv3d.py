"""3x3x3 convolutions of all shapes of a network: the kernels of this project with each candidate tile, compared with cuDNN.

Candidates are compiled in parallel processes first. Each must reproduce an integer result exactly before it is timed. Shapes are
processed in decreasing order of cost until the time limit; the best tiles are printed in the format of kernels/conv3d_tiles.py.
`--network thin` has the layers of segmentation networks (8 to 64 channels at full resolution, two sources in the decoder), and
`--network windows` kernels of 1x3x3 and 3x1x1 and the causal padding of video networks. For two sources, cuDNN's time includes
the concatenation.
Kernels with barriers are first tested in a separate process, which is killed if it hangs.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from results_file import RESULTS, measure, row, write
from torch import Tensor, nn
from torch.nn import functional as F

from voxtune.kernels import conv3d as kernels
from voxtune.kernels import conv3d_halo
from voxtune.kernels.compiled import compiled
from voxtune.kernels.conv3d_tiles import Conv3dTile, chunk_of, shape_of_tile, shared_memory
from voxtune.workloads.med_ddpm import BRATS, WHOLE_HEAD, MedDDPMUNet

NETWORKS = {"whole-head": (WHOLE_HEAD, (128, 128, 128)), "brats": (BRATS, (144, 192, 192))}
DEVICE = "cuda"
SHARED_LIMIT = 232448  # bytes of shared memory per program, including the barriers


class Shape(NamedTuple):
    channels: tuple[int, ...]  # of each source
    K: int
    D: int
    H: int
    W: int
    kernel: tuple[int, ...] = kernels.CUBE
    padding: tuple[int, ...] = kernels.AROUND


Job = tuple[Conv3dTile, tuple[int, ...], tuple[int, ...], str]  # tile, channels of the sources, kernel, type
CAUSAL = (2, 0, 1, 1, 1, 1)


def cubes(*layers: tuple[int, tuple[int, ...], int]) -> dict[Shape, int]:
    """From (voxels per side, channels of each source, output channels)."""
    return {Shape(channels, K, side, side, side): 1 for side, channels, K in layers}


LISTED = {
    "thin": cubes(
        *((128, (c,), c) for c in (8, 16, 32)),
        *[(128, (32, 32), 32), (128, (64,), 32), (128, (32,), 64), (128, (64, 64), 64), (128, (16, 16), 16)],
        *[(64, (64,), 64), (64, (64, 64), 64), (32, (128, 128), 128), (16, (256, 256), 256), (8, (320, 320), 320)],
    ),
    "windows": {
        Shape((32,), 32, 64, 128, 128, (1, 3, 3), (0, 0, 1, 1, 1, 1)): 1,
        Shape((64,), 64, 32, 128, 128, (1, 3, 3), (0, 0, 1, 1, 1, 1)): 1,
        Shape((96,), 96, 16, 128, 128, (3, 3, 3), CAUSAL): 1,
        Shape((192,), 192, 16, 64, 64, (3, 3, 3), CAUSAL): 1,
        Shape((384,), 768, 8, 32, 32, (3, 1, 1), (2, 0, 0, 0, 0, 0)): 1,
    },
}


def shapes_of(network: str) -> dict[Shape, int]:
    """Every 3x3x3 convolution of stride 1 with its number of occurrences, in decreasing order of cost."""
    counts: dict[Shape, int] = {}
    if network in LISTED:
        return dict(sorted(LISTED[network].items(), key=lambda item: -flops(item[0])))
    config, size = NETWORKS[network]

    def count(module: nn.Conv3d, _: object, y: Tensor) -> None:
        channels = (module.in_channels, module.out_channels)
        if module.kernel_size == (3, 3, 3) and module.stride == (1, 1, 1) and not any(c % 8 for c in channels):
            shape = Shape(channels[:1], channels[1], *y.shape[2:])
            counts[shape] = counts.get(shape, 0) + 1

    with torch.device("meta"):
        model = MedDDPMUNet(config)
        for module in model.modules():
            if isinstance(module, nn.Conv3d):
                module.register_forward_hook(count)
        x, mask = (torch.empty(1, c, *size) for c in (config.out_channels, config.mask_channels))
        model(x, torch.empty(1), mask)
    return dict(sorted(counts.items(), key=lambda item: -item[1] * flops(item[0])))


def flops(shape: Shape) -> int:
    return 2 * math.prod(shape.kernel) * sum(shape.channels) * math.prod(shape[1:5])


# (voxels per plane, output channels, warps, stages of the inner and of the outer loop).
LARGE = [(256, 64, 8, 4, 2), (256, 64, 8, 3, 2), (128, 64, 4, 3, 2), (128, 64, 4, 2, 2), (128, 64, 4, 4, 3)]
LARGE += [(128, 128, 8, 4, 3), (128, 128, 8, 3, 2)]
SMALL = [(128, 64, 4, 3, 2), (128, 64, 4, 4, 3), (64, 64, 4, 4, 3), (64, 128, 4, 4, 3), (128, 128, 8, 4, 3)]
# With the halo in shared memory: (h, w, output channels, warps, stages of x and of the weights).
HALO = [(16, 16, 64, 8, 4, 3), (16, 16, 64, 8, 2, 3), (32, 8, 64, 8, 4, 3), (8, 32, 64, 8, 2, 3), (4, 64, 64, 8, 2, 3)]
HALO += [(8, 16, 64, 4, 2, 3), (16, 8, 64, 4, 2, 3), (4, 32, 64, 4, 2, 3)]
HALO += [(8, 16, 128, 8, 4, 3), (8, 16, 128, 8, 2, 3), (16, 8, 128, 8, 4, 3)]
# For up to 32 output channels voxels are the rows of the product.
HALO_FEW = [
    (16, 16, 8, 4, 3),
    (16, 16, 8, 2, 3),
    (32, 8, 8, 4, 3),
    (8, 32, 8, 4, 3),
    (8, 16, 4, 4, 3),
    (8, 16, 4, 2, 3),
]
HALO_FEW += [(16, 8, 4, 4, 3), (16, 16, 4, 4, 3), (4, 32, 4, 4, 3)]
FEW = [(128, 4, 4, 3), (128, 4, 3, 2), (128, 8, 4, 3), (256, 8, 4, 3), (256, 8, 3, 2), (64, 4, 4, 3)]


def candidates(shape: Shape) -> list[Conv3dTile]:
    """Tiles that fit into shared memory, waste little and fill the GPU."""
    least = chunk_of(shape.channels)
    chunks = [least] if least == 64 else [c for c in (16, 32, 64) if least <= c <= 2 * least]
    tiles = [tile for c in chunks for tile in _halo(shape, c)] if shape.kernel == kernels.CUBE else []
    if shape.K <= 32:
        return tiles + [tile for c in chunks for tile in _few(shape, c)]
    big = shape.D * shape.H * shape.W > 32**3
    for voxels, k, warps, inner, outer in LARGE if big else SMALL:
        for (h, w), swap in itertools.product(
            shape_of_tile(voxels, shape.H, shape.W)[: 2 if big else 1], (True, False)
        ):
            tile = Conv3dTile(h=h, w=w, k=k, c=least, swap=swap, warps=warps, inner_stages=inner, outer_stages=outer)
            if k > max(64, shape.K) or shared_memory(tile) > SHARED_LIMIT - 1024:
                continue
            programs = programs_of(tile, shape)
            for split in (1, 2, 3, 4, 6, 9, 12, 18):
                if programs >= 64 if split == 1 else 100 <= programs * split <= 500:
                    tiles.append(replace(tile, split=split))
    return tiles


def _halo(shape: Shape, c: int) -> list[Conv3dTile]:
    tiles = []
    for h, w, k, warps, inner, outer in HALO if shape.K > 32 else []:
        if k <= max(64, shape.K):
            tiles.append(Conv3dTile(h=h, w=w, k=k, c=c, warps=warps, inner_stages=inner, outer_stages=outer, halo=True))
    for h, w, warps, inner, outer in HALO_FEW if shape.K <= 32 else []:
        k = max(16, 1 << (shape.K - 1).bit_length())
        tile = Conv3dTile(
            h=h, w=w, k=k, c=c, swap=False, warps=warps, inner_stages=inner, outer_stages=outer, halo=True
        )
        # At most 64 registers a thread for the sums of two planes.
        if h * w * k <= 1024 * warps:
            tiles.append(tile)
    return [t for t in tiles if shared_memory(t) <= SHARED_LIMIT - 1024 and programs_of(t, shape) >= 64]


def _few(shape: Shape, c: int) -> list[Conv3dTile]:
    """Plain tiles with voxels as rows."""
    k = max(16, 1 << (shape.K - 1).bit_length())
    tiles = [
        Conv3dTile(h=h, w=w, k=k, c=c, swap=False, warps=warps, inner_stages=inner, outer_stages=outer)
        for voxels, warps, inner, outer in FEW
        for h, w in shape_of_tile(voxels, shape.H, shape.W)[:1]
    ]
    return [t for t in tiles if shared_memory(t) <= SHARED_LIMIT - 1024]


def programs_of(tile: Conv3dTile, shape: Shape) -> int:
    _, K, D, H, W, *_ = shape
    return -(-W // tile.w) * -(-H // tile.h) * -(-D // 2) * -(-K // tile.k)


def label(tile: Conv3dTile) -> str:
    roles = ("halo " if tile.halo else "") + ("swap" if tile.swap else "plain")
    return f"{tile.h}x{tile.w} k{tile.k} c{tile.c} {roles} w{tile.warps} s{tile.inner_stages}/{tile.outer_stages} x{tile.split}"


def channels_last(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last_3d)


def compile_on_device(job: Job, every: bool = False) -> str:
    """Launches the kernel on a few voxels, to write it to Triton's cache. Runs in a separate process."""
    tile, channels, kernel, dtype = job
    K, kind = tile.k, getattr(torch, dtype)
    sources = tuple(torch.zeros(1, 4, 4, 8, c, device=DEVICE, dtype=kind).movedim(-1, 1) for c in channels)
    residual = torch.zeros(1, 4, 4, 8, K, device=DEVICE, dtype=kind).movedim(-1, 1)
    packed = torch.zeros(math.prod(kernel), K, sum(channels), device=DEVICE, dtype=kind)
    shift = torch.zeros(1, K, device=DEVICE, dtype=kind)
    padding = tuple(p for extent in kernel for p in (extent // 2, extent // 2))
    epilogues = ((None, None, False), (shift, residual, True)) if every else ((shift, None, True),)
    try:
        for epilogue in epilogues:
            kernels.convolve(sources, packed, tile, *epilogue, kernel, padding)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{label(tile)}: {error!r:.200}"
    return ""


def check_tile(tile: Conv3dTile, dtype: str) -> None:
    """Raises an exception unless the result is correct on a small volume with odd dimensions."""
    K = tile.k + (64 if tile.swap else -8)
    for channels, padding in (((128,), kernels.AROUND), ((40, 72), CAUSAL)):
        problem = Problem(Shape(channels, K, 5, 19, 37, kernels.CUBE, padding), getattr(torch, dtype))
        assert problem.is_exact(tile), f"wrong result for {channels}"
        y, _ = problem.run(tile, residual=True)
        assert problem.error(y, shift=True, residual=True) < 1e-2, f"wrong epilogue for {channels}"
        assert problem.error_of_statistics(tile) < 1e-3, f"wrong statistics for {channels}"


Kind = tuple[int, int, int, bool]  # output channels, input channels of a step, warps, roles


def kind_of(tile: Conv3dTile) -> Kind:
    return tile.k, tile.c, tile.warps, tile.swap


def working_halo_tiles(tiles: list[Conv3dTile], dtype: str) -> set[Kind]:
    """The kinds of halo tiles that neither hang nor fail."""
    kinds = {kind_of(tile): tile for tile in reversed(tiles) if tile.halo}
    processes = {}
    for kind, tile in kinds.items():
        processes[kind] = get_context("spawn").Process(target=check_tile, args=(tile, dtype))
        processes[kind].start()
    deadline = time.monotonic() + 60
    for process in processes.values():
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    for kind, process in processes.items():
        print(
            f"halo {kind}: {'correct' if process.exitcode == 0 else f'FAILED, exit code {process.exitcode}'}",
            flush=True,
        )
    return {kind for kind, process in processes.items() if process.exitcode == 0}


def compile_dry(job: Job) -> tuple[str, dict]:
    """Registers, spills and shared memory; needs no GPU."""
    tile, channels, window, dtype = job
    kind = "bf16" if dtype == "bfloat16" else "fp16"
    kernel = kernels.voxtune_conv3d
    arguments = kernels.arguments(tile, dtype=kind, sources=len(channels), kernel=window)
    if tile.halo:
        kernel, arguments = conv3d_halo.voxtune_conv3d_halo, conv3d_halo.arguments(tile, channels, dtype=kind)
    try:
        binary = compiled(kernel, *arguments, arch=90, warps=tile.warps)
    except Exception as error:
        return label(tile), {"error": repr(error)[:200]}
    usage = {"registers": binary.registers, "spills": binary.spills, "shared": binary.shared}
    return label(tile), {**usage, "serialised": binary.serialised, "wgmma": binary.ptx.count("wgmma.mma_async")}


class Problem:
    """Inputs of one shape: random numbers for timing, integers for the exact check."""

    def __init__(self, shape: Shape, dtype: torch.dtype):
        self.shape = shape
        channels, K, D, H, W, kernel, padding = shape
        self.window = (kernel, padding)
        # A padding that keeps the size, so that the sources have the size of the result.
        assert all(b + a == extent - 1 for extent, b, a in zip(kernel, padding[::2], padding[1::2], strict=True))
        torch.manual_seed(0)

        def random(high: int | None, *size: int) -> Tensor:
            x = (
                torch.randn(size, device=DEVICE)
                if high is None
                else torch.randint(-high, high + 1, size, device=DEVICE)
            )
            x = x.to(dtype)
            return channels_last(x) if x.dim() == 5 and size[2:] != kernel else x

        C = sum(channels)
        self.sources = tuple(random(None, 1, c, D, H, W) for c in channels)
        self.residual = random(None, 1, K, D, H, W)
        self.weight = (random(None, K, C, *kernel) / (math.prod(kernel) * C) ** 0.5).to(dtype)
        self.shift = random(None, 1, K)
        self.whole = tuple(random(2, 1, c, D, H, W) for c in channels)
        self.weight_whole = random(1, K, C, *kernel)
        self.packed, self.packed_whole = kernels.pack(self.weight), kernels.pack(self.weight_whole)
        self.weight_last = channels_last(self.weight)

    def padded(self, x: Tensor) -> Tensor:
        d, h, w = (self.shape.padding[i : i + 2] for i in (0, 2, 4))
        return F.pad(x, (*w, *h, *d))

    @functools.cached_property
    def truth_whole(self) -> Tensor:
        """The expected result. Sums of small integers are exact in float32 in any order, so it must match bit for bit."""
        x = self.padded(torch.cat(self.whole, 1).float())
        return F.conv3d(x, self.weight_whole.float()).to(self.shift.dtype)

    def is_exact(self, tile: Conv3dTile) -> bool:
        zero = torch.zeros_like(self.shift)
        y, _ = kernels.convolve(self.whole, self.packed_whole, tile, zero, None, True, *self.window)
        return torch.equal(y, self.truth_whole)

    def run(self, tile: Conv3dTile, shift: bool = True, residual: bool = False, statistics: bool = True):
        terms = (self.shift if shift else None, self.residual if residual else None)
        return kernels.convolve(self.sources, self.packed, tile, *terms, statistics, *self.window)

    def error(self, y: Tensor, shift: bool, residual: bool) -> float:
        """Relative error against float64, in a corner of the volume."""
        edge = 12
        whole = torch.cat([x[..., : edge + 2, : edge + 2, : edge + 2] for x in self.sources], 1).double()
        truth = F.conv3d(self.padded(whole), self.weight.double())[..., :edge, :edge, :edge]
        size = truth.shape[2:]
        y = y[..., : size[0], : size[1], : size[2]]
        if shift:
            truth = truth + self.shift.double()[..., None, None, None]
        if residual:
            truth = truth + self.residual[..., : size[0], : size[1], : size[2]].double()
        return ((y.double() - truth).norm() / truth.norm()).item()

    def error_of_statistics(self, tile: Conv3dTile) -> float:
        """Error of the standard deviation, against float64 over the stored values."""
        y, statistics = self.run(tile)
        count, mean, m2 = statistics.double().unbind(2)
        total_mean = (count * mean).sum(1, keepdim=True) / count.sum(1, keepdim=True)
        variance = (m2 + count * (mean - total_mean).square()).sum(1) / count.sum(1)
        truth = y.double().flatten(2).var(dim=2, correction=0)
        return ((variance.sqrt() - truth.sqrt()).norm() / truth.sqrt().norm()).item()

    def cudnn(self) -> Tensor:
        x = torch.cat(self.sources, 1) if len(self.sources) > 1 else self.sources[0]
        before, after = self.shape.padding[::2], self.shape.padding[1::2]
        if before != after:
            return F.conv3d(self.padded(x), self.weight_last)
        return F.conv3d(x, self.weight_last, padding=before)


def search(problem: Problem, tiles: list[Conv3dTile], deadline: float) -> list[tuple[float, Conv3dTile]]:
    """(ms, tile) of the tiles with correct results, fastest first."""
    timed: list[tuple[float, Conv3dTile]] = []
    for tile in tiles:
        if time.monotonic() > deadline:
            break
        try:
            if not problem.is_exact(tile):
                print(f"  WRONG {label(tile)}", flush=True)
                continue
            once = measure(lambda tile=tile: problem.run(tile), 2, 2)
            if timed and min(once) > 1.5 * timed[0][0]:
                continue
            timed.append((min(measure(lambda tile=tile: problem.run(tile), 3, 5)), tile))
            timed.sort(key=lambda pair: pair[0])
        except Exception as error:
            print(f"  FAILED {label(tile)}: {error!r:.160}", flush=True)
    return timed


def rows_of(problem: Problem, timed: list[tuple[float, Conv3dTile]]) -> list[dict]:
    """Rows of cuDNN and of the best tile, with and without an epilogue."""
    # Measure the two fastest again for longer, since their order after a few runs is partly noise.
    finals = [(sorted(measure(lambda t=t: problem.run(t), 4, 12))[5], t) for _, t in timed[:2]]
    best = min(finals, key=lambda pair: pair[0])[1]
    methods = {
        "cudnn": (problem.cudnn, False, False),
        "voxtune": (lambda: problem.run(best, shift=False, statistics=False)[0], False, False),
        "voxtune shift+statistics": (lambda: problem.run(best)[0], True, False),
        "voxtune shift+residual+statistics": (lambda: problem.run(best, residual=True)[0], True, True),
    }
    rows = []
    for name, (method, shift, residual) in methods.items():
        error = problem.error(method(), shift, residual)
        times = measure(method, 4, 20)
        entry = row(name, [*problem.shape[0], *problem.shape[1:5]], times, 0.0, error)
        entry["us"] = round(entry["p50_ms"] * 1e3, 2)
        entry["tflop_s"] = round(flops(problem.shape) / entry["us"] / 1e6, 1)
        rows.append({**entry, "tile": None if name == "cudnn" else asdict(best)})
    rows[2]["statistics_error"] = float(f"{problem.error_of_statistics(best):.3g}")
    rows[2]["searched"] = [[round(ms * 1e3, 2), label(tile)] for ms, tile in timed[:8]]
    return rows


def line(shape: Shape, rows: list[dict]) -> str:
    cudnn, bare, shifted, full = rows
    C = "+".join(map(str, shape.channels))
    fields = [f"{C:>3}->{shape.K:<3} {shape.D}x{shape.H}x{shape.W}".ljust(22)]
    if shape.kernel != kernels.CUBE or shape.padding != kernels.AROUND:
        fields.append(f"{'x'.join(map(str, shape.kernel))} padded {shape.padding}")
    fields += [f"{r['us']:8.1f} us {r['tflop_s']:4.0f}" for r in (cudnn, bare, shifted, full)]
    errors = f"{cudnn['error']:.1e} {bare['error']:.1e} {shifted['statistics_error']:.0e}"
    return " | ".join([*fields, label(Conv3dTile(**bare["tile"])), errors])


def dry(jobs: list[Job], workers: int) -> None:
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for name, usage in pool.map(compile_dry, jobs):
            bad = "error" in usage or usage["spills"] > 16 or usage["shared"] > SHARED_LIMIT or usage["serialised"]
            print(f"{'BAD ' if bad else ''}{name}: {json.dumps(usage)}", flush=True)


def compile_all(pool: ProcessPoolExecutor, jobs: list, every: bool) -> None:
    for done in as_completed([pool.submit(compile_on_device, job, every) for job in jobs]):
        if done.result():
            print(f"  {done.result()}", flush=True)


def compare(
    arguments: argparse.Namespace, tiles: dict[Shape, list[Conv3dTile]], jobs: list, counts: dict[Shape, int]
) -> None:
    start = time.monotonic()
    dtype = getattr(torch, arguments.dtype)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False
    timed: dict[Shape, list[tuple[float, Conv3dTile]]] = {}
    working = working_halo_tiles([job[0] for job in jobs], arguments.dtype)
    jobs = [job for job in jobs if not job[0].halo or kind_of(job[0]) in working]
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        compile_all(pool, jobs, every=False)
        print(f"compiled {len(jobs)} kernels after {time.monotonic() - start:.0f} s", flush=True)
        for shape, requested in tiles.items():
            if time.monotonic() - start > arguments.seconds * 0.8:
                print(f"time limit reached before {shape}")
                break
            valid = [t for t in requested if not t.halo or kind_of(t) in working]
            timed[shape] = search(Problem(shape, dtype), valid, start + arguments.seconds * 0.8)
            print(shape, [(round(ms * 1e3, 1), label(t)) for ms, t in timed[shape][:3]], flush=True)
        print(f"search finished after {time.monotonic() - start:.0f} s", flush=True)
        best = [(t, s.channels, s.kernel, arguments.dtype) for s, ts in timed.items() for _, t in ts[:2]]
        compile_all(pool, best, every=True)
    rows, lines, table = [], [], []
    for shape, best in timed.items():
        if not best or time.monotonic() - start > arguments.seconds * 1.1:
            print(f"no rows for {shape}")
            continue
        shape_rows = rows_of(Problem(shape, dtype), best)
        rows += [{**r, "times_in_network": counts[shape]} for r in shape_rows]
        lines.append(line(shape, shape_rows))
        table.append(f"    {shape}: {Conv3dTile(**shape_rows[1]['tile'])},")
    write(arguments.out, rows, network=arguments.network)
    print(
        f"\n{'shape':22} | cuDNN us TFLOP/s | ours | +shift+statistics | +residual | tile | errors: cuDNN, ours, statistics"
    )
    print("\n".join(lines))
    for name in ("cudnn", "voxtune", "voxtune shift+statistics"):
        total = sum(r["us"] * r["times_in_network"] for r in rows if r["name"] == name)
        print(f"all convolutions of a forward pass, {name}: {total / 1e3:.2f} ms")
    print("\nTABLE = {\n" + "\n".join(table) + "\n}")
    print(f"{time.monotonic() - start:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--network", choices=[*NETWORKS, *LISTED], default="whole-head")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--seconds", type=float, default=200, help="approximate time limit")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--shapes", type=int, default=99, help="maximum number of shapes, in decreasing order of cost")
    parser.add_argument("--dry", action="store_true", help="only compile for sm_90 and report resources (needs no GPU)")
    parser.add_argument("--out", type=Path, default=RESULTS / "h200" / "conv3d.json")
    arguments = parser.parse_args()
    counts = dict(list(shapes_of(arguments.network).items())[: arguments.shapes])
    tiles = {shape: candidates(shape) for shape in counts}
    # The kernel is compiled for split or not, and for the number of channels only with halo.
    jobs: list[Job] = list(
        dict.fromkeys(
            (
                replace(tile, split=min(tile.split, 2)),
                shape.channels if tile.halo else (64,) * len(shape.channels),
                shape.kernel,
                arguments.dtype,
            )
            for shape, requested in tiles.items()
            for tile in requested
        )
    )
    print(f"{len(counts)} shapes, {len(jobs)} kernels", flush=True)
    if arguments.dry:
        dry(jobs, arguments.workers)
    else:
        compare(arguments, tiles, jobs, counts)


if __name__ == "__main__":
    main()

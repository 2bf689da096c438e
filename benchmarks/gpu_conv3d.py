"""3x3x3 convolutions of a network's every shape: this project's kernel, each candidate tile, against cuDNN.

Candidates compile in parallel processes first. Each must give exactly the right integers before it is timed. Shapes go costliest
first until the time is up; the best tiles are printed as the table of kernels/conv3d_tiles.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path

import torch
from results_file import RESULTS, row, write
from torch import Tensor, nn
from torch.nn import functional as F

from voxtune.kernels import conv3d as kernels
from voxtune.kernels.compiled import compiled
from voxtune.kernels.conv3d_tiles import Tile, shape_of_tile, shared_memory
from voxtune.workloads.med_ddpm import BRATS, WHOLE_HEAD, MedDDPMUNet

NETWORKS = {"whole-head": (WHOLE_HEAD, (128, 128, 128)), "brats": (BRATS, (144, 192, 192))}
SHARED_LIMIT = 232448  # bytes a program may have, with some of them for barriers
Shape = tuple[int, int, int, int, int]  # I, O, D, H, W


def shapes_of(network: str) -> dict[Shape, int]:
    """Each 3x3x3 convolution of stride 1 and how often it occurs, costliest first."""
    config, size = NETWORKS[network]
    found: dict[Shape, int] = {}

    def note(module: nn.Conv3d, _: object, y: Tensor) -> None:
        channels = (module.in_channels, module.out_channels)
        if module.kernel_size == (3, 3, 3) and module.stride == (1, 1, 1) and not any(c % 16 for c in channels):
            shape = (*channels, *y.shape[2:])
            found[shape] = found.get(shape, 0) + 1

    with torch.device("meta"):
        model = MedDDPMUNet(config)
        for module in model.modules():
            if isinstance(module, nn.Conv3d):
                module.register_forward_hook(note)
        x, mask = (torch.empty(1, c, *size) for c in (config.out_channels, config.mask_channels))
        model(x, torch.empty(1), mask)
    return dict(sorted(found.items(), key=lambda item: -item[1] * flops(item[0])))


def flops(shape: Shape) -> int:
    I, O, D, H, W = shape
    return 2 * 27 * I * O * D * H * W


def candidates(shape: Shape) -> list[Tile]:
    """The tiles worth a try: those that fit, waste little and fill the device."""
    _, O, D, H, W = shape
    found = []
    # (voxels a plane, output channels, warps, stages of the inner and the outer loop)
    large = [(256, 64, 8, 4, 2), (256, 64, 8, 3, 2), (128, 64, 4, 3, 2), (128, 64, 4, 2, 2), (128, 64, 4, 4, 3)]
    large += [(128, 128, 8, 4, 3), (128, 128, 8, 3, 2)]
    small = [(128, 64, 4, 3, 2), (128, 64, 4, 4, 3), (64, 64, 4, 4, 3), (64, 128, 4, 4, 3), (128, 128, 8, 4, 3)]
    big = D * H * W > 32**3
    for voxels, o, warps, inner, outer in large if big else small:
        for (h, w), swap in itertools.product(shape_of_tile(voxels, H, W)[: 2 if big else 1], (True, False)):
            programs = -(-W // w) * -(-H // h) * -(-D // 2) * -(-O // o)
            for split in (1, 2, 3, 4, 6, 9, 12, 18):
                filled = programs >= 64 if split == 1 else 100 <= programs * split <= 500
                tile = Tile(
                    h=h, w=w, o=o, swap=swap, warps=warps, inner_stages=inner, outer_stages=outer, split=split
                )
                if o <= O and filled and shared_memory(tile) <= SHARED_LIMIT - 1024:
                    found.append(tile)
    return found


def label(tile: Tile) -> str:
    roles = "swap" if tile.swap else "plain"
    return f"{tile.h}x{tile.w} o{tile.o} {roles} w{tile.warps} s{tile.inner_stages}/{tile.outer_stages} k{tile.split}"


def channels_last(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last_3d)


def compile_on_device(job: tuple[Tile, str]) -> str:
    """In a process of its own: launch on a few voxels, which leaves the compiled kernels in Triton's cache."""
    tile, dtype = job
    x = torch.zeros(1, 4, 4, 8, 64, device="cuda", dtype=getattr(torch, dtype)).movedim(-1, 1)
    residual = torch.zeros(1, 4, 4, 8, tile.o, device="cuda", dtype=x.dtype).movedim(-1, 1)
    packed = torch.zeros(27, tile.o, 64, device="cuda", dtype=x.dtype)
    shift = torch.zeros(1, tile.o, device="cuda", dtype=x.dtype)
    try:
        for epilogue in ((None, None, False), (shift, None, True), (shift, residual, True)):
            kernels.convolve(x, packed, tile, *epilogue)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{label(tile)}: {error!r:.200}"
    return ""


def compile_dry(job: tuple[Tile, str]) -> tuple[str, dict]:
    """Registers, spills and shared memory without a GPU."""
    tile, dtype = job
    signature, constants = kernels.arguments(tile, dtype="bf16" if dtype == "bfloat16" else "fp16")
    try:
        made = compiled(kernels.voxtune_conv3d, signature, constants, arch=90, warps=tile.warps)
    except Exception as error:
        return label(tile), {"error": repr(error)[:200]}
    found = {"registers": made.registers, "spills": made.spills, "shared": made.shared}
    found["waits"] = made.count("wgmma.wait_group")
    return label(tile), {**found, "wgmma": made.count("wgmma.mma_async")}


def measure(function, calls: int, replays: int) -> list[float]:
    """Times in ms of graph replays, so that launch gaps of the host stay out."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    for mark in marks[:-1]:
        mark.record()
        graph.replay()
    marks[-1].record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / calls for a, b in itertools.pairwise(marks)]


class Problem:
    """One shape's inputs: random numbers to time, integers to prove."""

    def __init__(self, shape: Shape, dtype: torch.dtype):
        I, O, D, H, W = self.shape = shape
        torch.manual_seed(0)

        def make(high: int | None, *size: int) -> Tensor:
            x = torch.randn(size, device="cuda") if high is None else torch.randint(-high, high + 1, size, device="cuda")
            x = x.to(dtype)
            return channels_last(x) if x.dim() == 5 and size[2:] != (3, 3, 3) else x

        self.x, self.residual = make(None, 1, I, D, H, W), make(None, 1, O, D, H, W)
        self.weight = (make(None, O, I, 3, 3, 3) / (27 * I) ** 0.5).to(dtype)
        self.shift = make(None, 1, O)
        self.x_whole, self.weight_whole = make(2, 1, I, D, H, W), make(1, O, I, 3, 3, 3)
        self.packed, self.packed_whole = kernels.pack(self.weight), kernels.pack(self.weight_whole)
        # Sums of small integers are exact in float32 whatever the order, so each candidate must give this, bit for bit.
        self.truth_whole = F.conv3d(self.x_whole.float(), self.weight_whole.float(), padding=1).to(dtype)

    def proves(self, tile: Tile) -> bool:
        y, _ = kernels.convolve(self.x_whole, self.packed_whole, tile, torch.zeros_like(self.shift), None, True)
        return torch.equal(y, self.truth_whole)

    def run(self, tile: Tile, shift: bool = True, residual: bool = False, statistics: bool = True):
        terms = (self.shift if shift else None, self.residual if residual else None)
        return kernels.convolve(self.x, self.packed, tile, *terms, statistics)

    def error(self, y: Tensor, shift: bool, residual: bool) -> float:
        """Against float64, in the corner of the volume."""
        edge = 12
        x = self.x[..., : edge + 1, : edge + 1, : edge + 1].double()
        truth = F.conv3d(x, self.weight.double(), padding=1)[..., :edge, :edge, :edge]
        if shift:
            truth = truth + self.shift.double()[..., None, None, None]
        if residual:
            truth = truth + self.residual[..., :edge, :edge, :edge].double()
        return ((y[..., :edge, :edge, :edge].double() - truth).norm() / truth.norm()).item()

    def error_of_statistics(self, tile: Tile) -> float:
        """Of the standard deviation, against float64 over the stored values."""
        y, found = self.run(tile)
        count, mean, m2 = found.double().unbind(2)
        middle = (count * mean).sum(1, keepdim=True) / count.sum(1, keepdim=True)
        spread = (m2 + count * (mean - middle).square()).sum(1) / count.sum(1)
        truth = y.double().flatten(2).var(dim=2, correction=0)
        return ((spread.sqrt() - truth.sqrt()).norm() / truth.sqrt().norm()).item()

    def cudnn(self) -> Tensor:
        return F.conv3d(self.x, self.weight_last, padding=1)

    @property
    def weight_last(self) -> Tensor:
        if not hasattr(self, "_weight_last"):
            self._weight_last = channels_last(self.weight)
        return self._weight_last


def search(problem: Problem, tiles: list[Tile], deadline: float) -> list[tuple[float, Tile]]:
    """(ms, tile) of those that are right, fastest first."""
    timed: list[tuple[float, Tile]] = []
    for tile in tiles:
        if time.monotonic() > deadline:
            break
        try:
            if not problem.proves(tile):
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


def rows_of(problem: Problem, timed: list[tuple[float, Tile]]) -> list[dict]:
    """cuDNN and the best tile, with and without an epilogue, measured with care."""
    # The two fastest again, longer: their order after a few runs is partly noise.
    finals = [(sorted(measure(lambda t=t: problem.run(t), 4, 12))[5], t) for _, t in timed[:3]]
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
        made = row(name, list(problem.shape), times, 0.0, error)
        made["us"] = round(sorted(times)[len(times) // 2] * 1e3, 2)
        made["tflop_s"] = round(flops(problem.shape) / made["us"] / 1e6, 1)
        rows.append({**made, "tile": None if name == "cudnn" else asdict(best)})
    rows[2]["statistics_error"] = float(f"{problem.error_of_statistics(best):.3g}")
    rows[2]["searched"] = [[round(ms * 1e3, 2), label(tile)] for ms, tile in timed[:8]]
    return rows


def line(shape: Shape, rows: list[dict]) -> str:
    cudnn, bare, shifted, full = rows
    I, O, D, H, W = shape
    fields = [f"{I:>3}->{O:<3} {D}x{H}x{W}".ljust(22)]
    fields += [f"{r['us']:8.1f} us {r['tflop_s']:4.0f}" for r in (cudnn, bare, shifted, full)]
    errors = f"{cudnn['error']:.1e} {bare['error']:.1e} {shifted['statistics_error']:.0e}"
    return " | ".join([*fields, label(Tile(**bare["tile"])), errors])


def dry(jobs: list[tuple[Tile, str]], workers: int) -> None:
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for name, found in pool.map(compile_dry, jobs):
            bad = found.get("spills", 1) or found["shared"] > SHARED_LIMIT
            print(f"{'BAD ' if bad else ''}{name}: {json.dumps(found)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--network", choices=NETWORKS, default="whole-head")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--seconds", type=float, default=200, help="stop the search after this long")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--shapes", type=int, default=99, help="only so many, costliest first")
    parser.add_argument("--dry", action="store_true", help="no GPU: compile the candidates for sm_90 and report")
    parser.add_argument("--out", type=Path, default=RESULTS / "h200" / "conv3d.json")
    arguments = parser.parse_args()
    began = time.monotonic()
    deadline = began + arguments.seconds
    shapes = dict(list(shapes_of(arguments.network).items())[: arguments.shapes])
    tried = {shape: candidates(shape) for shape in shapes}
    # The number of splits is no constant of the kernel, only whether there are any.
    distinct = dict.fromkeys(replace(t, split=min(t.split, 2)) for found in tried.values() for t in found)
    jobs = [(tile, arguments.dtype) for tile in distinct]
    print(f"{len(shapes)} shapes, {len(jobs)} kernels", flush=True)
    if arguments.dry:
        dry(jobs, arguments.workers)
        return
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(compile_on_device, job) for job in jobs]):
            if done.result():
                print(f"  {done.result()}", flush=True)
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False
    rows, lines, table = [], [], []
    for shape, times in shapes.items():
        if time.monotonic() > deadline:
            print(f"out of time before {shape}")
            break
        problem = Problem(shape, getattr(torch, arguments.dtype))
        timed = search(problem, tried[shape], deadline)
        if not timed:
            print(f"nothing right for {shape}")
            continue
        found = rows_of(problem, timed)
        rows += [{**r, "times_in_network": times} for r in found]
        lines.append(line(shape, found))
        print(lines[-1], flush=True)
        table.append(f"    {shape}: {Tile(**found[1]['tile'])},")
        write(arguments.out, rows, network=arguments.network)
    total = {name: sum(r["us"] * r["times_in_network"] for r in rows if r["name"] == name) for name in ("cudnn", "voxtune")}
    print(f"\n{'shape':22} | cuDNN us TFLOP/s | voxtune | +shift+statistics | +residual | tile | errors: cuDNN, ours, statistics")
    print("\n".join(lines))
    print("all 3x3x3 of a forward pass, ms:", {name: round(us / 1e3, 2) for name, us in total.items()})
    print("\nTABLE = {\n" + "\n".join(table) + "\n}")
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()

"""Where a step's time goes, launch by launch, and which tiles do better: for gpu_unet2d_ladder.py.

A launch is timed in its place, in the graph of a whole step: there it finds neither its code nor its weights in the nearest
caches, and a tile that wins ten times in a row alone may lose.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from voxtune.kernels.convnext.launch import Launch
from voxtune.kernels.convnext.tiles import Tile, candidates, cost
from voxtune.ladder.program import Program
from voxtune.ladder.sampling import compile_ahead
from voxtune.workloads.convnext import ConvNeXtUNet

Shape = tuple[int, int, int, int]
MANY = 8  # tiles tried for a shape
REPLAYS = 15


def in_place(launches: list[Launch]) -> tuple[list[float], float]:
    """(us of each launch within a graph of all, the median of several replays; us from the first's start to the last's end)."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as taken:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    events = [
        e for e in taken.events() if e.device_type == torch.autograd.DeviceType.CUDA and e.name.startswith("voxtune")
    ]
    events.sort(key=lambda e: e.time_range.start)
    each = len(launches)
    if len(events) != REPLAYS * each:
        raise RuntimeError(f"the profiler saw {len(events)} of {REPLAYS * each} launches")
    replays = [events[i : i + each] for i in range(0, len(events), each)]
    spans = [r[-1].time_range.end - r[0].time_range.start for r in replays]
    times = [statistics.median(e.time_range.elapsed_us() for e in column) for column in zip(*replays, strict=True)]
    return times, statistics.median(spans)


def told(launch: Launch) -> str:
    c = launch.constants
    names = ("H", "C", "K", "BLOCK_M", "BLOCK_K", "BLOCK_C", "WAYS", "SPLIT", "BLOCK_P", "BLOCK_I", "BLOCK_H")
    return " ".join(f"{k.removeprefix('BLOCK_').lower() if '_' in k else k}{c[k]}" for k in names if k in c)


def slowest(program: Program, count: int = 10) -> None:
    """A step's launches in their place: sums by kernel, and the slowest."""
    launches = list(program.step(program.time_terms([37])[0], None))
    times, span = in_place(launches)
    by: dict[str, float] = {}
    for launch, us in zip(launches, times, strict=True):
        by[launch.name] = by.get(launch.name, 0.0) + us
    print(f"in place: {span:.0f} us a step, {sum(times):.0f} us in {len(launches)} kernels; ", end="")
    print(", ".join(f"{name.removeprefix('voxtune_')} {us:.0f}" for name, us in by.items()), flush=True)
    for launch, us in sorted(zip(launches, times, strict=True), key=lambda pair: -pair[1])[:count]:
        print(f"{us:7.2f} us  {launch.part:24} {launch.name[8:]} {told(launch)} w{launch.warps} p{launch.programs}")


def options(shape: Shape, used: Tile) -> list[Tile]:
    """The tile in use, then the model's best of every kind: the model is what is in question."""
    rows, pixels, depth, channels = shape
    ranked = sorted(
        candidates(rows, pixels, depth, channels, processors=132), key=lambda t: cost(t, rows, depth, channels, 132)
    )
    kinds: list[Callable[[Tile], bool]] = [
        lambda t: t.ways == 1 and t.split == 1,
        lambda t: t.ways == 1 and t.split > 1,
        lambda t: t.ways > 1 and t.split > 1,
        lambda t: t.ways == 2 and t.split == 1,
        lambda t: t.block_m * t.block_k > used.block_m * used.block_k,
    ]
    limit = 1.4 * cost(ranked[0], rows, depth, channels, 132)
    sane = [t for t in ranked if cost(t, rows, depth, channels, 132) < limit]
    found = [used, replace(used, warps=2 * used.warps), replace(used, near=not used.near)]
    found += [best for kind in kinds if (best := next(filter(kind, sane), None)) is not None]
    return list(dict.fromkeys([*found, *ranked]))[:MANY]


def search(net: ConvNeXtUNet, size: tuple[int, int], batch: int, least: float, seconds: float) -> dict[str, Any]:
    """For every convolution that takes `least` us or more, other tiles; a program of all first ones, of all second ones, ..."""
    began = time.monotonic()
    base = Program(net, size, batch)

    def timed(tiles: dict[Shape, Tile]) -> tuple[dict[Shape, float], float]:
        program = Program(net, size, batch, tiles=lambda *shape: tiles.get(shape) or base.tiles(*shape))
        launches = list(program.step(program.time_terms([37])[0], None))
        compile_ahead(launches)
        times, span = in_place(launches)
        convolutions = (us for launch, us in zip(launches, times, strict=True) if launch.name == "voxtune_conv")
        found: dict[Shape, list[float]] = {}
        for shape, us in zip(program.tile_requests, convolutions, strict=True):
            found.setdefault(shape, []).append(us)
        return {shape: statistics.mean(of) for shape, of in found.items()}, span

    used, before = timed({})
    best = {shape: (us, base.tiles(*shape)) for shape, us in used.items()}
    tried = {shape: options(shape, base.tiles(*shape)) for shape, us in used.items() if us >= least}
    print(f"batch {batch}: {before:.0f} us a step; {len(tried)} of {len(used)} shapes to be tried", flush=True)
    for number in range(1, MANY):
        if time.monotonic() - began > seconds:
            print(f"out of time after {number} tiles a shape")
            break
        turn = {shape: tiles[number] for shape, tiles in tried.items() if number < len(tiles)}
        try:
            times, _ = timed(turn)
        except Exception as error:
            print(f"tiles {number}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        for shape, tile in turn.items():
            best[shape] = min(best[shape], (times[shape], tile), key=lambda pair: pair[0])
    for shape in tried:
        us, tile = best[shape]
        print(f"{shape}: in use {used[shape]:.2f} us, best {us:.2f} us, {tile}")
    better = {shape: best[shape] for shape in tried if best[shape][0] < 0.98 * used[shape]}
    print("MEASURED = {")
    for shape, (_, tile) in better.items():
        print(f"    {shape}: {tile},")
    print("}")
    _, after = timed({shape: tile for shape, (_, tile) in better.items()})
    print(f"batch {batch}: {before:.0f} us a step before, {after:.0f} us with these; {time.monotonic() - began:.0f} s")
    return {
        str(shape): {"used_us": round(used[shape], 3), "us": round(best[shape][0], 3), **vars(best[shape][1])}
        for shape in tried
    }

"""Times every launch of a step and searches for faster tiles, for gpu_unet2d_ladder.py.

Each launch is timed within the CUDA graph of a whole step, where neither its code nor its weights are in the nearest caches. A
tile that is faster when launched repeatedly may be slower there.
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
TILES_PER_SHAPE = 8
REPLAYS = 15


def in_place(launches: list[Launch]) -> tuple[list[float], float]:
    """(us of each launch in a graph of all launches, us from the first start to the last end): medians of several replays."""
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
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    events = [
        e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA and e.name.startswith("voxtune")
    ]
    events.sort(key=lambda e: e.time_range.start)
    each = len(launches)
    if len(events) != REPLAYS * each:
        raise RuntimeError(f"the profiler recorded {len(events)} of {REPLAYS * each} launches")
    replays = [events[i : i + each] for i in range(0, len(events), each)]
    spans = [r[-1].time_range.end - r[0].time_range.start for r in replays]
    times = [statistics.median(e.time_range.elapsed_us() for e in column) for column in zip(*replays, strict=True)]
    return times, statistics.median(spans)


def describe(launch: Launch) -> str:
    c = launch.constants
    names = ("H", "C", "K", "BLOCK_M", "BLOCK_K", "BLOCK_C", "WAYS", "SPLIT", "BLOCK_P", "BLOCK_I", "BLOCK_H")
    return " ".join(f"{k.removeprefix('BLOCK_').lower() if '_' in k else k}{c[k]}" for k in names if k in c)


def slowest(program: Program, count: int = 10) -> None:
    """Prints the time per kernel of the launches of a step, and the slowest launches."""
    launches = list(program.step(program.time_terms([37])[0], None))
    times, span = in_place(launches)
    totals: dict[str, float] = {}
    for launch, us in zip(launches, times, strict=True):
        totals[launch.name] = totals.get(launch.name, 0.0) + us
    print(f"in the graph: {span:.0f} us per step, {sum(times):.0f} us in {len(launches)} kernels; ", end="")
    print(", ".join(f"{name.removeprefix('voxtune_')} {us:.0f}" for name, us in totals.items()), flush=True)
    for launch, us in sorted(zip(launches, times, strict=True), key=lambda pair: -pair[1])[:count]:
        print(f"{us:7.2f} us  {launch.part:24} {launch.name[8:]} {describe(launch)} w{launch.warps} p{launch.programs}")


def tiles_to_try(shape: Shape, current: Tile) -> list[Tile]:
    """The current tile and the best of every kind by the cost model, since the model itself is to be checked."""
    rows, pixels, depth, channels = shape
    ranked = sorted(
        candidates(rows, pixels, depth, channels, processors=132), key=lambda t: cost(t, rows, depth, channels, 132)
    )
    kinds: list[Callable[[Tile], bool]] = [
        lambda t: t.ways == 1 and t.split == 1,
        lambda t: t.ways == 1 and t.split > 1,
        lambda t: t.ways > 1 and t.split > 1,
        lambda t: t.ways == 2 and t.split == 1,
        lambda t: t.block_m * t.block_k > current.block_m * current.block_k,
    ]
    limit = 1.4 * cost(ranked[0], rows, depth, channels, 132)
    plausible = [t for t in ranked if cost(t, rows, depth, channels, 132) < limit]
    tiles = [current, replace(current, warps=2 * current.warps), replace(current, near=not current.near)]
    tiles += [best for kind in kinds if (best := next(filter(kind, plausible), None)) is not None]
    return list(dict.fromkeys([*tiles, *ranked]))[:TILES_PER_SHAPE]


def search(net: ConvNeXtUNet, size: tuple[int, int], batch: int, least: float, seconds: float) -> dict[str, Any]:
    """Tries other tiles for every convolution of at least `least` us: one program with the first tile of each, and so on."""
    start = time.monotonic()
    base = Program(net, size, batch)

    def timed(tiles: dict[Shape, Tile]) -> tuple[dict[Shape, float], float]:
        program = Program(net, size, batch, tiles=lambda *shape: tiles.get(shape) or base.tiles(*shape))
        launches = list(program.step(program.time_terms([37])[0], None))
        compile_ahead(launches)
        times, span = in_place(launches)
        convolutions = (us for launch, us in zip(launches, times, strict=True) if launch.name == "voxtune_conv")
        by_shape: dict[Shape, list[float]] = {}
        for shape, us in zip(program.tile_requests, convolutions, strict=True):
            by_shape.setdefault(shape, []).append(us)
        return {shape: statistics.mean(values) for shape, values in by_shape.items()}, span

    current, before = timed({})
    best = {shape: (us, base.tiles(*shape)) for shape, us in current.items()}
    trials = {shape: tiles_to_try(shape, base.tiles(*shape)) for shape, us in current.items() if us >= least}
    print(
        f"batch {batch}: {before:.0f} us per step; searching tiles for {len(trials)} of {len(current)} shapes",
        flush=True,
    )
    for number in range(1, TILES_PER_SHAPE):
        if time.monotonic() - start > seconds:
            print(f"time limit reached after {number} tiles per shape")
            break
        selected = {shape: tiles[number] for shape, tiles in trials.items() if number < len(tiles)}
        try:
            times, _ = timed(selected)
        except Exception as error:
            print(f"tiles {number}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        for shape, tile in selected.items():
            best[shape] = min(best[shape], (times[shape], tile), key=lambda pair: pair[0])
    for shape in trials:
        us, tile = best[shape]
        print(f"{shape}: current {current[shape]:.2f} us, best {us:.2f} us, {tile}")
    better = {shape: best[shape] for shape in trials if best[shape][0] < 0.98 * current[shape]}
    print("MEASURED = {")
    for shape, (_, tile) in better.items():
        print(f"    {shape}: {tile},")
    print("}")
    _, after = timed({shape: tile for shape, (_, tile) in better.items()})
    print(
        f"batch {batch}: {before:.0f} us per step before, {after:.0f} us with these; {time.monotonic() - start:.0f} s"
    )
    return {
        str(shape): {"used_us": round(current[shape], 3), "us": round(best[shape][0], 3), **vars(best[shape][1])}
        for shape in trials
    }

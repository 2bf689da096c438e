"""The 2D ConvNeXt U-Net at 64 x 64 on a GPU: the ladder's top beside PyTorch's own ways, all in one run.

`--part top` checks the fast path against float64, times 100 DDPM steps as one graph (with and without overlapped launches),
lists its kernels, and times eager and torch.compile. `--part rungs` climbs the ladder. `--part launches` says what a launch and
a barrier cost on this card. `--part tiles` measures tiles for every convolution of a step and prints those that beat the ones
in use.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from results_file import RESULTS, measure, row, write
from torch import Tensor

from voxtune.diffusion import DiffusionConfig, make_schedule, spaced_steps
from voxtune.diffusion.noise import noise_source
from voxtune.diffusion.samplers import ddpm
from voxtune.kernels.convnext.barrier import voxtune_barriers
from voxtune.kernels.convnext.launch import Launch
from voxtune.kernels.convnext.tiles import Tile, cost
from voxtune.ladder.ahead import compile_ahead
from voxtune.ladder.climb import climb
from voxtune.ladder.program import Program
from voxtune.ladder.resident import WHOLE
from voxtune.ladder.rungs import Setting, rungs_of
from voxtune.ladder.sampling import Loop, denoise
from voxtune.ladder.seeds import all_figures
from voxtune.precision import tf32_allowed
from voxtune.workloads import ConvNeXtConfig
from voxtune.workloads.convnext import ConvNeXtUNet

SIZE = (64, 64)
STEPS = 100


def network() -> ConvNeXtUNet:
    torch.manual_seed(0)
    return ConvNeXtUNet(ConvNeXtConfig()).eval().cuda()


def schedule() -> Any:
    return make_schedule(DiffusionConfig(schedule="linear", steps=STEPS))


def truth(net: ConvNeXtUNet, x: Tensor, t: int) -> Tensor:
    """In float64, of the first few samples: a sample's result does not depend on the others."""
    wide = copy.deepcopy(net).double()
    x = x[:4].double()
    with tf32_allowed(False), torch.no_grad():
        return wide(x, torch.full((x.shape[0],), t, device=x.device))


def relative(y: Tensor, want: Tensor) -> float:
    return float((y[: len(want)].double() - want).norm() / want.norm())


def timed(run: Callable[[], Any], repeats: int = 20) -> list[float]:
    run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize()
    for mark in marks[:-1]:
        mark.record()
        run()
    marks[-1].record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


def loop_of(step: Callable[[Tensor, Tensor], Tensor], x: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
    """100 DDPM steps around a network call, as diffusion/samplers.py has them, with noise made on the device."""
    from voxtune.kernels.noise import noise_source as on_device

    times, noises = spaced_steps(STEPS, STEPS), on_device(0, range(x.shape[0]), x.shape[1:], x.device)
    return lambda: ddpm(lambda a, t: step(a.to(dtype), t).float().clone(), x, schedule(), times, noise=noises)


def check(batch: int, net: ConvNeXtUNet, whole: int, chained: bool) -> tuple[Program, float]:
    """A program whose one step was compared with float64."""
    began = time.monotonic()
    program = Program(net, SIZE, batch, whole=whole)
    made = compile_ahead(
        [one for plain in program.launches for one in ((plain, plain.chained()) if chained else (plain,))]
    )
    x = torch.randn(batch, 3, *SIZE, device="cuda")
    program.eps.fill_(float("nan"))
    error = relative(denoise(program, x, 37), truth(net, x, 37))
    again = relative(denoise(program, x, 37), truth(net, x, 37))
    print(
        f"batch {batch}: {len(program.launches)} launches a step, {made} kernels ready in {time.monotonic() - began:.1f} s; "
        f"error {error:.2e}, again {again:.2e}",
        flush=True,
    )
    return program, error


def same_image(loop: Loop, net: ConvNeXtUNet) -> float:
    """The drawn image beside float32's own, under the same noise."""
    x = loop.sample(7)
    noises = noise_source(7, range(x.shape[0]), x.shape[1:], x.device)
    with tf32_allowed(False), torch.no_grad():
        want = ddpm(net, noises(0), schedule(), spaced_steps(STEPS, STEPS), noise=noises)
    return relative(x, want.double())


# Blocks of at most so many pixels as one kernel; whether a launch starts before its predecessor has ended.
VARIANTS = ((0, False), (0, True), (64, True), (256, False), (256, True))


def ours(net: ConvNeXtUNet, batch: int) -> list[dict[str, Any]]:
    rows = []
    for whole, chained in VARIANTS if batch == 1 else VARIANTS[:2]:
        name = f"voxtune_graph_whole{whole}{'_overlapped' if chained else ''}_batch{batch}"
        try:
            program, error = check(batch, net, whole, chained)
            began = time.monotonic()
            loop = Loop(program, schedule(), spaced_steps(STEPS, STEPS), chained=chained)
            ready = time.monotonic() - began
            times = timed(lambda loop=loop: loop.graph.replay())  # type: ignore[misc]
            drawn = same_image(loop, net)
        except Exception as problem:
            print(f"{name}: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
            continue
        made = row(name, [batch, 3, *SIZE], times, torch.cuda.max_memory_allocated() / 2**30, error)
        rows.append(made | {"steps": STEPS, "image_error": float(f"{drawn:.3g}"), "launches": len(program.launches)})
        print(
            f"{name}: {made['p50_ms']:.2f} ms for {STEPS} steps, image {drawn:.2e}, recorded in {ready:.1f} s",
            flush=True,
        )
    for whole in (0, 256) if batch == 1 else (0,):
        program = Program(net, SIZE, batch, whole=whole)
        breakdown(program)
        for chained in (False, True):
            profiled(program, chained)
    return rows


def breakdown(program: Program) -> None:
    """Each launch of a step alone, ten in a row in a graph, so that its own time and a launch's cost are seen."""
    terms = program.time_terms([37])[0]
    found: dict[tuple[str, str], list[float]] = {}
    total = 0.0
    for launch in program.step(terms, None):
        ms = sorted(measure(lambda launch=launch: [launch() for _ in range(10)], calls=1, replays=5))[2] / 10  # type: ignore[misc]
        c = launch.constants
        shape = " ".join(
            f"{k}{c[k]}" for k in ("H", "C", "K", "BLOCK_M", "BLOCK_K", "BLOCK_C", "SPLIT", "BLOCK_P") if k in c
        )
        found.setdefault((launch.name, f"{shape} w{launch.warps} p{launch.programs}"), []).append(ms * 1e3)
        total += ms * 1e3
    print(f"each launch alone, ten in a row: {total:.0f} us a step; by kernel and shape:")
    for (name, shape), times in sorted(found.items(), key=lambda item: -sum(item[1])):
        print(f"{sum(times):8.2f} us {len(times):3d} x {sum(times) / len(times):6.2f}  {name} {shape}")
    by_kernel: dict[str, float] = {}
    for (name, _), times in found.items():
        by_kernel[name] = by_kernel.get(name, 0.0) + sum(times)
    print(", ".join(f"{name} {us:.0f} us" for name, us in by_kernel.items()), flush=True)


def profiled(program: Program, chained: bool) -> None:
    """One step in a graph under the profiler: each launch's own time, and the gaps between them."""
    launches = list(program.step(program.time_terms([37])[0], None, chained=chained))
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
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as taken:
        graph.replay()
        torch.cuda.synchronize()
    events = [
        e for e in taken.events() if e.device_type == torch.autograd.DeviceType.CUDA and e.name.startswith("voxtune")
    ]
    events.sort(key=lambda e: e.time_range.start)
    if len(events) != len(launches):
        print(f"the profiler saw {len(events)} of {len(launches)} launches")
        return
    busy = sum(e.time_range.elapsed_us() for e in events)
    span = events[-1].time_range.end - events[0].time_range.start
    gaps = sorted(b.time_range.start - a.time_range.end for a, b in itertools.pairwise(events))
    told = f"{span:.0f} us from first to last, {busy:.0f} us in kernels, median gap {gaps[len(gaps) // 2]:.2f} us"
    print(f"profiled, overlapped {chained}: {told}")
    ranked = sorted(zip(events, launches, strict=True), key=lambda pair: -pair[0].time_range.elapsed_us())
    for event, launch in ranked[:30]:
        print(f"{event.time_range.elapsed_us():7.2f} us  {launch.name:20} {launch.part:24} {launch.programs} programs")


@torch.no_grad()
def theirs(net: ConvNeXtUNet, batch: int, which: list[str]) -> list[dict[str, Any]]:
    x = torch.randn(batch, 3, *SIZE, device="cuda")
    want = truth(net, x, 37)
    t = torch.full((batch,), 37, device="cuda")
    rows = []
    for name in which:
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        dtype = torch.bfloat16 if "bf16" in name else torch.float32
        step: Any = copy.deepcopy(net).to(dtype)
        if "bf16" in name:
            step = step.to(memory_format=torch.channels_last)
        began = time.monotonic()
        if "compile" in name:
            step = torch.compile(step, mode="reduce-overhead" if "reduce" in name else None, dynamic=False)
        with tf32_allowed("tf32" in name):
            error = relative(step(x.to(dtype), t).clone(), want)
            # The network alone, without update and noise: to their favour. With both, beside it.
            own, calls = x.to(dtype), STEPS if batch == 1 else 5
            times = [ms * STEPS / calls for ms in timed(lambda: [step(own, t) for _ in range(calls)], 7)]  # noqa: B023
            whole = timed(loop_of(step, x, dtype), 3)[1] if batch == 1 else None
        made = row(f"{name}_batch{batch}", [batch, 3, *SIZE], times, torch.cuda.max_memory_allocated() / 2**30, error)
        rows.append(made | {"steps": STEPS, "with_update_ms": whole, "first_s": round(time.monotonic() - began, 1)})
        print(
            f"{made['name']}: {made['p50_ms']:.1f} ms for {STEPS} steps, with update and noise {whole}, error {error:.1e}",
            flush=True,
        )
    return rows


def top(batches: list[int]) -> list[dict[str, Any]]:
    net = network()
    rows = []
    for batch in batches:
        rows += ours(net, batch)
    rows += theirs(net, 1, ["eager_fp32", "eager_bf16", "compile_reduce_overhead_fp32", "compile_reduce_overhead_bf16"])
    if 64 in batches:
        rows += theirs(net, 64, ["compile_bf16"])
    return rows


def rungs(text: str | None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Every rung at full size, with its tables."""
    net = network()
    wanted = Setting(network=net, size=SIZE, schedule=schedule(), timesteps=spaced_steps(STEPS, STEPS))
    program = Program(net, SIZE, 1, whole=WHOLE)
    compile_ahead([*program.launches, *Program(net, SIZE, 1).launches])
    found = climb(wanted, rungs_of(text), say=lambda line: print(line, flush=True)) | {"seeds": all_figures()}
    rows = []
    for one in found["rows"]:
        peak = torch.cuda.max_memory_allocated() / 2**30
        made = row(
            f"rung_{one['number']:02d}_{one['name'].replace(' ', '_')}",
            [1, 3, *SIZE],
            one["totals_ms"],
            peak,
            one["error"],
        )
        rows.append(made | {k: one[k] for k in ("launches", "transfers", "measured_steps")} | {"steps": STEPS})
    return rows, found


def launches_cost() -> None:
    """A chain of small dependent launches, in a graph: with the host's gaps out, what is left is the card's own."""
    net = network()
    program = Program(net, SIZE, 1)
    small = [one for one in program.launches if one.name == "voxtune_gate"][-1]
    for label, one in (("plain", small), ("overlapped", small.chained())):
        ms = sorted(measure(lambda one=one: [one() for _ in range(100)], calls=1, replays=9))[4]  # type: ignore[misc]
        print(f"a gate at 64 x 64, 100 in a row, {label}: {ms * 10:.2f} us each")
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    for programs in (128, 64, 32):
        times = {}
        for rounds in (1, 101):
            call = lambda: voxtune_barriers[(programs,)](counter, ROUNDS=rounds, PROGRAMS=programs)  # noqa: B023, E731
            times[rounds] = sorted(measure(call, calls=1, replays=9))[4]
        print(
            f"a barrier of {programs} programs: {(times[101] - times[1]) * 10:.2f} us; one launch {times[1] * 1e3:.2f} us"
        )


MANY = 20
SHAPES = [
    (128, 128),
    (128, 64),
    (128, 32),
    (64, 64),
    (64, 32),
    (64, 16),
    (32, 64),
    (32, 32),
    (32, 16),
    (16, 32),
    (16, 16),
]


def candidates(rows: int, pixels: int, depth: int, channels: int) -> list[Tile]:
    found = []
    for (m, k), c, split in itertools.product(SHAPES, (32, 64, 128), (1, 2, 4, 8, 16)):
        tiles = rows // m * -(-channels // k)
        chunks = -(-depth // c)
        if (
            pixels % m
            or k > max(16, channels)
            or split > chunks
            or not 24 <= tiles * split <= max(300, 16 * rows // 64)
        ):
            continue
        if (m + k) * c * 2 * 4 > 200_000 or (tiles * split > 40 and split > 1 and tiles > 200):
            continue
        stages = 5 if (m + k) * c * 2 * 5 < 120_000 and chunks // split >= 5 else 4 if chunks // split >= 4 else 3
        each = -(-chunks // split)
        for warps in (4, 8) if m * k >= 64 * 64 else (2, 4) if m * k <= 512 else (4,):
            found.append(Tile(block_m=m, block_k=k, block_c=c, split=-(-chunks // each), warps=warps, stages=stages))
    ranked = sorted(dict.fromkeys(found), key=lambda tile: cost(tile, rows, depth, channels, 132))
    # Half of the best by the model, and every few of the rest: the model is what is in question.
    return [*ranked[: MANY // 2], *ranked[MANY // 2 :: max(1, len(ranked) // (MANY // 2))]][:MANY]


def tiles(batch: int, budget_s: float) -> dict[str, Any]:
    """For every convolution's shape, its product (and join) chained ten times in a graph, over the candidates."""
    net = network()
    asked: dict[tuple[int, int, int, int], None] = {}
    base = Program(net, SIZE, batch)

    def note(*shape: int) -> Tile:
        asked[shape] = None  # type: ignore[index]
        return base.tiles(*shape)

    Program(net, SIZE, batch, tiles=note)
    options = {shape: [base.tiles(*shape), *candidates(*shape)] for shape in asked}
    most = max(len(o) for o in options.values())
    print(f"{len(options)} shapes, {sum(len(o) for o in options.values())} tiles", flush=True)
    best: dict[tuple[int, ...], tuple[float, Tile, bool]] = {}
    began = time.monotonic()
    chosen: dict[tuple[int, ...], list[Launch]] = {}
    everything: list[Launch] = []
    for number in range(most):
        turn = {shape: o[min(number, len(o) - 1)] for shape, o in options.items()}
        program = Program(net, SIZE, batch, tiles=lambda *s, turn=turn: turn[s])
        order = iter(program.asked)
        groups: dict[str, list[Launch]] = {}
        for launch in program.launches:
            if launch.name in ("voxtune_conv", "voxtune_join"):
                groups.setdefault(launch.part, []).append(launch)
        for shape, group in zip(order, groups.values(), strict=True):
            # One convolution stands for all of its shape.
            if number < len(options[shape]) and (*shape, number) not in chosen:
                chosen[*shape, number] = group
                everything += group
    compile_ahead(everything)
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    for (*shape, number), group in chosen.items():
        if time.monotonic() - began > budget_s:
            print("out of time")
            break
        tile = options[tuple(shape)][number]  # type: ignore[index]
        try:
            times = measure(lambda group=group: [one() for _ in range(10) for one in group], calls=1, replays=5)  # type: ignore[misc]
        except Exception as error:
            print(f"{shape} {tile}: {type(error).__name__}: {str(error)[:100]}")
            continue
        us = sorted(times)[2] * 1e2
        if number == 0:
            print(f"{shape}: in use {tile}: {us:.2f} us", flush=True)
        if tuple(shape) not in best or us < best[tuple(shape)][0]:
            best[tuple(shape)] = (us, tile, number == 0)
    for shape, (us, tile, used) in best.items():
        print(f"    {shape}: {tile},  # {us:.2f} us{' in use' if used else ''}")
    return {str(shape): {"us": round(us, 3), **vars(tile)} for shape, (us, tile, _) in best.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", default="top", help="top, rungs, launches, tiles; several by comma")
    parser.add_argument("--batch", default="1,64")
    parser.add_argument("--rungs", help="only these, such as 1,4,8-10")
    parser.add_argument("--seconds", type=float, default=240, help="for the search of tiles")
    parser.add_argument("-o", "--out", type=Path, default=RESULTS / "h200" / "unet2d_ladder.json")
    asked = parser.parse_args()
    batches = [int(b) for b in asked.batch.split(",")]
    rows: list[dict[str, Any]] = []
    more: dict[str, Any] = {}
    for part in asked.part.split(","):
        if part == "top":
            rows += top(batches)
        elif part == "rungs":
            more_rows, more["ladder"] = rungs(asked.rungs)
            rows += more_rows
        elif part == "launches":
            launches_cost()
        elif part == "tiles":
            more["tiles"] = {str(b): tiles(b, asked.seconds) for b in batches}
        write(asked.out, rows, **more)
    print(json.dumps({r["name"]: r["p50_ms"] for r in rows}))


if __name__ == "__main__":
    main()

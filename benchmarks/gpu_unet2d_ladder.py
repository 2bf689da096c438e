"""The 2D ConvNeXt U-Net at 64 x 64 on a GPU: the ladder's top beside PyTorch's own ways, all in one run.

`--part top` checks the fast path against float64, times 100 DDPM steps as one graph, lists its slowest kernels, and times eager
and torch.compile; `--overlapped` adds launches that start before their predecessors have ended. `--part rungs` climbs the
ladder. `--part launches` says what a launch and a barrier cost on this card. `--part tiles` tries tiles for the longer
convolutions of a step, and prints those that beat the ones in use.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ladder_tiles import search, slowest
from results_file import RESULTS, measure, row, timed, write
from torch import Tensor

from voxtune.diffusion import DiffusionConfig, make_schedule, spaced_steps
from voxtune.diffusion.noise import noise_source
from voxtune.diffusion.samplers import ddpm
from voxtune.kernels.compile_workers import compiling
from voxtune.kernels.convnext.block import voxtune_barriers
from voxtune.ladder.climb import climb
from voxtune.ladder.program import Program
from voxtune.ladder.published_results import published_results
from voxtune.ladder.rungs import Setting, rungs_of
from voxtune.ladder.sampling import Loop, compile_ahead, denoise
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
VARIANTS = ((0, False), (256, False))
OVERLAPPED = ((0, True), (256, True))


def ours(net: ConvNeXtUNet, batch: int, *, overlapped: bool) -> list[dict[str, Any]]:
    rows = []
    wanted = (*VARIANTS, *(OVERLAPPED if overlapped else ())) if batch == 1 else VARIANTS[:1]
    for whole, chained in wanted:
        name = f"voxtune_graph_whole{whole}{'_overlapped' if chained else ''}_batch{batch}"
        try:
            program, error = check(batch, net, whole, chained)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            began = time.monotonic()
            loop = Loop(program, schedule(), spaced_steps(STEPS, STEPS), chained=chained)
            ready = time.monotonic() - began
            times = timed(lambda loop=loop: loop.graph.replay(), 20)  # type: ignore[misc]
            peak = torch.cuda.max_memory_allocated() / 2**30
            drawn = same_image(loop, net)
        except Exception as problem:
            print(f"{name}: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
            continue
        made = row(name, [batch, 3, *SIZE], times, peak, error)
        rows.append(made | {"steps": STEPS, "image_error": float(f"{drawn:.3g}"), "launches": len(program.launches)})
        print(
            f"{name}: {made['p50_ms']:.2f} ms for {STEPS} steps, image {drawn:.2e}, recorded in {ready:.1f} s",
            flush=True,
        )
    slowest(Program(net, SIZE, batch))
    return rows


@torch.no_grad()
def theirs(net: ConvNeXtUNet, batch: int, which: list[str]) -> list[dict[str, Any]]:
    torch.backends.cudnn.benchmark = True  # as someone would who cares for speed
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
            times = [ms * STEPS / calls for ms in timed(lambda: [step(own, t) for _ in range(calls)], 3)]  # noqa: B023
            whole = statistics.median(timed(loop_of(step, x, dtype), 5)) if batch == 1 else None
        made = row(f"{name}_batch{batch}", [batch, 3, *SIZE], times, torch.cuda.max_memory_allocated() / 2**30, error)
        rows.append(made | {"steps": STEPS, "with_update_ms": whole, "first_s": round(time.monotonic() - began, 1)})
        print(
            f"{made['name']}: {made['p50_ms']:.1f} ms for {STEPS} steps, with update and noise {whole}, error {error:.1e}",
            flush=True,
        )
    return rows


def top(batches: list[int], *, overlapped: bool) -> list[dict[str, Any]]:
    net = network()
    rows = []
    with compiling():
        for batch in batches:
            rows += ours(net, batch, overlapped=overlapped)
    rows += theirs(net, 1, ["eager_fp32", "eager_bf16", "compile_reduce_overhead_fp32", "compile_reduce_overhead_bf16"])
    if 64 in batches:
        rows += theirs(net, 64, ["compile_bf16", "compile_reduce_overhead_bf16"])
    return rows


def rungs(text: str | None, keep: Callable[[list[dict[str, Any]], dict[str, Any]], None]) -> list[dict[str, Any]]:
    """Every rung at full size; `keep` is given rows and tables after each."""
    net = network()
    wanted = Setting(network=net, size=SIZE, schedule=schedule(), timesteps=spaced_steps(STEPS, STEPS))
    seeds = {"seeds": published_results()}
    found = climb(
        wanted,
        rungs_of(text),
        report=lambda line: print(line, flush=True),
        save=lambda so_far: keep([rung_row(one) for one in so_far["rows"]], seeds | so_far),
    )
    return [rung_row(one) for one in found["rows"]]


def rung_row(one: dict[str, Any]) -> dict[str, Any]:
    name = f"rung_{one['number']:02d}_{one['name'].replace(' ', '_')}"
    made = row(name, [1, 3, *SIZE], one["totals_ms"], one["peak_gib"], one["error"])
    return made | {k: one[k] for k in ("launches", "transfers", "measured_steps", "alone_ms")} | {"steps": STEPS}


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", default="top", help="top, rungs, launches, tiles; several by comma")
    parser.add_argument("--batch", default="1,64")
    parser.add_argument("--rungs", help="only these, such as 1,4,8-10")
    parser.add_argument("--overlapped", action="store_true", help="also with launches that start early")
    parser.add_argument("--seconds", type=float, default=120, help="for the search of tiles")
    parser.add_argument("--least", type=float, default=4.0, help="us of a convolution whose tiles are searched")
    parser.add_argument("-o", "--out", type=Path, default=RESULTS / "h200" / "unet2d_ladder.json")
    asked = parser.parse_args()
    batches = [int(b) for b in asked.batch.split(",")]
    rows: list[dict[str, Any]] = []
    more: dict[str, Any] = {}

    def keep(climbed: list[dict[str, Any]], tables: dict[str, Any]) -> None:
        more["ladder"] = tables
        write(asked.out, rows + climbed, **more)

    for part in asked.part.split(","):
        if part == "top":
            rows += top(batches, overlapped=asked.overlapped)
        elif part == "rungs":
            rows += rungs(asked.rungs, keep)
        elif part == "launches":
            launches_cost()
        elif part == "tiles":
            net = network()
            more["tiles"] = {str(b): search(net, SIZE, b, asked.least, asked.seconds) for b in batches}
        write(asked.out, rows, **more)
    print(json.dumps({r["name"]: r["p50_ms"] for r in rows}))


if __name__ == "__main__":
    main()

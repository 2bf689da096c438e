"""The 2D ConvNeXt U-Net at 64 x 64 on a GPU: the fastest rung of the ladder compared with eager PyTorch and torch.compile.

`--part top` checks the CUDA graph rung against float64, times 100 DDPM steps as one graph, lists the slowest kernels, and times
eager and torch.compile; `--overlapped` adds launches that start before their predecessors have ended. `--part rungs` runs all
rungs. `--part launches` measures the cost of a launch and of a grid-wide barrier. `--part tiles` times other tiles for the longer
convolutions of a step and prints those that are faster than the current ones.
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
    """Reference in float64 for the first four samples; the result of a sample does not depend on the others."""
    wide = copy.deepcopy(net).double()
    x = x[:4].double()
    with tf32_allowed(False), torch.no_grad():
        return wide(x, torch.full((x.shape[0],), t, device=x.device))


def relative_error(y: Tensor, expected: Tensor) -> float:
    return float((y[: len(expected)].double() - expected).norm() / expected.norm())


def loop_of(step: Callable[[Tensor, Tensor], Tensor], x: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
    """100 DDPM steps with diffusion/samplers.py around a network call; the noise is generated on the device."""
    from voxtune.kernels.noise import noise_source as device_noise

    times, noises = spaced_steps(STEPS, STEPS), device_noise(0, range(x.shape[0]), x.shape[1:], x.device)
    return lambda: ddpm(lambda a, t: step(a.to(dtype), t).float().clone(), x, schedule(), times, noise=noises)


def check(batch: int, net: ConvNeXtUNet, whole: int, chained: bool) -> tuple[Program, float]:
    """A program, and its error in one step against float64."""
    start = time.monotonic()
    program = Program(net, SIZE, batch, whole=whole)
    kernels = compile_ahead(
        [form for launch in program.launches for form in ((launch, launch.chained()) if chained else (launch,))]
    )
    x = torch.randn(batch, 3, *SIZE, device="cuda")
    program.eps.fill_(float("nan"))
    error = relative_error(denoise(program, x, 37), truth(net, x, 37))
    repeated = relative_error(denoise(program, x, 37), truth(net, x, 37))
    print(
        f"batch {batch}: {len(program.launches)} launches per step, {kernels} kernels compiled in "
        f"{time.monotonic() - start:.1f} s; error {error:.2e}, repeated {repeated:.2e}",
        flush=True,
    )
    return program, error


def image_error(loop: Loop, net: ConvNeXtUNet) -> float:
    """Relative error of the sampled image against float32 with the same noise."""
    x = loop.sample(7)
    noises = noise_source(7, range(x.shape[0]), x.shape[1:], x.device)
    with tf32_allowed(False), torch.no_grad():
        expected = ddpm(net, noises(0), schedule(), spaced_steps(STEPS, STEPS), noise=noises)
    return relative_error(x, expected.double())


# (maximum pixels of a block that runs as one kernel, whether a launch starts before its predecessor has ended)
VARIANTS = ((0, False), (256, False))
OVERLAPPED = ((0, True), (256, True))


def voxtune_rows(net: ConvNeXtUNet, batch: int, *, overlapped: bool) -> list[dict[str, Any]]:
    rows = []
    variants = (*VARIANTS, *(OVERLAPPED if overlapped else ())) if batch == 1 else VARIANTS[:1]
    for whole, chained in variants:
        name = f"voxtune_graph_whole{whole}{'_overlapped' if chained else ''}_batch{batch}"
        try:
            program, error = check(batch, net, whole, chained)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            start = time.monotonic()
            loop = Loop(program, schedule(), spaced_steps(STEPS, STEPS), chained=chained)
            recording_s = time.monotonic() - start
            times = timed(lambda loop=loop: loop.graph.replay(), 20)  # type: ignore[misc]
            peak = torch.cuda.max_memory_allocated() / 2**30
            sampled_error = image_error(loop, net)
        except Exception as problem:
            print(f"{name}: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
            continue
        entry = row(name, [batch, 3, *SIZE], times, peak, error)
        details = {"image_error": float(f"{sampled_error:.3g}"), "launches": len(program.launches)}
        rows.append(entry | {"steps": STEPS} | details)
        print(
            f"{name}: {entry['p50_ms']:.2f} ms for {STEPS} steps, image error {sampled_error:.2e}, "
            f"recorded in {recording_s:.1f} s",
            flush=True,
        )
    slowest(Program(net, SIZE, batch))
    return rows


@torch.no_grad()
def pytorch_rows(net: ConvNeXtUNet, batch: int, names: list[str]) -> list[dict[str, Any]]:
    torch.backends.cudnn.benchmark = True  # the fastest setting for PyTorch
    x = torch.randn(batch, 3, *SIZE, device="cuda")
    expected = truth(net, x, 37)
    t = torch.full((batch,), 37, device="cuda")
    rows = []
    for name in names:
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        dtype = torch.bfloat16 if "bf16" in name else torch.float32
        step: Any = copy.deepcopy(net).to(dtype)
        if "bf16" in name:
            step = step.to(memory_format=torch.channels_last)
        start = time.monotonic()
        if "compile" in name:
            step = torch.compile(step, mode="reduce-overhead" if "reduce" in name else None, dynamic=False)
        with tf32_allowed("tf32" in name):
            error = relative_error(step(x.to(dtype), t).clone(), expected)
            # The network alone, which favours PyTorch; the time with update and noise is a separate value.
            image, calls = x.to(dtype), STEPS if batch == 1 else 5
            times = [ms * STEPS / calls for ms in timed(lambda: [step(image, t) for _ in range(calls)], 3)]  # noqa: B023
            loop_ms = statistics.median(timed(loop_of(step, x, dtype), 5)) if batch == 1 else None
        entry = row(f"{name}_batch{batch}", [batch, 3, *SIZE], times, torch.cuda.max_memory_allocated() / 2**30, error)
        rows.append(entry | {"steps": STEPS, "with_update_ms": loop_ms, "first_s": round(time.monotonic() - start, 1)})
        print(
            f"{entry['name']}: {entry['p50_ms']:.1f} ms for {STEPS} steps, with update and noise {loop_ms}, "
            f"error {error:.1e}",
            flush=True,
        )
    return rows


def top(batches: list[int], *, overlapped: bool) -> list[dict[str, Any]]:
    net = network()
    rows = []
    with compiling():
        for batch in batches:
            rows += voxtune_rows(net, batch, overlapped=overlapped)
    rows += pytorch_rows(
        net, 1, ["eager_fp32", "eager_bf16", "compile_reduce_overhead_fp32", "compile_reduce_overhead_bf16"]
    )
    if 64 in batches:
        rows += pytorch_rows(net, 64, ["compile_bf16", "compile_reduce_overhead_bf16"])
    return rows


def rungs(text: str | None, save: Callable[[list[dict[str, Any]], dict[str, Any]], None]) -> list[dict[str, Any]]:
    """Rows of the rungs at full size; `save` receives rows and tables after each rung."""
    net = network()
    setting = Setting(network=net, size=SIZE, schedule=schedule(), timesteps=spaced_steps(STEPS, STEPS))
    reports = {"seeds": published_results()}
    tables = climb(
        setting,
        rungs_of(text),
        cpu=text is None,
        report=lambda line: print(line, flush=True),
        save=lambda partial: save([rung_row(entry) for entry in partial["rows"]], reports | partial),
    )
    return [rung_row(entry) for entry in tables["rows"]]


def rung_row(rung: dict[str, Any]) -> dict[str, Any]:
    name = f"rung_{rung['number']:02d}_{rung['name'].replace(' ', '_')}"
    entry = row(name, [1, 3, *SIZE], rung["totals_ms"], rung["peak_gib"], rung["error"])
    return entry | {k: rung[k] for k in ("launches", "transfers", "measured_steps", "alone_ms")} | {"steps": STEPS}


def launch_costs() -> None:
    """Times a chain of small dependent launches in a CUDA graph, without launch overhead on the host, and a barrier."""
    net = network()
    program = Program(net, SIZE, 1)
    gate = [launch for launch in program.launches if launch.name == "voxtune_gate"][-1]
    for label, launch in (("plain", gate), ("overlapped", gate.chained())):
        chain = lambda launch=launch: [launch() for _ in range(100)]  # noqa: E731
        ms = sorted(measure(chain, calls=1, replays=9))[4]
        print(f"gate at 64 x 64, 100 consecutive launches, {label}: {ms * 10:.2f} us each")
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    for programs in (128, 64, 32):
        times = {}
        for rounds in (1, 101):
            call = lambda: voxtune_barriers[(programs,)](counter, ROUNDS=rounds, PROGRAMS=programs)  # noqa: B023, E731
            times[rounds] = sorted(measure(call, calls=1, replays=9))[4]
        print(
            f"barrier of {programs} programs: {(times[101] - times[1]) * 10:.2f} us; one launch {times[1] * 1e3:.2f} us"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", default="top", help="comma-separated list of: top, rungs, launches, tiles")
    parser.add_argument("--batch", default="1,64", help="comma-separated batch sizes")
    parser.add_argument("--rungs", help="numbers of the rungs, such as 1,4,8-10 (default: all)")
    parser.add_argument("--overlapped", action="store_true", help="also measure overlapped launches (Hopper)")
    parser.add_argument("--seconds", type=float, default=120, help="time limit of the tile search")
    parser.add_argument(
        "--least", type=float, default=4.0, help="minimum time in us of the convolutions in the tile search"
    )
    parser.add_argument("-o", "--out", type=Path, default=RESULTS / "h200" / "unet2d_ladder.json")
    arguments = parser.parse_args()
    batches = [int(b) for b in arguments.batch.split(",")]
    rows: list[dict[str, Any]] = []
    more: dict[str, Any] = {}

    def save(rung_rows: list[dict[str, Any]], tables: dict[str, Any]) -> None:
        more["ladder"] = tables
        write(arguments.out, rows + rung_rows, **more)

    for part in arguments.part.split(","):
        if part == "top":
            rows += top(batches, overlapped=arguments.overlapped)
        elif part == "rungs":
            rows += rungs(arguments.rungs, save)
        elif part == "launches":
            launch_costs()
        elif part == "tiles":
            net = network()
            more["tiles"] = {str(b): search(net, SIZE, b, arguments.least, arguments.seconds) for b in batches}
        write(arguments.out, rows, **more)
    print(json.dumps({r["name"]: r["p50_ms"] for r in rows}))


if __name__ == "__main__":
    main()

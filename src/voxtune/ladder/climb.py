"""Runs the rungs: each is built, checked against float64, measured, and broken down into tables.

A row contains the wall time of the whole sampling loop, measured without recording events, and the events of one recorded
step: the device time of every operation, transfer and kernel. Slow rungs run fewer steps; the row states how many.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from voxtune.diffusion.noise import noise_source
from voxtune.diffusion.samplers import ddpm
from voxtune.errors import InputError
from voxtune.files import one_line
from voxtune.kernels.compile_workers import compiling
from voxtune.kernels.precompile import compiled_ahead
from voxtune.ladder.cpu_program import block_times, cpu_program
from voxtune.ladder.machine import PARTS, Event, Machine
from voxtune.ladder.rungs import Auto, Graph, Rung, Setting
from voxtune.ladder.weights import FORMS, Weights
from voxtune.precision import tf32_allowed

SEED = 0
# Seconds of a rung's loop that are measured; the time of the remaining steps is extrapolated.
MEASURED_S = 2.0
# Images sampled back to back, without synchronisation in between.
BACK_TO_BACK = 10
CONVOLUTIONS = ("conv2d", "conv2d_pad", "block")
UNKNOWN = "a plan's"
# The rung whose first step is measured with each form of weight transfer.
OVERLAP = 9


def climb(
    setting: Setting,
    rungs: Sequence[Rung],
    *,
    runs: int = 20,
    cpu: bool = False,
    report: Callable[[str], None] = lambda _: None,
    save: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """All tables, as plain JSON. A rung that this device cannot run is listed under "failed" with its reason.

    `cpu` also measures rung 0, the CPU program, and one block on CPU and GPU.

    `save` receives the tables after every rung, so that an interrupted run keeps what was measured.
    """
    device = next(setting.network.parameters()).device
    x, t, truth = reference(setting)
    tables = describe_run(setting, device)
    if cpu:
        tables["cpu_program"] = program = cpu_program(setting, x, t, truth, repeats=5 if device.type == "cuda" else 1)
        tables["block"] = block_times(setting, device)
        report(f" 0 CPU program      {program['total_ms']:12.2f} ms  error {program['error']:.1e}")
    with compiling() if device.type == "cuda" else nullcontext():
        for rung in rungs:
            try:
                tables["rows"].append(entry := row(rung, setting, device, x, t, truth))
            except InputError:
                raise
            except Exception as problem:  # of the compiler, driver or allocator: the other rungs still run
                reason = f"{type(problem).__name__}: {one_line(problem)}"
                tables["failed"].append({"number": rung.number, "name": rung.name, "reason": reason})
                report(f"{rung.number:2d} {rung.name:16} failed: {reason}")
                continue
            if rung.number == OVERLAP:
                tables["first_step"] = first_steps(setting, device, runs)
            save(tables)
            report(
                f"{rung.number:2d} {rung.name:16} {entry['total_ms']:12.2f} ms  error {entry['error']:.1e}  "
                f"{entry['launches']} launches"
            )
    return tables


def describe_run(setting: Setting, device: torch.device) -> dict[str, Any]:
    """Network, size, device and versions of the run, with empty tables."""
    return {
        "size": list(setting.size),
        "batch": setting.batch,
        "steps": len(setting.timesteps),
        "width": setting.network.config.width,
        "multipliers": list(setting.network.config.multipliers),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, Triton's interpreter",
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "triton": triton_version()},
        "rows": [],
        "failed": [],
        "first_step": None,
    }


def triton_version() -> str:
    import triton

    return str(triton.__version__)


def reference(setting: Setting) -> tuple[Tensor, int, Tensor]:
    """(image, timestep, predicted noise in float64), on the host."""
    channels = setting.network.config.channels
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(setting.batch, channels, *setting.size, generator=generator)
    t = setting.timesteps[len(setting.timesteps) // 2]
    device = next(setting.network.parameters()).device
    with torch.no_grad(), tf32_allowed(False):
        wide = copy.deepcopy(setting.network).double()
        truth = wide(x.double().to(device), torch.full((setting.batch,), t, device=device)).cpu()
    return x, t, truth


def row(rung: Rung, setting: Setting, device: torch.device, x: Tensor, t: int, truth: Tensor) -> dict[str, Any]:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    runner = rung.make(setting, Machine(device))
    if device.type == "cuda":
        with compiled_ahead(lambda: runner(x, t)):
            pass
    output = runner(x, t)
    error = float((output.double() - truth).norm() / truth.norm())
    times = loop_times(runner, setting, device)
    peak = torch.cuda.max_memory_reserved() / 2**30 if device.type == "cuda" else None
    events, steps = recorded_step(runner, setting, device, x, t)
    return {
        "number": rung.number,
        "name": rung.name,
        "does": rung.does,
        "error": error,
        "total_ms": statistics.median(times.images) * 1e3,
        "totals_ms": [s * 1e3 for s in times.images],
        "alone_ms": statistics.median(times.alone) * 1e3,
        "measured_steps": times.steps,
        "peak_gib": peak,
        "launches": round(sum(e.kind == "kernel" for e in events) / steps),
        "transfers": round(sum(e.kind != "kernel" for e in events) / steps),
        "bytes": round(sum(e.bytes for e in events) / steps),
        "components": group(events, lambda e: e.part if e.kind == "kernel" else None, steps),
        "kernels": group(events, lambda e: e.name if e.kind == "kernel" else None, steps),
        "crossing": transfer_times(events, steps),
        "end_to_end": end_to_end(events, steps),
    }


def recorded_step(runner: Any, setting: Setting, device: torch.device, x: Tensor, t: int) -> tuple[list[Event], int]:
    """(events, number of steps): one step, or all steps for rungs that run them as one piece."""
    if isinstance(runner, Graph | Auto) and device.type == "cuda":
        return profiled(lambda: runner.sample(SEED).cpu()), len(setting.timesteps)
    original, runner.machine = runner.machine, Machine(device, timed=True)
    with torch.no_grad():
        runner(x, t)
    events = runner.machine.timed_events()
    runner.machine = original
    return events, 1


@dataclass(frozen=True)
class Times:
    """Wall seconds of all steps, repeated: per image back to back, and of a single image from the call to host memory."""

    images: list[float]
    alone: list[float]
    steps: int  # measured in each repetition


def loop_times(runner: Any, setting: Setting, device: torch.device) -> Times:
    """Times of DDPM sampling with the rung. Rungs that synchronise within a step have one time for both cases.

    Where update and noise run on the host, the noise is generated before the clock starts. On a CPU nothing is repeated:
    the interpreter's times are meaningless.
    """
    steps = len(setting.timesteps)
    if isinstance(runner, Graph | Auto):
        runner.sample(SEED).cpu()
        alone = [_timed(lambda: runner.sample(SEED + 1).cpu()) for _ in range(10 if device.type == "cuda" else 1)]
        if device.type != "cuda":
            return Times(alone, alone, steps)

        def sample_several() -> None:
            torch.stack([runner.sample(SEED + number) for number in range(BACK_TO_BACK)]).cpu()

        return Times([_timed(sample_several) / BACK_TO_BACK for _ in range(5)], alone, steps)
    shape = (setting.network.config.channels, *setting.size)
    noises = noise_source(SEED, range(setting.batch), shape)
    noise_draws = [noises(number) for number in range(steps + 1)]

    @torch.no_grad()
    def run_steps(timesteps: Sequence[int]) -> None:
        denoise = lambda image, t_N: runner(image, int(t_N[0]))  # noqa: E731
        ddpm(denoise, noise_draws[0], setting.schedule, timesteps, noise=noise_draws.__getitem__)

    one = _timed(lambda: run_steps(setting.timesteps[:1]))
    if device.type != "cuda":
        return Times([one * steps], [one * steps], 1)
    some = setting.timesteps[: max(1, min(steps, int(MEASURED_S / one)))]
    seconds = [_timed(lambda: run_steps(some)) * steps / len(some) for _ in range(5)]
    return Times(seconds, seconds, len(some))


def profiled(run: Callable[[], Any]) -> list[Event]:
    """Kernels and transfers from PyTorch's profiler, for graphs and plans, whose launches a Machine does not see."""
    with (
        torch.no_grad(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile,
    ):
        run()
        torch.cuda.synchronize()
    events = []
    for one in profile.events() or []:
        if one.device_type != torch.autograd.DeviceType.CUDA or one.name.startswith(("Memset", "Memcpy DtoD")):
            continue
        seconds = one.time_range.elapsed_us() / 1e6
        if one.name.startswith("Memcpy"):
            events.append(
                Event(kind="up" if "HtoD" in one.name else "down", part="image", name=one.name, seconds=seconds)
            )
        else:
            name = one.name[:80]
            events.append(Event(kind="kernel", part=PARTS.get(name, UNKNOWN), name=name, seconds=seconds))
    return events


def _timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def group(events: Sequence[Event], key: Callable[[Event], str | None], steps: int = 1) -> dict[str, dict[str, float]]:
    """Seconds and calls per step by a key, longest first."""
    groups: dict[str, dict[str, float]] = {}
    for event in events:
        name = key(event)
        if name is not None:
            one = groups.setdefault(name, {"seconds": 0.0, "calls": 0})
            one["seconds"] += (event.seconds or 0.0) / steps
            one["calls"] += 1
    for one in groups.values() if steps > 1 else ():
        one["calls"] = round(one["calls"] / steps, 2)
    return dict(sorted(groups.items(), key=lambda item: -item[1]["seconds"]))


def transfer_times(events: Sequence[Event], steps: int = 1) -> dict[str, float]:
    """Seconds per step to the GPU, in kernels and to the host, and the share of transfers."""
    seconds = {
        kind: sum(e.seconds or 0.0 for e in events if e.kind == kind) / steps for kind in ("up", "kernel", "down")
    }
    moved = seconds["up"] + seconds["down"]
    return {**{f"{kind}_s": s for kind, s in seconds.items()}, "share": moved / max(moved + seconds["kernel"], 1e-12)}


def end_to_end(events: Sequence[Event], steps: int = 1) -> dict[str, float | None]:
    """Seconds per step of convolutions, other kernels and transfers. The kernels of a plan cannot be classified."""
    kernels = [e for e in events if e.kind == "kernel"]
    known = all(e.part != UNKNOWN for e in kernels)
    total = sum(e.seconds or 0.0 for e in kernels) / steps
    convolution = sum(e.seconds or 0.0 for e in kernels if e.part in CONVOLUTIONS) / steps
    transfers = sum(e.seconds or 0.0 for e in events if e.kind != "kernel") / steps
    return {
        "convolution_s": convolution if known else None,
        "other_s": total - convolution if known else None,
        "transfers_s": transfers,
        "total_s": total + transfers,
    }


def first_steps(setting: Setting, device: torch.device, runs: int) -> dict[str, Any]:
    """Time from the first byte of weights to the end of the first step, for each form: best, worst and mean of `runs`."""
    rung = Graph(setting, Machine(device))
    weights = Weights(rung.program)
    terms = rung.program.time_terms([setting.timesteps[0]])[0]
    table: dict[str, Any] = {"bytes": weights.bytes, "runs": runs, "forms": {}}
    for form in FORMS:
        weights.first_step(form, terms)
        times = []
        for _ in range(runs):
            weights.clear()
            rung.program.eps.fill_(math.nan)
            times.append(weights.first_step(form, terms) * 1e3)
            if not bool(torch.isfinite(rung.program.eps).all()):
                raise RuntimeError(f"{form} weights: the first step ran before all of them were copied")
        table["forms"][form] = {"best_ms": min(times), "worst_ms": max(times), "average_ms": sum(times) / len(times)}
    return table

"""Climbing: each rung made, checked against float64, measured, and taken apart into the tables.

A rung's row has the whole loop's wall time (its own measurement, nothing noted) and one noted step: what every operation,
transfer and kernel of it took on the device. Slow rungs run fewer steps than asked for; the row says how many were measured.
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
from voxtune.ladder.machine import PARTS, Event, Machine
from voxtune.ladder.rungs import Auto, Graph, Rung, Setting
from voxtune.ladder.weights import FORMS, Weights, unified
from voxtune.precision import tf32_allowed

SEED = 0
# Of a rung's loop, seconds after which the rest of the steps is taken as alike.
PATIENCE_S = 2.0
# Images that follow each other, where nothing makes the host wait for one before it asks for the next.
IN_A_ROW = 10
CONVOLUTIONS = ("conv2d", "conv2d_pad", "block")
UNKNOWN = "a plan's"
# The rung whose first step is measured with each way of bringing the weights.
OVERLAP = 9


def climb(
    setting: Setting,
    rungs: Sequence[Rung],
    *,
    runs: int = 20,
    say: Callable[[str], None] = lambda _: None,
    keep: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """All tables, as plain JSON. A rung that this device cannot run stands under "failed" with its reason.

    `keep` is given the tables after every rung: what was measured is not lost with a climb that does not end.
    """
    device = next(setting.network.parameters()).device
    x, t, truth = reference(setting)
    found = about(setting, device)
    with compiling() if device.type == "cuda" else nullcontext():
        for rung in rungs:
            try:
                found["rows"].append(told := row(rung, setting, device, x, t, truth))
            except InputError:
                raise
            except Exception as problem:  # a compiler's, a driver's or an allocator's: the other rungs are not lost
                reason = f"{type(problem).__name__}: {one_line(problem)}"
                found["failed"].append({"number": rung.number, "name": rung.name, "reason": reason})
                say(f"{rung.number:2d} {rung.name:16} failed: {reason}")
                continue
            if rung.number == OVERLAP:
                found["first_step"] = first_steps(setting, device, runs)
            keep(found)
            say(
                f"{rung.number:2d} {rung.name:16} {told['total_ms']:12.2f} ms  error {told['error']:.1e}  "
                f"{told['launches']} launches"
            )
    return found


def about(setting: Setting, device: torch.device) -> dict[str, Any]:
    """Where and of what the tables are, before any rung."""
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
    """(image, step, the noise in it by float64), on the host."""
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
    made = rung.make(setting, Machine(device))
    if device.type == "cuda":
        with compiled_ahead(lambda: made(x, t)):
            pass
    found = made(x, t)
    error = float((found.double() - truth).norm() / truth.norm())
    times = loop_times(made, setting, device)
    peak = torch.cuda.max_memory_reserved() / 2**30 if device.type == "cuda" else None
    events, steps = noted(made, setting, device, x, t)
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
        "components": by(events, lambda e: e.part if e.kind == "kernel" else None, steps),
        "kernels": by(events, lambda e: e.name if e.kind == "kernel" else None, steps),
        "crossing": crossing(events, steps),
        "end_to_end": end_to_end(events, steps),
    }


def noted(made: Any, setting: Setting, device: torch.device, x: Tensor, t: int) -> tuple[list[Event], int]:
    """(events, of how many steps): of one step, noted as it happens; of a whole image where a rung draws it in one piece."""
    if isinstance(made, Graph | Auto) and device.type == "cuda":
        return profiled(lambda: made.sample(SEED).cpu()), len(setting.timesteps)
    before, made.machine = made.machine, Machine(device, timed=True)
    with torch.no_grad():
        made(x, t)
    events = made.machine.settled()
    made.machine = before
    return events, 1


@dataclass(frozen=True)
class Times:
    """Wall seconds for all steps, several times: of an image among others, and of one by itself, from the call to the host."""

    images: list[float]
    alone: list[float]
    steps: int  # that were run each time


def loop_times(made: Any, setting: Setting, device: torch.device) -> Times:
    """DDPM around the rung. Where it waits for the device within a step, an image among others takes what one alone takes.

    Where the rung leaves update and noise to the host, the noise is drawn before the clock starts. On a CPU nothing is repeated:
    the interpreter's times mean little.
    """
    steps = len(setting.timesteps)
    if isinstance(made, Graph | Auto):
        made.sample(SEED).cpu()
        alone = [_timed(lambda: made.sample(SEED + 1).cpu()) for _ in range(10 if device.type == "cuda" else 1)]
        if device.type != "cuda":
            return Times(alone, alone, steps)

        def several() -> None:
            torch.stack([made.sample(SEED + number) for number in range(IN_A_ROW)]).cpu()

        return Times([_timed(several) / IN_A_ROW for _ in range(5)], alone, steps)
    shape = (setting.network.config.channels, *setting.size)
    noises = noise_source(SEED, range(setting.batch), shape)
    drawn = [noises(number) for number in range(steps + 1)]

    @torch.no_grad()
    def walk(timesteps: Sequence[int]) -> None:
        ddpm(
            lambda image, t_N: made(image, int(t_N[0])), drawn[0], setting.schedule, timesteps, noise=drawn.__getitem__
        )

    one = _timed(lambda: walk(setting.timesteps[:1]))
    if device.type != "cuda":
        return Times([one * steps], [one * steps], 1)
    some = setting.timesteps[: max(1, min(steps, int(PATIENCE_S / one)))]
    found = [_timed(lambda: walk(some)) * steps / len(some) for _ in range(5)]
    return Times(found, found, len(some))


def profiled(run: Callable[[], Any]) -> list[Event]:
    """The kernels and transfers that PyTorch's profiler sees: inside a graph, and of a plan, where no machine notes them."""
    with (
        torch.no_grad(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as taken,
    ):
        run()
        torch.cuda.synchronize()
    events = []
    for one in taken.events() or []:
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
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def by(events: Sequence[Event], key: Callable[[Event], str | None], steps: int = 1) -> dict[str, dict[str, float]]:
    """Seconds and calls of a step by a key, the longest first."""
    found: dict[str, dict[str, float]] = {}
    for event in events:
        name = key(event)
        if name is not None:
            one = found.setdefault(name, {"seconds": 0.0, "calls": 0})
            one["seconds"] += (event.seconds or 0.0) / steps
            one["calls"] += 1
    for one in found.values() if steps > 1 else ():
        one["calls"] = round(one["calls"] / steps, 2)
    return dict(sorted(found.items(), key=lambda item: -item[1]["seconds"]))


def crossing(events: Sequence[Event], steps: int = 1) -> dict[str, float]:
    """The transfer table: to the GPU, kernels, to the host, and the transfers' share."""
    seconds = {
        kind: sum(e.seconds or 0.0 for e in events if e.kind == kind) / steps for kind in ("up", "kernel", "down")
    }
    moved = seconds["up"] + seconds["down"]
    return {**{f"{kind}_s": s for kind, s in seconds.items()}, "share": moved / max(moved + seconds["kernel"], 1e-12)}


def end_to_end(events: Sequence[Event], steps: int = 1) -> dict[str, float | None]:
    """Convolution, other, transfers and their total, in seconds of one step. A plan's kernels do not say what they are."""
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
    """From the first byte of weights to the end of the first step, for each form: best, worst and average of `runs`."""
    rung = Graph(setting, Machine(device))
    weights = Weights(rung.program)
    terms = rung.program.time_terms([setting.timesteps[0]])[0]
    found: dict[str, Any] = {"bytes": weights.bytes, "runs": runs, "forms": {}}
    for form in FORMS:
        weights.first_step(form, terms)
        times = []
        for _ in range(runs):
            weights.clear()
            rung.program.eps.fill_(math.nan)
            times.append(weights.first_step(form, terms) * 1e3)
            if not bool(torch.isfinite(rung.program.eps).all()):
                raise RuntimeError(f"{form} weights: a step ran before they had arrived")
        found["forms"][form] = {"best_ms": min(times), "worst_ms": max(times), "average_ms": sum(times) / len(times)}
    found["managed"] = "on" if unified(device) else "off: this device does not share the host's memory"
    return found

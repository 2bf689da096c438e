"""Climbing: each rung made, checked against float64, measured, and taken apart into the tables.

A rung's row has the whole loop's wall time (its own measurement, nothing noted) and one noted step: what every operation,
transfer and kernel of it took on the device. Slow rungs run fewer steps than asked for; the row says how many were measured.
"""

from __future__ import annotations

import copy
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
from voxtune.kernels.ahead import compiled_ahead
from voxtune.kernels.workers import compiling
from voxtune.ladder.machine import Event, Machine
from voxtune.ladder.rungs import Auto, Graph, Rung, Setting
from voxtune.ladder.weights import FORMS, Weights, unified
from voxtune.precision import tf32_allowed

SEED = 0
# Of a rung's loop, seconds after which the rest of the steps is taken as alike.
PATIENCE_S = 3.0
# Images that follow each other, where nothing makes the host wait for one before it asks for the next.
IN_A_ROW = 10
CONVOLUTIONS = ("conv2d", "conv2d_pad", "block")


def climb(
    setting: Setting, rungs: Sequence[Rung], *, runs: int = 20, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """All tables, as plain JSON. A rung that this device cannot run stands under "failed" with its reason."""
    device = next(setting.network.parameters()).device
    x, t, truth = reference(setting)
    rows, failed = [], []
    with compiling() if device.type == "cuda" else nullcontext():
        for rung in rungs:
            try:
                rows.append(told := row(rung, setting, device, x, t, truth))
            except InputError:
                raise
            except Exception as problem:  # a compiler's, a driver's or an allocator's: the other rungs are not lost
                reason = f"{type(problem).__name__}: {one_line(problem)}"
                failed.append({"number": rung.number, "name": rung.name, "reason": reason})
                say(f"{rung.number:2d} {rung.name:16} failed: {reason}")
                continue
            say(
                f"{rung.number:2d} {rung.name:16} {told['total_ms']:12.2f} ms  error {told['error']:.1e}  "
                f"{told['launches']} launches"
            )
    first = first_steps(setting, device, runs) if any(one["number"] == 9 for one in rows) else None
    return {
        "size": list(setting.size),
        "batch": setting.batch,
        "steps": len(setting.timesteps),
        "width": setting.network.config.width,
        "multipliers": list(setting.network.config.multipliers),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, Triton's interpreter",
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "triton": triton_version()},
        "rows": rows,
        "failed": failed,
        "first_step": first,
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
    quiet, noting = Machine(device), Machine(device, timed=True)
    made = rung.make(setting, quiet)
    if device.type == "cuda":
        with compiled_ahead(lambda: made(x, t)):
            pass
    found = made(x, t)
    error = float((found.double() - truth).norm() / truth.norm())
    times = loop_times(made, setting, device)
    made.machine = noting
    with torch.no_grad():
        made(x, t)
    events = noting.settled()
    made.machine = quiet
    if isinstance(made, Auto) and device.type == "cuda":
        events += launched(lambda: made(x, t))
    return {
        "number": rung.number,
        "name": rung.name,
        "does": rung.does,
        "error": error,
        "total_ms": statistics.median(times.images) * 1e3,
        "totals_ms": [s * 1e3 for s in times.images],
        "alone_ms": statistics.median(times.alone) * 1e3,
        "measured_steps": times.steps,
        "launches": sum(e.kind == "kernel" for e in events),
        "transfers": sum(e.kind != "kernel" for e in events),
        "bytes": sum(e.bytes for e in events),
        "components": by(events, lambda e: e.part if e.kind == "kernel" else None),
        "kernels": by(events, lambda e: e.name if e.kind == "kernel" else None),
        "crossing": crossing(events),
        "end_to_end": end_to_end(events),
    }


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
        made.sample(SEED)
        alone = [_timed(lambda: made.sample(SEED + 1).cpu()) for _ in range(10 if device.type == "cuda" else 1)]
        if device.type != "cuda":
            return Times(alone, alone, steps)

        def several() -> None:
            [made.sample(SEED + number) for number in range(IN_A_ROW)][-1].cpu()

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
    found = [_timed(lambda: walk(some)) * steps / len(some) for _ in range(3)]
    return Times(found, found, len(some))


def launched(run: Callable[[], Any]) -> list[Event]:
    """The kernels that PyTorch's profiler sees: of a plan, whose launches no machine notes."""
    with (
        torch.no_grad(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as taken,
    ):
        run()
        torch.cuda.synchronize()
    found = [e for e in taken.events() or [] if e.device_type == torch.autograd.DeviceType.CUDA]
    return [
        Event(kind="kernel", part="plan", name=e.name[:80], seconds=e.time_range.elapsed_us() / 1e6)
        for e in found
        if not e.name.startswith(("Memcpy", "Memset"))
    ]


def _timed(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def by(events: Sequence[Event], key: Callable[[Event], str | None]) -> dict[str, dict[str, float]]:
    """Seconds and calls by a key, the longest first."""
    found: dict[str, dict[str, float]] = {}
    for event in events:
        name = key(event)
        if name is not None:
            one = found.setdefault(name, {"seconds": 0.0, "calls": 0})
            one["seconds"] += event.seconds or 0.0
            one["calls"] += 1
    return dict(sorted(found.items(), key=lambda item: -item[1]["seconds"]))


def crossing(events: Sequence[Event]) -> dict[str, float]:
    """The transfer table: to the GPU, kernels, to the host, and the transfers' share."""
    seconds = {kind: sum(e.seconds or 0.0 for e in events if e.kind == kind) for kind in ("up", "kernel", "down")}
    moved = seconds["up"] + seconds["down"]
    return {**{f"{kind}_s": s for kind, s in seconds.items()}, "share": moved / max(moved + seconds["kernel"], 1e-12)}


def end_to_end(events: Sequence[Event]) -> dict[str, float]:
    """Convolution, other, transfers and their total, in seconds of device time for one step."""
    kernels = [e for e in events if e.kind == "kernel"]
    convolution = sum(e.seconds or 0.0 for e in kernels if e.part in CONVOLUTIONS)
    other = sum(e.seconds or 0.0 for e in kernels) - convolution
    transfers = sum(e.seconds or 0.0 for e in events if e.kind != "kernel")
    return {
        "convolution_s": convolution,
        "other_s": other,
        "transfers_s": transfers,
        "total_s": convolution + other + transfers,
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
            times.append(weights.first_step(form, terms) * 1e3)
        found["forms"][form] = {"best_ms": min(times), "worst_ms": max(times), "average_ms": sum(times) / len(times)}
    found["managed"] = "on" if unified(device) else "off: this device does not share the host's memory"
    return found

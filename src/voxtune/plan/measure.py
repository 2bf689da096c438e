"""Time and memory of one call: quantiles after warm-up, and PyTorch's peak memory."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

log = logging.getLogger("voxtune")


@contextmanager
def clocked(event: str) -> Iterator[None]:
    """Logs how long a part of the preparation took."""
    started = time.perf_counter()
    yield
    log.info("%s in %.2f s", event, time.perf_counter() - started)


@dataclass(frozen=True)
class Timing:
    """`first_s`: the first call, with compilation, algorithm search and graph recording. `peak_gib` is None on a CPU.

    `gave_up`: the measurement ended after two runs, because both took too long.
    """

    p20_ms: float
    p50_ms: float
    p80_ms: float
    first_s: float
    peak_gib: float | None
    gave_up: bool = False


def measure(
    call: Callable[[], Any],
    device: torch.device,
    *,
    repeats: int = 10,
    seconds: float = 3.0,
    give_up_ms: float = math.inf,
    least: int = 3,
) -> Timing:
    """At least `least` runs, at most `repeats`, about `seconds` in all; only two if both take longer than `give_up_ms`."""
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    call()
    if gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    first = time.perf_counter() - started
    times: list[float] = []
    gave_up = False
    until = time.perf_counter() + seconds
    while len(times) < least or (len(times) < repeats and time.perf_counter() < until):
        times.append(_once(call, device, gpu))
        if len(times) == 2 and min(times) > give_up_ms:
            gave_up = True
            break
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if gpu else None
    p20, p50, p80 = quantiles(times)
    return Timing(p20, p50, p80, first, peak, gave_up)


def _once(call: Callable[[], Any], device: torch.device, gpu: bool) -> float:
    if not gpu:
        started = time.perf_counter()
        call()
        return (time.perf_counter() - started) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize(device)
    return float(start.elapsed_time(end))


def quantiles(times: list[float]) -> tuple[float, float, float]:
    if len(times) < 2:
        return times[0], times[0], times[0]
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    return cuts[1], statistics.median(times), cuts[7]

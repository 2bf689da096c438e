"""The batch size of sampling, chosen by measured steps and by the memory of this machine."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from voxtune.runtime.model import Model
from voxtune.runtime.planned import Planned

log = logging.getLogger("voxtune")

Batch = int | Literal["auto"]
# A larger batch size is measured, and chosen, if it is at least this many times as fast as a smaller one.
GAIN = 1.05
# The first larger batch size is measured if that takes at most this share of the sampling time; each further one if it takes
# at most half of what it would save if it were as much faster as the last one.
SHARE_OF_TIME = 0.15
SHARE_OF_SAVING = 0.5
# The share of the free memory that a batch may need, as expected from the measured smaller one.
SHARE_OF_MEMORY = 0.6
# Of each batch size: one step to warm up and two that count. If those differ by more than this factor, a third one decides.
RUNS = 3
AGREEMENT = 1.25


@dataclass(frozen=True, kw_only=True)
class BatchChoice:
    """The chosen batch size, the seconds per step and volume of the measured ones, and why no larger one was chosen."""

    batch: int
    seconds: dict[int, float]
    reason: str

    def describe(self) -> str:
        measured = ", ".join(f"{batch}: {seconds:.3g}" for batch, seconds in self.seconds.items())
        measured = f"; seconds per step and volume: {measured}" if measured else ""
        return f"batch {self.batch} ({self.reason}{measured})"


def choose_batch(
    model: Model,
    condition: Callable[[int], Tensor | None],
    size: tuple[int, ...],
    *,
    volumes: int,
    steps: int,
    padded: bool = False,
) -> BatchChoice:
    """The fastest batch size of `volumes` samples of `steps` steps; `condition(n)` is the encoded mask of the first n.

    Sizes 1, 2, 4, ... are measured while that pays and memory allows. The choice counts the last batch, which may be smaller,
    unless it is `padded` to a full one.
    """
    if volumes == 1:
        return BatchChoice(batch=1, seconds={}, reason="one sample")
    if SHARE_OF_TIME * volumes * steps < 3 * RUNS:
        return BatchChoice(batch=1, seconds={}, reason="too few steps to measure")
    measured: dict[int, float] = {}
    batch, spent, best, gain = 1, 0.0, 1, 1.0
    while True:
        try:
            seconds, needed = _measure(model, condition(batch), size, batch)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            reason = "memory"
            break
        measured[batch] = seconds / batch
        spent += RUNS * seconds
        if batch > 1:
            gain = measured[best] / measured[batch]
            if gain < GAIN:
                reason = "larger ones are not faster"
                break
        best, batch = batch, min(2 * batch, volumes)
        if batch == best:
            reason = "all samples"
            break
        factor = batch / best
        available = available_memory(model.device)
        if needed is None or available is None or needed * factor > SHARE_OF_MEMORY * available:
            reason = "memory" if needed is not None and available is not None else "free memory is unknown"
            break
        remaining = volumes * steps * measured[best]
        worth = max(SHARE_OF_TIME * remaining - spent, SHARE_OF_SAVING * remaining * (1 - 1 / gain))
        if RUNS * seconds * factor > worth:
            reason = "measuring larger ones would take too long"
            break
    if not measured:
        return BatchChoice(batch=1, seconds={}, reason=reason)
    chosen = fastest_batch(measured, volumes, padded=padded or pads_last_batch(model))
    if chosen == volumes:
        reason = "all samples"
    elif chosen < max(measured):
        reason = "larger ones are not faster"
    return BatchChoice(batch=chosen, seconds=measured, reason=reason)


def fastest_batch(seconds: dict[int, float], volumes: int, *, padded: bool = False) -> int:
    """The smallest batch size that is about as fast as any for this number of volumes; `seconds` are per volume, by size.

    The last batch holds the remaining volumes, or is `padded` to a full one. Between measured sizes, time is interpolated.
    """
    sizes = sorted(seconds)
    of_batch = [batch * seconds[batch] for batch in sizes]
    predicted: dict[int, float] = {}
    for batch in sizes:
        full, rest = divmod(volumes, batch)
        last = batch if padded and full else rest
        predicted[batch] = full * batch * seconds[batch] + (float(np.interp(last, sizes, of_batch)) if rest else 0.0)
    best = min(predicted.values())
    return next(batch for batch in sizes if predicted[batch] <= GAIN * best)


def pads_last_batch(model: Model) -> bool:
    """Whether a short last batch is padded: on a GPU, another shape would need another plan."""
    return model.device.type == "cuda" and isinstance(model.network, Planned)


@torch.inference_mode()
def _measure(model: Model, cond: Tensor | None, size: tuple[int, ...], batch: int) -> tuple[float, int | None]:
    """Seconds of a step, and the bytes that it needed beyond those in use before; None where they are unknown.

    On a GPU the original network is measured: a plan for each size would take longer than it saves.
    """
    network, device = model.network, model.device
    if isinstance(network, Planned) and (device.type == "cuda" or network.plan != "auto"):
        network = network.original
    x = torch.zeros(batch, model.config.network.out_channels, *size, device=device)
    t_N = torch.full((batch,), len(model.schedule) // 2, dtype=torch.int64, device=device)
    cond = None if cond is None else cond.to(device, torch.float32)
    before = _memory_in_use(device)

    def step() -> float:
        _synchronize(device)
        started = time.perf_counter()
        network(x, t_N, cond)
        _synchronize(device)
        return time.perf_counter() - started

    counted = [step() for _ in range(RUNS)][1:]
    if max(counted) > AGREEMENT * min(counted):
        counted.append(step())
    peak = _peak_memory(device)
    return median(counted), None if before is None or peak is None else max(0, peak - before)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _memory_in_use(device: torch.device) -> int | None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    pages = _read_number("/proc/self/statm", word=1)
    return None if pages is None else pages * 4096


def _peak_memory(device: torch.device) -> int | None:
    """The most memory in use so far: an upper bound of what the last steps needed."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if not sys.platform.startswith("linux"):
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def available_memory(device: torch.device) -> int | None:
    """The bytes that are free on a device, in a container within its limit; None where they are unknown."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    free = _read_number("/proc/meminfo", word=1, line="MemAvailable:")
    limit, used = _read_number("/sys/fs/cgroup/memory.max"), _read_number("/sys/fs/cgroup/memory.current")
    if free is None:
        return None
    return min(free * 1024, limit - used) if limit is not None and used is not None else free * 1024


def _read_number(path: str, *, word: int = 0, line: str = "") -> int | None:
    """A number of a file of the Linux kernel: a word of its first line that begins with `line`."""
    try:
        words = next(text for text in Path(path).read_text().splitlines() if text.startswith(line)).split()
        return int(words[word])
    except (OSError, StopIteration, IndexError, ValueError):
        return None

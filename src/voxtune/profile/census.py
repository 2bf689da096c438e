"""The census: whole steps under torch.profiler, no counters. Also the bare steps beside it, to state what it costs."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from voxtune.profile.attribution import Teller, launch_rows
from voxtune.profile.hooks import module_ranges
from voxtune.profile.memory import Holders, memory_rows, peak_bytes
from voxtune.profile.trace import STEP, Trace, read_trace

Step = Callable[[], Any]


@dataclass(kw_only=True)
class Census:
    launches: list[dict[str, Any]]
    memory: list[dict[str, Any]]
    timings: list[dict[str, Any]]
    peak_bytes: int | None


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_steps(step: Step, device: torch.device, repeats: int) -> list[float]:
    """Milliseconds of each of `repeats` whole steps, nothing attached."""
    return [_time_one(step, device) for _ in range(repeats)]


def _time_one(step: Step, device: torch.device) -> float:
    synchronize(device)
    if device.type != "cuda":
        started = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - started)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end))


def take_census(
    step: Step,
    device: torch.device,
    *,
    network: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    inputs: Iterable[Tensor] = (),
    steps: int = 2,
    warmup: int = 3,
    repeats: int = 5,
) -> Census:
    """Warms up, times bare steps, then records `steps` whole steps."""
    inputs = list(inputs)
    for _ in range(warmup):
        step()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    bare = time_steps(step, device, repeats)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    recorder = StepRecorder(device, network=network, optimizer=optimizer, inputs=inputs)
    with recorder:
        for _ in range(steps):
            with recorder.step():
                step()
    return recorder.census(bare=bare, peak=peak)


class StepRecorder:
    """Records the steps between its `step()` contexts; works around anyone's own loop too."""

    def __init__(
        self,
        device: torch.device,
        *,
        network: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        inputs: Iterable[Tensor] = (),
    ):
        self.device, self.network, self.optimizer, self.inputs = device, network, optimizer, list(inputs)
        self.holders: list[Holders] = []
        self.modules: dict[str, str] = {}
        self.trace: Trace | None = None
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
        self._profiler = profile(activities=activities, record_shapes=True, profile_memory=True)
        self._ranges = module_ranges(network)

    def __enter__(self) -> StepRecorder:
        self.modules = self._ranges.__enter__()
        self.holders = [Holders.now(self.network, self.optimizer, self.inputs)]
        self._profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profiler.__exit__(*error)
        self._ranges.__exit__(*error)
        if error[0] is None:
            with tempfile.TemporaryDirectory(prefix="voxtune-") as folder:
                path = Path(folder) / "trace.json"
                self._profiler.export_chrome_trace(str(path))
                self.trace = read_trace(path)

    def step(self) -> _RecordedStep:
        return _RecordedStep(self)

    def census(self, *, bare: list[float], peak: int | None) -> Census:
        assert self.trace is not None, "the recorder was not closed"
        teller = Teller(self.trace, self.modules)
        memory = memory_rows(self.trace, self.holders, teller.phase_at, device=1 if self.device.type == "cuda" else 0)
        timings = [{"tier": "bare", "repeat": i, "step_ms": ms} for i, ms in enumerate(bare)]
        timings += [
            {"tier": "census", "repeat": i, "step_ms": (s.end - s.start) / 1e3} for i, s in enumerate(self.trace.steps)
        ]
        return Census(
            launches=launch_rows(self.trace, self.modules),
            memory=memory,
            timings=timings,
            peak_bytes=peak if peak is not None else peak_bytes(memory),
        )


class _RecordedStep:
    def __init__(self, recorder: StepRecorder):
        self.recorder = recorder
        self.range = record_function(f"{STEP}{len(recorder.holders) - 1}")

    def __enter__(self) -> None:
        self.range.__enter__()

    def __exit__(self, *error: Any) -> None:
        recorder = self.recorder
        synchronize(recorder.device)
        self.range.__exit__(*error)
        recorder.holders.append(Holders.now(recorder.network, recorder.optimizer, recorder.inputs))

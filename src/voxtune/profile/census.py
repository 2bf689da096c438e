"""The census: whole steps under torch.profiler, without counters; and unprofiled steps, to state the overhead."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from voxtune.files import write_file
from voxtune.marks import RAW_FOLDER, marked_gzip
from voxtune.profile.attribution import Attribution, launch_rows
from voxtune.profile.memory import KnownStorages, memory_rows, peak_bytes
from voxtune.profile.trace import MODULE, STEP, Trace, decode_trace, export_trace, read_trace, recorded_trace
from voxtune.reading import read_json, reading


def is_compiled(network: nn.Module | None) -> bool:
    """Whether any module is compiled: hooks would break the graph and change what is measured."""
    if network is None:
        return False
    return any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) for m in network.modules())


@contextmanager
def module_ranges(network: nn.Module | None) -> Iterator[dict[str, str]]:
    """Marks the modules in the trace; yields {dotted path: class}, which is empty for a compiled network."""
    if network is None or is_compiled(network):
        yield {}
        return
    runner: Any = getattr(network, "runner", None)
    if hasattr(runner, "named"):  # a planned network: its operators know their module
        with runner.named(lambda path: record_function(MODULE + path)) as named:
            yield named
        return
    handles: list[Any] = []
    try:
        for path, module in network.named_modules():
            handles += _hook(module, path)
        yield {path: type(module).__name__ for path, module in network.named_modules()}
    finally:
        for handle in handles:
            handle.remove()


def _hook(module: nn.Module, path: str) -> list[Any]:
    running: list[record_function] = []  # a module may call itself

    def enter(_module: nn.Module, _inputs: Any) -> None:
        running.append(record_function(MODULE + path))
        running[-1].__enter__()

    def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        if running:
            running.pop().__exit__(None, None, None)

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]


Step = Callable[[], Any]
# Folder of the raw recording inside the session's folder, the profiler's trace in it, and the rest of the census.
RAW, TRACE, CENSUS = RAW_FOLDER, "trace.json.gz", "census.json"
FORMAT = "voxtune-census/1"
MAX_RAW_BYTES = 2**28


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
    """Milliseconds of each of `repeats` whole steps, without a profiler."""
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
    raw: Path | None = None,
    overwrite: bool = False,
) -> Census:
    """Warms up, times unprofiled steps, then records `steps` whole steps; `raw` is a folder for the raw recording."""
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
    return recorder.census(bare=bare, peak=peak, raw=raw, overwrite=overwrite)


@dataclass(kw_only=True)
class RawCensus:
    """The raw recording, from which the tables are made: at once, or later from its files."""

    trace: Trace
    modules: dict[str, str]
    holders: list[KnownStorages]
    bare: list[float]
    peak: int | None
    on_gpu: bool

    def census(self) -> Census:
        trace = self.trace
        attribution = Attribution(trace, self.modules)
        memory = memory_rows(trace, self.holders, attribution.phase_at, device=1 if self.on_gpu else 0)
        timings = [{"tier": "bare", "repeat": i, "step_ms": ms} for i, ms in enumerate(self.bare)]
        timings += [
            {"tier": "census", "repeat": i, "step_ms": (s.end - s.start) / 1e3} for i, s in enumerate(trace.steps)
        ]
        return Census(
            launches=launch_rows(trace, self.modules),
            memory=memory,
            timings=timings,
            peak_bytes=self.peak if self.peak is not None else peak_bytes(memory),
        )

    def save(self, folder: Path, trace: bytes, *, overwrite: bool = False) -> None:
        """`trace` is the file that the profiler exported."""
        write_file(folder / TRACE, marked_gzip(recorded_trace(trace)), overwrite=overwrite)
        rest = {k: getattr(self, k) for k in ("modules", "bare", "peak", "on_gpu")}
        rest["holders"] = [[[a, c, n] for a, (c, n) in h.known.items()] for h in self.holders]
        write_file(folder / CENSUS, json.dumps({"format": FORMAT, **rest}), overwrite=overwrite)

    @classmethod
    def load(cls, folder: Path) -> RawCensus:
        path = folder / CENSUS
        rest = read_json(path, limit=MAX_RAW_BYTES)
        trace = read_trace(folder / TRACE)
        with reading(path, "recording"):
            rest.pop("format", None)
            holders = [KnownStorages({a: (c, n) for a, c, n in known}) for known in rest.pop("holders")]
            return cls(**rest, holders=holders, trace=trace)


class StepRecorder:
    """Records the steps inside its `step()` contexts."""

    def __init__(
        self,
        device: torch.device,
        *,
        network: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        inputs: Iterable[Tensor] = (),
    ):
        self.device, self.network, self.optimizer, self.inputs = device, network, optimizer, list(inputs)
        self.holders: list[KnownStorages] = []
        self.modules: dict[str, str] = {}
        self.trace: Trace | None = None
        self.trace_file = b""
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
        self._profiler = profile(activities=activities, record_shapes=True, profile_memory=True)
        self._ranges = module_ranges(network)

    def __enter__(self) -> StepRecorder:
        self.modules = self._ranges.__enter__()
        self.holders = [KnownStorages.snapshot(self.network, self.optimizer, self.inputs)]
        self._profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profiler.__exit__(*error)
        self._ranges.__exit__(*error)
        if error[0] is None:
            self.trace_file = export_trace(self._profiler)
            self.trace = decode_trace(self.trace_file)

    def step(self) -> _RecordedStep:
        return _RecordedStep(self)

    def census(
        self, *, bare: list[float], peak: int | None, raw: Path | None = None, overwrite: bool = False
    ) -> Census:
        assert self.trace is not None, "the recorder was not closed"
        recording = RawCensus(
            trace=self.trace,
            modules=self.modules,
            holders=self.holders,
            bare=bare,
            peak=peak,
            on_gpu=self.device.type == "cuda",
        )
        if raw is not None:
            recording.save(raw, self.trace_file, overwrite=overwrite)
        return recording.census()


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
        recorder.holders.append(KnownStorages.snapshot(recorder.network, recorder.optimizer, recorder.inputs))

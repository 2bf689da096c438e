"""Real recordings of an H200 (trimmed to one step and to the fields that are read), and small made-up traces."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

from voxtune.profile.attribution import launch_rows
from voxtune.profile.session import Session, frame
from voxtune.profile.trace import Trace, read_trace

FIXTURES = Path(__file__).parent.parent / "profile" / "fixtures"


def text(name: str) -> str:
    return gzip.decompress((FIXTURES / name).read_bytes()).decode()


def baseline_trace() -> Trace:
    return read_trace(FIXTURES / "train_baseline.json.gz")


def channels_last_trace() -> Trace:
    return read_trace(FIXTURES / "forward_channels_last.json.gz")


def baseline_session() -> Session:
    meta = {"name": "t", "mode": "train", "config": "baseline", "environment": {}, "tiers": {"census": {"done": True}}}
    timings = [{"tier": "bare", "repeat": i, "step_ms": 1223.0 + i} for i in range(5)]
    launches = frame(launch_rows(baseline_trace(), {}), "launches")
    return Session(meta=meta, launches=launches, timings=frame(timings, "timings"))


class Events:
    """Writes Kineto events by hand: operators and ranges on a thread, kernels that a call on it launches."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.correlation = 0

    def host(
        self, name: str, start: float, end: float, *, thread: int = 1, category: str = "cpu_op", **args: Any
    ) -> None:
        args = {k.replace("_", " "): v for k, v in args.items()}
        span = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": start, "dur": end - start}
        self.events.append({**span, "args": args})

    def range(self, name: str, start: float, end: float, *, thread: int = 1) -> None:
        self.host(name, start, end, thread=thread, category="user_annotation")

    def kernel(self, name: str, launch: float, *, thread: int = 1, start: float | None = None) -> None:
        self.correlation += 1
        self.host(
            "cudaLaunchKernel",
            launch,
            launch + 0.5,
            thread=thread,
            category="cuda_runtime",
            correlation=self.correlation,
        )
        args = {"correlation": self.correlation, "grid": [1, 1, 1], "block": [128, 1, 1], "stream": 7}
        event = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "dur": 2.0, "args": args}
        self.events.append({**event, "ts": launch + 5 if start is None else start})

    def memory(self, time: float, address: int, size: int, total: int, *, thread: int = 1, device: int = 1) -> None:
        args = {"Addr": address, "Bytes": size, "Device Type": device, "Total Allocated": total}
        event = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": thread}
        self.events.append({**event, "ts": time, "args": args})

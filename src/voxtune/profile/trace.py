"""A Kineto trace (torch.profiler's JSON) as nested spans: the operator, range and step of each launch."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.profiler import profile

from voxtune.files import paths_are_recorded, recorded_values
from voxtune.reading import gunzip, parse_json, reading

STEP = "voxtune::step#"
MODULE = "module::"
NODE = "autograd::engine::evaluate_function: "
_HOST = {"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"}
_DEVICE = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}


@dataclass(eq=False, slots=True)
class Span:
    """An interval of host time: an operator, a range or a runtime call. `inside` encloses it on the same thread."""

    name: str
    category: str
    thread: Any
    start: float
    end: float
    args: dict[str, Any]
    inside: Span | None = None
    within: float = 0.0  # time of the operators directly inside

    @property
    def sequence(self) -> int:
        return int(self.args.get("Sequence number", -1))

    def around(self) -> Iterator[Span]:
        """This span and the spans that enclose it, innermost first."""
        span: Span | None = self
        while span is not None:
            yield span
            span = span.inside

    def find(self, test: Callable[[Span], bool]) -> Span | None:
        return next((s for s in self.around() if test(s)), None)


@dataclass(eq=False, slots=True)
class Work:
    """A kernel, copy or fill on the device, and the host call that launched it."""

    name: str
    kind: str
    start: float
    duration: float
    args: dict[str, Any]
    call: Span | None


@dataclass(eq=False, slots=True)
class Allocation:
    """An allocation; or a release, with negative `bytes`."""

    time: float
    address: int
    bytes: int
    device: int  # 0 is the host
    total: int
    inside: Span | None


@dataclass(eq=False)
class Trace:
    operators: list[Span] = field(default_factory=list)
    ranges: list[Span] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)
    steps: list[Span] = field(default_factory=list)

    def step_at(self, time: float) -> int | None:
        return next((i for i, s in enumerate(self.steps) if s.start <= time <= s.end), None)


def export_trace(profiler: profile) -> bytes:
    """The trace of a finished torch.profiler as JSON."""
    with tempfile.TemporaryDirectory(prefix="voxtune-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return path.read_bytes()


def recorded_trace(data: bytes) -> bytes:
    """A trace for a record: without its own path, and with paths among the arguments of its events shortened."""
    if paths_are_recorded():
        return data
    trace = json.loads(data)
    trace.pop("traceName", None)
    for event in trace["traceEvents"]:
        if "args" in event:
            event["args"] = recorded_values(event["args"])
    others = recorded_values({key: value for key, value in trace.items() if key != "traceEvents"})
    return json.dumps({**others, "traceEvents": trace["traceEvents"]}).encode()


def decode_trace(data: bytes) -> Trace:
    return parse_trace(json.loads(data)["traceEvents"])


def read_trace(path: Path) -> Trace:
    """The trace of a gzipped JSON file."""
    with reading(path, "trace"):
        return parse_trace(parse_json(gunzip(path, "trace"), path, file_bytes=path.stat().st_size)["traceEvents"])


def parse_trace(events: list[dict[str, Any]]) -> Trace:
    trace = Trace()
    calls: dict[int, Span] = {}
    threads: dict[Any, list[Span | Allocation]] = {}
    for event in events:
        category = event.get("cat")
        if category in _HOST and event.get("ph") == "X":
            span = _span(event)
            threads.setdefault(span.thread, []).append(span)
            if category == "cpu_op":
                trace.operators.append(span)
            elif category == "user_annotation":
                trace.ranges.append(span)
            elif "correlation" in span.args:
                calls[span.args["correlation"]] = span
        elif event.get("name") == "[memory]":
            allocation = _allocation(event)
            trace.allocations.append(allocation)
            threads.setdefault(_thread(event), []).append(allocation)
    for items in threads.values():
        _nest(items)
    trace.work = _work(events, calls)
    trace.operators.sort(key=lambda s: s.start)
    trace.allocations.sort(key=lambda a: a.time)
    trace.steps = sorted((s for s in trace.ranges if s.name.startswith(STEP[:-1])), key=lambda s: s.start)
    return trace


def _thread(event: dict[str, Any]) -> Any:
    return event.get("pid"), event.get("tid")


def _span(event: dict[str, Any]) -> Span:
    start = float(event["ts"])
    end = start + float(event.get("dur", 0))
    return Span(str(event["name"]), event["cat"], _thread(event), start, end, event.get("args", {}))


def _allocation(event: dict[str, Any]) -> Allocation:
    args = event["args"]
    return Allocation(
        float(event["ts"]), args["Addr"], args["Bytes"], args["Device Type"], args.get("Total Allocated", 0), None
    )


def _nest(items: list[Span | Allocation]) -> None:
    """Sets `inside` in order of time. Of two spans that start together, the longer one encloses the other."""

    def order(item: Span | Allocation) -> tuple[float, float]:
        return (item.start, -item.end) if isinstance(item, Span) else (item.time, 0.0)

    open_spans: list[Span] = []
    for item in sorted(items, key=order):
        now = item.start if isinstance(item, Span) else item.time
        while open_spans and open_spans[-1].end < now:
            open_spans.pop()
        if isinstance(item, Allocation):
            item.inside = open_spans[-1] if open_spans else None
            continue
        # Rounding may end a call slightly after its range. A call that overlaps the end by more is not inside.
        while open_spans and item.end > open_spans[-1].end + 0.5:
            open_spans.pop()
        item.inside = open_spans[-1] if open_spans else None
        if item.category == "cpu_op":
            parent = item.inside.find(lambda s: s.category == "cpu_op") if item.inside else None
            if parent:
                parent.within += item.end - item.start
        open_spans.append(item)


def _work(events: list[dict[str, Any]], calls: dict[int, Span]) -> list[Work]:
    work = []
    for event in events:
        kind = _DEVICE.get(event.get("cat", ""))
        if kind is None or event.get("ph") != "X":
            continue
        args = event.get("args", {})
        call = calls.get(args.get("correlation", -1))
        work.append(Work(str(event["name"]), kind, float(event["ts"]), float(event.get("dur", 0)), args, call))
    # In order of launch. A CUDA graph launches many kernels in one call: those are in order of the device.
    work.sort(key=lambda w: (w.call.start if w.call else w.start, w.start))
    return work

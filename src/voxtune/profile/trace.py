"""A Kineto trace (torch.profiler's JSON) as nested spans: which operator, range and step each launch lies in."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEP = "voxtune::step#"
MODULE = "module::"
NODE = "autograd::engine::evaluate_function: "
_HOST = {"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"}
_DEVICE = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}


@dataclass(eq=False, slots=True)
class Span:
    """Something on the host with a beginning and an end; `inside` is the span that encloses it on its thread."""

    name: str
    category: str
    thread: Any
    start: float
    end: float
    args: dict[str, Any]
    inside: Span | None = None
    within: float = 0.0  # the time of operators directly inside

    @property
    def sequence(self) -> int:
        return int(self.args.get("Sequence number", -1))

    def around(self) -> Iterator[Span]:
        """This span and all that enclose it, from the inside out."""
        span: Span | None = self
        while span is not None:
            yield span
            span = span.inside

    def find(self, test: Callable[[Span], bool]) -> Span | None:
        return next((s for s in self.around() if test(s)), None)


@dataclass(eq=False, slots=True)
class Work:
    """Something on the device, and the host's call that asked for it."""

    name: str
    kind: str
    start: float
    duration: float
    args: dict[str, Any]
    call: Span | None


@dataclass(eq=False, slots=True)
class Allocation:
    """A change of the memory held: `bytes` is negative when it is given back."""

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


def read_trace(path: str | Path) -> Trace:
    path = Path(path)
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return parse_trace(json.loads(data)["traceEvents"])


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
    """Sets `inside` by one walk in order of time; of two that start together the longer encloses the other."""

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
        # A call that ends a hair after its range, by rounding, still lies in it; one that straddles it does not.
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
    # The order of asking; a graph asks once for many, and then the device's order tells.
    work.sort(key=lambda w: (w.call.start if w.call else w.start, w.start))
    return work

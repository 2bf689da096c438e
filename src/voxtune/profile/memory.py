"""The memory in use during a step, by category.

Weights, inputs, optimizer state and gradients are recognised by their addresses. Other memory is classified by its
lifetime: allocated in the forward pass, it is an activation; allocated and freed inside one operator, it is workspace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from voxtune.profile.trace import NODE, Allocation, Span, Trace

CATEGORIES = ("weights", "gradients", "optimizer", "activations", "workspace", "inputs", "other")
SAMPLES = 240


@dataclass
class KnownStorages:
    """Address -> (category, bytes) of the known tensors at one moment."""

    known: dict[int, tuple[str, int]] = field(default_factory=dict)

    @classmethod
    def snapshot(
        cls, network: nn.Module | None, optimizer: torch.optim.Optimizer | None, inputs: Iterable[Tensor]
    ) -> KnownStorages:
        storages = cls()
        parameters = [] if network is None else list(network.parameters())
        storages._add("inputs", inputs)
        storages._add("optimizer", _state(optimizer))
        storages._add("gradients", (p.grad for p in parameters if p.grad is not None))
        storages._add("weights", [*parameters, *(() if network is None else network.buffers())])
        return storages

    def _add(self, category: str, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.known[storage.data_ptr()] = (category, storage.nbytes())


def _state(optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    values = (v for state in (optimizer.state.values() if optimizer else ()) for v in state.values())
    return [v for v in values if isinstance(v, Tensor)]


def memory_rows(
    trace: Trace, snapshots: list[KnownStorages], phase: Callable[[Span | None, float], str], *, device: int
) -> list[dict[str, Any]]:
    """`snapshots[i]` is from before step i, `snapshots[i + 1]` from after it; `phase` maps a span to its phase."""
    rows = []
    for i, step in enumerate(trace.steps):
        events = [a for a in trace.allocations if a.device == device and step.start <= a.time <= step.end]
        categories = _categories(events, snapshots[i + 1], phase)
        rows += _timeline(i, step, events, categories, snapshots[i], on_device=device != 0)
    return rows


def peak_bytes(rows: list[dict[str, Any]]) -> int | None:
    totals: dict[tuple[int, float], float] = {}
    for row in rows:
        key = (row["step"], row["time_us"])
        totals[key] = totals.get(key, 0) + row["bytes"]
    return int(max(totals.values())) if totals else None


def _categories(
    events: list[Allocation], after: KnownStorages, phase: Callable[[Span | None, float], str]
) -> dict[int, str]:
    """Position of each allocation in `events` -> its category."""
    freed_at: dict[int, int] = {}
    open_at: dict[int, int] = {}
    for i, event in enumerate(events):
        if event.bytes > 0:
            open_at[event.address] = i
        elif event.address in open_at:
            freed_at[open_at.pop(event.address)] = i
    categories = {}
    for i, event in enumerate(events):
        if event.bytes > 0:
            end = events[freed_at[i]] if i in freed_at else None
            categories[i] = _category(event, end, after, phase(event.inside, event.time))
    return categories


def _category(event: Allocation, end: Allocation | None, after: KnownStorages, phase: str) -> str:
    if end is None and event.address in after.known:
        return after.known[event.address][0]
    operator = _operator(event.inside)
    if end is not None and operator is not None and operator is _operator(end.inside):
        return "workspace"
    return {"forward": "activations", "backward": "gradients", "optimizer": "workspace"}.get(phase, "other")


def _operator(span: Span | None) -> Span | None:
    """The outermost operator around `span`, inside the node that autograd evaluates."""
    outermost = None
    for s in span.around() if span else ():
        if s.name.startswith(NODE):
            break
        if s.category == "cpu_op" and s.name.startswith(("aten::", "voxtune::")):
            outermost = s
    return outermost


def _timeline(
    number: int,
    step: Span,
    events: list[Allocation],
    categories: dict[int, str],
    before: KnownStorages,
    *,
    on_device: bool,
) -> list[dict[str, Any]]:
    held = dict.fromkeys(CATEGORIES, 0.0)
    live = dict(before.known)
    for category, size in live.values():
        held[category] += size
    if on_device and events:
        # The device's allocator counts from the start of the process, the host's only from the start of the trace.
        held["other"] = max(0.0, events[0].total - events[0].bytes - sum(held.values()))
    samples = [(step.start, dict(held))]
    for i, event in enumerate(events):
        if event.bytes > 0:
            live[event.address] = (categories[i], event.bytes)
            held[categories[i]] += event.bytes
        else:
            category, size = live.pop(event.address, ("other", -event.bytes))
            held[category] = max(0.0, held[category] - size)
        samples.append((event.time, dict(held)))
    samples.append((step.end, dict(held)))
    used = [c for c in CATEGORIES if any(values[c] for _, values in samples)]
    return [
        {"step": number, "time_us": time - step.start, "category": c, "bytes": values[c]}
        for time, values in _thin(samples, step)
        for c in used
    ]


def _thin(samples: list[tuple[float, dict[str, float]]], step: Span) -> list[tuple[float, dict[str, float]]]:
    """At most SAMPLES moments: of each interval the one with the most memory, so that the peak is kept."""
    width = max(step.end - step.start, 1e-9) / SAMPLES
    best: dict[int, tuple[float, dict[str, float]]] = {}
    for sample in samples:
        slot = int((sample[0] - step.start) / width)
        if slot not in best or sum(sample[1].values()) >= sum(best[slot][1].values()):
            best[slot] = sample
    return [best[slot] for slot in sorted(best)]

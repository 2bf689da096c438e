"""Records every launch and every transfer of a rung between host and device. The tables are computed from these records."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from voxtune.kernels.convnext.launch import Launch
from voxtune.kernels.precompile import ready

Kind = Literal["kernel", "up", "down"]
# About 0.2 ms of GPU time, longer than the host needs to issue one launch.
BUSY_CYCLES = 400_000
# The operation that a kernel of the upper rungs implements, as named in the component table.
PARTS = {
    "voxtune_stem": "conv2d",
    "voxtune_depthwise": "conv2d",
    "voxtune_depthwise_dynamic": "conv2d",
    "voxtune_conv": "conv2d",
    "voxtune_conv_dynamic": "conv2d",
    "voxtune_block": "block",
    "voxtune_gate": "gate",
    "voxtune_time_terms": "linear",
    "voxtune_update": "update",
    "voxtune_begin": "update",
}


@dataclass(kw_only=True)
class Event:
    kind: Kind
    part: str  # the operation, as named in the component table
    name: str  # of the kernel
    bytes: int = 0
    seconds: float | None = None
    _marks: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def resolve(self) -> Event:
        """Reads the time from the CUDA events; the device must be synchronised."""
        if self._marks is not None:
            self.seconds, self._marks = self._marks[0].elapsed_time(self._marks[1]) / 1e3, None
        return self


class Machine:
    """A device that records its events. With `timed`, each event is timed on the device.

    A spin kernel runs before each event; otherwise the host's launch time would be included.
    """

    def __init__(self, device: torch.device | str, *, timed: bool = False):
        self.device, self.timed = torch.device(device), timed
        self.events: list[Event] = []

    def launch(
        self,
        part: str,
        kernel: Any,
        grid: tuple[int, ...],
        *arguments: Any,
        warps: int = 4,
        stages: int = 3,
        **constants: Any,
    ) -> None:
        with self._recorded(Event(kind="kernel", part=part, name=kernel.fn.__name__)):
            ready(kernel)[grid](*arguments, **constants, num_warps=warps, num_stages=stages)

    def run(self, launch: Launch) -> None:
        """Runs a prepared launch."""
        with self._recorded(Event(kind="kernel", part=PARTS.get(launch.name, launch.part), name=launch.name)):
            launch()

    def up_into(self, target: Tensor, x: Tensor, part: str, *, blocking: bool = True) -> None:
        """Copies into an existing device tensor; with `blocking=False` asynchronously (x must be pinned)."""
        with self._recorded(Event(kind="up", part=part, name="to the device", bytes=x.nbytes)):
            target.copy_(x, non_blocking=not blocking)

    def down_into(self, target: Tensor, x: Tensor, part: str, *, blocking: bool = True) -> None:
        with self._recorded(Event(kind="down", part=part, name="to the host", bytes=x.nbytes)):
            target.copy_(x, non_blocking=not blocking)

    def up(self, x: Tensor, part: str) -> Tensor:
        """Copies to the device. Without a GPU it still copies, so that the counts are real."""
        with self._recorded(Event(kind="up", part=part, name="to the device", bytes=x.nbytes)):
            return x.to(self.device) if self.device.type == "cuda" else x.clone()

    def down(self, x: Tensor, part: str) -> Tensor:
        with self._recorded(Event(kind="down", part=part, name="to the host", bytes=x.nbytes)):
            return x.to("cpu") if self.device.type == "cuda" else x.clone()

    def count(self, kind: Kind) -> int:
        return sum(event.kind == kind for event in self.events)

    def timed_events(self) -> list[Event]:
        """All events with their times; synchronises the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return [event.resolve() for event in self.events]

    @contextmanager
    def _recorded(self, event: Event) -> Iterator[None]:
        self.events.append(event)
        if not self.timed:
            yield
        elif self.device.type == "cuda":
            marks = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(BUSY_CYCLES)
            marks[0].record()
            yield
            marks[1].record()
            event._marks = marks
        else:
            start = time.perf_counter()
            yield
            event.seconds = time.perf_counter() - start

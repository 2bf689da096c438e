"""Second part of rung 9: how the weights are transferred to the GPU, and when the first step can start.

Three forms, as in the reports: synchronous (one copy after another, the host waits), asynchronous (all queued from pinned
memory, then the step), early (the same, but each operation waits only for its own weights).
"""

from __future__ import annotations

import time
from contextlib import nullcontext

import torch
from torch import Tensor

from voxtune.kernels.convnext.launch import Launch
from voxtune.ladder.program import Program

FORMS = ("synchronous", "asynchronous", "early")
# Kernel arguments that are weights.
NAMES = {
    "w_ptr", "w0_ptr", "w1_ptr", "w2_ptr", "bias_ptr", "shift_ptr", "slope_ptr", "shift1_ptr", "slope1_ptr", "shift2_ptr",
    "slope2_ptr", "residual_ptr", "v_ptr", "v0_ptr",
}  # fmt: skip


def weights_of(launch: Launch) -> list[Tensor]:
    named = zip(launch.kernel.arg_names, launch.arguments, strict=False)
    return [tensor for name, tensor in named if name in NAMES]


class Weights:
    """The weights of a program on the host, in the order of their use."""

    def __init__(self, program: Program):
        self.program = program
        self.on_gpu = program.device.type == "cuda"
        self.groups: list[list[tuple[Tensor, Tensor, Tensor]]] = []  # per unit: (device, pageable, pinned)
        seen: set[int] = set()
        for unit in program.units:
            group = []
            for launch in program.launches[unit.first : unit.last]:
                for device in weights_of(launch):
                    if device.data_ptr() not in seen:
                        seen.add(device.data_ptr())
                        host = device.to("cpu", copy=True)
                        group.append((device, host, host.pin_memory() if self.on_gpu else host))
            self.groups.append(group)
        self.stream = torch.cuda.Stream(program.device) if self.on_gpu else None

    @property
    def bytes(self) -> int:
        return sum(device.nbytes for group in self.groups for device, _, _ in group)

    def clear(self) -> None:
        """Fills the weights on the device with NaN, so that a step that runs too early is detected."""
        for group in self.groups:
            for device, _, _ in group:
                device.fill_(float("nan"))

    def first_step(self, form: str, terms: list[Tensor]) -> float:
        """Seconds from the first byte of the first weight to the end of the first step."""
        launches = list(self.program.step(terms, None))
        self._synchronise()
        start = time.perf_counter()
        if form == "synchronous":
            for group in self.groups:
                for device, host, _ in group:
                    device.copy_(host)
            self._steps(launches, [None] * len(self.groups))
        else:
            copied = self._queue()
            # Unless "early", everything waits for the last weight.
            events = copied if form == "early" else [copied[-1], *[None] * (len(copied) - 1)]
            self._steps(launches, events)
        self._synchronise()
        return time.perf_counter() - start

    def _queue(self) -> list[torch.cuda.Event | None]:
        """Queues all copies in order of use on a separate stream; returns an event per unit."""
        copied: list[torch.cuda.Event | None] = []
        with torch.cuda.stream(self.stream) if self.stream is not None else nullcontext():
            for group in self.groups:
                for device, _, pinned in group:
                    device.copy_(pinned, non_blocking=True)
                event = torch.cuda.Event() if self.stream is not None else None
                if event is not None:
                    event.record(self.stream)
                copied.append(event)
        return copied

    def _steps(self, launches: list[Launch], events: list[torch.cuda.Event | None]) -> None:
        for unit, event in zip(self.program.units, events, strict=True):
            if event is not None:
                torch.cuda.current_stream().wait_event(event)
            for launch in launches[unit.first : unit.last]:
                launch()

    def _synchronise(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

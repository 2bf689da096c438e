"""Rung 9's other half: how the weights reach the GPU, and when the first step can begin.

Three forms, as the reports have them: synchronous (one copy after the other, the host waits), asynchronous (all queued from
pinned memory, then the step), early (the same, and each operation waits for its own weights only). On boards whose GPU shares
the host's memory a fourth: managed memory, prefetched; elsewhere it is off.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from voxtune.kernels.convnext.launch import Launch
from voxtune.ladder.program import Program

FORMS = ("synchronous", "asynchronous", "early")
# The kernels' arguments that are weights: written once, read by every step.
NAMES = {
    "w_ptr", "w0_ptr", "w1_ptr", "w2_ptr", "bias_ptr", "shift_ptr", "slope_ptr", "shift1_ptr", "slope1_ptr", "shift2_ptr",
    "slope2_ptr", "residual_ptr", "v_ptr", "v0_ptr",
}  # fmt: skip


def weights_of(launch: Launch) -> list[Tensor]:
    named = zip(launch.kernel.arg_names, launch.arguments, strict=False)
    return [tensor for name, tensor in named if name in NAMES]


class Weights:
    """A program's weights on the host, in the order of their use."""

    def __init__(self, program: Program):
        self.program = program
        self.on_gpu = program.device.type == "cuda"
        self.groups: list[list[tuple[Tensor, Tensor, Tensor]]] = []  # of each unit: (device, pageable, pinned)
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
        """Poison on the device: a step that runs before its weights have come cannot go unseen."""
        for group in self.groups:
            for device, _, _ in group:
                device.fill_(float("nan"))

    def first_step(self, form: str, terms: list[Tensor], launch_all: Callable[[Launch], None] | None = None) -> float:
        """Seconds from the first byte of the first weight to the end of the first step."""
        run = launch_all or (lambda launch: launch())
        launches = list(self.program.step(terms, None))
        self._settle()
        began = time.perf_counter()
        if form == "synchronous":
            for group in self.groups:
                for device, host, _ in group:
                    device.copy_(host)
            self._steps(launches, [None] * len(self.groups), run)
        else:
            arrived = self._queue()
            # Not early: everything waits for the last weight.
            waits = arrived if form == "early" else [arrived[-1], *[None] * (len(arrived) - 1)]
            self._steps(launches, waits, run)
        self._settle()
        return time.perf_counter() - began

    def _queue(self) -> list[torch.cuda.Event | None]:
        """All copies, in order of use, on a stream of their own; an event for each unit."""
        arrived: list[torch.cuda.Event | None] = []
        with torch.cuda.stream(self.stream) if self.stream is not None else nullcontext():
            for group in self.groups:
                for device, _, pinned in group:
                    device.copy_(pinned, non_blocking=True)
                event = torch.cuda.Event() if self.stream is not None else None
                if event is not None:
                    event.record(self.stream)
                arrived.append(event)
        return arrived

    def _steps(
        self, launches: list[Launch], waits: list[torch.cuda.Event | None], run: Callable[[Launch], None]
    ) -> None:
        for unit, event in zip(self.program.units, waits, strict=True):
            if event is not None:
                torch.cuda.current_stream().wait_event(event)
            for launch in launches[unit.first : unit.last]:
                run(launch)

    def _settle(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


def unified(device: torch.device) -> bool:
    """Whether the GPU shares the host's memory, where managed memory saves a copy."""
    return device.type == "cuda" and bool(getattr(torch.cuda.get_device_properties(device), "is_integrated", False))


class Managed:
    """Weights in managed memory (cudaMallocManaged), prefetched to the GPU: one address on both sides.

    The host writes all of them before the first prefetch: a page that the GPU holds must not be touched from the host meanwhile.
    """

    def __init__(self, program: Program):
        self.cudart = _runtime()
        self.blocks: list[tuple[int, int]] = []
        self.moved: dict[int, Tensor] = {}
        self.program = program
        for launch in program.launches:
            for weight in weights_of(launch):
                if weight.data_ptr() not in self.moved:
                    self.moved[weight.data_ptr()] = self._copy_of(weight)
        program.launches = [self._renamed(launch) for launch in program.launches]

    def prefetch(self) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        device = self.program.device.index or 0
        recent = int((torch.version.cuda or "12").split(".")[0]) >= 13
        for address, size in self.blocks:
            where = [_Location(1, device), 0] if recent else [device]
            code = self.cudart.cudaMemPrefetchAsync(
                ctypes.c_void_p(address), ctypes.c_size_t(size), *where, ctypes.c_void_p(stream)
            )
            assert code == 0, f"cudaMemPrefetchAsync returned {code}"

    def _copy_of(self, weight: Tensor) -> Tensor:
        address = ctypes.c_void_p()
        size = max(weight.nbytes, 16)
        code = self.cudart.cudaMallocManaged(ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_uint(1))
        assert code == 0 and address.value, f"cudaMallocManaged returned {code}"
        raw = weight.detach().cpu().contiguous()
        ctypes.memmove(address.value, raw.data_ptr(), raw.nbytes)
        self.blocks.append((address.value, size))
        view = torch.as_tensor(_Shared(address.value, raw.nbytes), device=self.program.device)
        return view.view(weight.dtype).view(weight.shape)

    def _renamed(self, launch: Launch) -> Launch:
        given = tuple(
            self.moved[a.data_ptr()] if name in NAMES else a
            for name, a in zip(launch.kernel.arg_names, launch.arguments, strict=False)
        )
        return replace(launch, arguments=given)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Shared:
    """Bytes at an address, for torch to see as a tensor."""

    def __init__(self, address: int, count: int):
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "|u1", "data": (address, False), "version": 3}


def _runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded."""
    maps = Path("/proc/self/maps").read_text()
    found = re.search(r"(/\S*libcudart\.so\S*)", maps)
    return ctypes.CDLL(found[1] if found else "libcudart.so")

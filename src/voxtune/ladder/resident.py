"""Rungs 6 to 9: whole blocks, all tensors on the GPU, constant shapes, and transfers overlapped with computation.

All of them run the launches of program.py. They differ in what is transferred between host and device, and when.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from voxtune.kernels.convnext.conv import voxtune_conv
from voxtune.kernels.convnext.depthwise import voxtune_depthwise
from voxtune.kernels.convnext.dynamic import voxtune_conv_dynamic, voxtune_depthwise_dynamic
from voxtune.kernels.convnext.launch import Launch
from voxtune.ladder.machine import Machine
from voxtune.ladder.program import Program
from voxtune.ladder.sampling import begin
from voxtune.workloads.convnext import ConvNeXtUNet

# Maximum number of pixels of a block that runs as one kernel.
WHOLE = 16 * 16


class WholeBlocks:
    """Rung 6. A ConvNeXt block is one kernel if it fits, else three; activations are still transferred around each operation."""

    def __init__(
        self,
        network: ConvNeXtUNet,
        machine: Machine,
        size: tuple[int, int],
        batch: int = 1,
        *,
        dtype: torch.dtype = torch.bfloat16,
        whole: int = WHOLE,
        **options: Any,
    ):
        self.machine = machine
        self.program = Program(network, size, batch, dtype=dtype, whole=whole, **options)
        self.table = torch.empty((1, self.program.time[4].shape[0]), device=self.program.device)
        self.t = torch.zeros(1, dtype=torch.int64, device=self.program.device)
        self._host: dict[int, Tensor] = {}
        self.output_host = torch.empty_like(self.program.eps, device="cpu", pin_memory=self.on_gpu)
        self.image = torch.empty_like(self.output_host, pin_memory=self.on_gpu)

    @property
    def on_gpu(self) -> bool:
        return self.machine.device.type == "cuda"

    def __call__(self, x_NCHW: Tensor, t: int) -> Tensor:
        """The predicted noise in x; both are on the host."""
        self.enter(x_NCHW, t)
        launches = self.launches()
        for unit in self.program.units:
            mirror = self._mirror(unit.reads)
            self.machine.up_into(unit.reads, mirror, unit.kind)
            for launch in launches[unit.first : unit.last]:
                self.machine.run(launch)
            self.machine.down_into(self._mirror(unit.writes), unit.writes, unit.kind)
        return self._mirror(self.program.eps).view_as(x_NCHW).clone()

    def enter(self, x_NCHW: Tensor, t: int) -> None:
        """Copies the image and computes the time terms that the launches read."""
        self.machine.up_into(self.program.x, x_NCHW.flatten(2), "image")
        self.machine.run(begin(self.program, draw=False))
        self.machine.down_into(self._mirror(self.program.x4), self.program.x4, "image")
        self.t.fill_(t)
        self.machine.run(self.program.time_launch(self.t, self.table))

    def launches(self) -> list[Launch]:
        return [self.form(one) for one in self.program.step(self.program.terms_of(self.table)[0], None)]

    def form(self, launch: Launch) -> Launch:
        return launch

    def _mirror(self, view: Tensor) -> Tensor:
        """The host copy of a device view. There is one per buffer, so overlapping views share it."""
        key = view.untyped_storage().data_ptr()
        if key not in self._host:
            count = view.untyped_storage().nbytes() // view.element_size()
            self._host[key] = torch.zeros(count, dtype=view.dtype)
        return self._host[key].as_strided(view.shape, view.stride(), view.storage_offset())


class Resident(WholeBlocks):
    """Rung 7. Only the image is transferred, once in and once out. Shapes are run-time arguments."""

    def __call__(self, x_NCHW: Tensor, t: int) -> Tensor:
        self.enter(x_NCHW, t)
        for launch in self.launches():
            self.machine.run(launch)
        self.machine.down_into(self.output_host, self.program.eps, "image")
        return self.output_host.view_as(x_NCHW).clone()

    def enter(self, x_NCHW: Tensor, t: int) -> None:
        self.machine.up_into(self.program.x, x_NCHW.flatten(2), "image")
        self.machine.run(begin(self.program, draw=False))
        self.t.fill_(t)
        self.machine.run(self.program.time_launch(self.t, self.table))

    def form(self, launch: Launch) -> Launch:
        if launch.kernel is voxtune_depthwise:
            return replace(launch, kernel=voxtune_depthwise_dynamic)
        if launch.kernel is voxtune_conv and launch.constants["SPLIT"] == 1:
            return replace(launch, kernel=voxtune_conv_dynamic)
        return launch


class Constant(Resident):
    """Rung 8. Shapes are known to the compiler."""

    def form(self, launch: Launch) -> Launch:
        return launch


class Overlapped(Constant):
    """Rung 9. The image is transferred on a separate stream while the time network runs, without host synchronisation."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.side = torch.cuda.Stream(self.machine.device) if self.on_gpu else None
        self._planned: list[Launch] | None = None

    def enter(self, x_NCHW: Tensor, t: int) -> None:
        self.image.copy_(x_NCHW.flatten(2))
        main = torch.cuda.current_stream() if self.on_gpu else None
        if self.side is not None and main is not None:
            self.side.wait_stream(main)
        with torch.cuda.stream(self.side) if self.side is not None else nullcontext():
            self.machine.up_into(self.program.x, self.image, "image", blocking=not self.on_gpu)
            self.machine.run(begin(self.program, draw=False))
        self.t.fill_(t)
        self.machine.run(self.program.time_launch(self.t, self.table))
        if self.side is not None and main is not None:
            main.wait_stream(self.side)

    def __call__(self, x_NCHW: Tensor, t: int) -> Tensor:
        self.enter(x_NCHW, t)
        self._planned = self._planned or self.launches()
        for launch in self._planned:
            self.machine.run(launch)
        self.machine.down_into(self.output_host, self.program.eps, "image", blocking=not self.on_gpu)
        if self.on_gpu:
            torch.cuda.current_stream().synchronize()
        return self.output_host.view_as(x_NCHW).clone()

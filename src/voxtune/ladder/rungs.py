"""The eleven rungs: name, description, kernels and constructor."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from voxtune.diffusion import Schedule
from voxtune.diffusion.samplers import ddpm
from voxtune.errors import InputError
from voxtune.kernels.noise import noise_source
from voxtune.ladder.machine import Machine
from voxtune.ladder.operations import Naive, Reduced, Tiled
from voxtune.ladder.products import Fused, Products
from voxtune.ladder.program import Program
from voxtune.ladder.resident import WHOLE, Constant, Overlapped, Resident, WholeBlocks
from voxtune.ladder.sampling import Loop, begin
from voxtune.workloads.convnext import ConvNeXtUNet


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Network, size and schedule that all rungs of a run share."""

    network: ConvNeXtUNet
    size: tuple[int, int]
    schedule: Schedule
    timesteps: Sequence[int]
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16


class Graph:
    """Rung 10. All steps, noise and update included, as one CUDA graph."""

    def __init__(self, setting: Setting, machine: Machine, *, chained: bool = False, whole: int | None = None):
        """`chained`: programmatic dependent launch (Hopper); measured to be slower, so off by default."""
        self.machine = machine
        whole = (0 if machine.device.type == "cuda" else WHOLE) if whole is None else whole
        self.program = Program(setting.network, setting.size, setting.batch, dtype=setting.dtype, whole=whole)
        self.chained = chained
        self.setting = setting
        self.loop: Loop | None = None

    def __call__(self, x_NCHW: Tensor, t: int) -> Tensor:
        """One step with the same launches, outside the graph, for checks and tables."""
        self.machine.up_into(self.program.x, x_NCHW.flatten(2), "image")
        self.machine.run(begin(self.program, draw=False))
        table = torch.empty((1, self.program.time[4].shape[0]), device=self.program.device)
        self.machine.run(self.program.time_launch(torch.tensor([t]).to(self.program.device), table))
        for launch in self.program.step(self.program.terms_of(table)[0], None):
            self.machine.run(launch)
        return self.machine.down(self.program.eps, "image").view_as(x_NCHW)

    def sample(self, seed: int) -> Tensor:
        setting = self.setting
        self.loop = self.loop or Loop(self.program, setting.schedule, setting.timesteps, chained=self.chained)
        return self.loop.sample(seed)


class Auto:
    """Rung 11. What general plans achieve: optimize(model, plan="auto")."""

    def __init__(self, setting: Setting, machine: Machine):
        from voxtune.plan import optimize

        self.machine, self.setting = machine, setting
        network = setting.network
        device = next(network.parameters()).device
        x = torch.randn(setting.batch, network.config.channels, *setting.size, device=device)
        t = torch.zeros(setting.batch, dtype=torch.int64, device=device)
        self.fast = optimize(network, (x, t), "auto", precision="auto", cache=False, search=False)

    def __call__(self, x_NCHW: Tensor, t: int) -> Tensor:
        image = self.machine.up(x_NCHW, "image")
        with torch.no_grad():
            y = self.fast(image, torch.full((x_NCHW.shape[0],), t, device=image.device))
        return self.machine.down(y.float(), "image")

    @torch.no_grad()
    def sample(self, seed: int) -> Tensor:
        """Samples as `Model.sample` does: update and noise on the device."""
        setting, device = self.setting, self.machine.device
        shape = (setting.network.config.channels, *setting.size)
        noises = noise_source(seed, list(range(setting.batch)), shape, device)
        return ddpm(lambda x, t: self.fast(x, t).float(), noises(0), setting.schedule, setting.timesteps, noise=noises)


@dataclass(frozen=True, kw_only=True)
class Rung:
    number: int
    name: str
    does: str
    kernels: tuple[str, ...]
    make: Callable[[Setting, Machine], Any]


def _constructor(
    kind: Callable[..., Any], *, sized: bool = False, typed: bool = False
) -> Callable[[Setting, Machine], Any]:
    def make(setting: Setting, machine: Machine) -> Any:
        if sized:
            return kind(setting.network, machine, setting.size, setting.batch, dtype=setting.dtype)
        return kind(setting.network, machine, setting.dtype) if typed else kind(setting.network, machine)

    return make


_PLANNED = ("voxtune_depthwise", "voxtune_conv", "voxtune_gate", "voxtune_stem", "voxtune_time_terms")
RUNGS = (
    Rung(
        number=1,
        name="naive",
        does="direct convolution, one output per thread, separate padding, every activation copied to the host and back",
        kernels=("voxtune_direct", "voxtune_pad", "voxtune_norm_naive", "voxtune_unary", "voxtune_binary"),
        make=_constructor(Naive),
    ),
    Rung(
        number=2,
        name="shared memory",
        does="tiled convolution: the threads of a tile load its inputs once, together",
        kernels=("voxtune_tiled",),
        make=_constructor(Tiled),
    ),
    Rung(
        number=3,
        name="layer norm",
        does="layer norm by warp-level reduction, and by three kernels: partial sums, their reduction, normalise",
        kernels=("voxtune_norm_warp", "voxtune_norm_sums", "voxtune_norm_reduce", "voxtune_norm_apply"),
        make=_constructor(Reduced),
    ),
    Rung(
        number=4,
        name="tensor cores",
        does="im2col and a BF16 matrix product with float32 accumulation, bias in the epilogue; depthwise direct",
        kernels=("voxtune_im2col", "voxtune_product", "voxtune_depthwise_direct"),
        make=_constructor(Products, typed=True),
    ),
    Rung(
        number=5,
        name="fusions",
        does="bias + GELU; gate + residual + ReLU; sigmoid x skip; time add; layer norm into its neighbour",
        kernels=("voxtune_im2col", "voxtune_product", "voxtune_gate_product", "voxtune_gate_apply"),
        make=_constructor(Fused, typed=True),
    ),
    Rung(
        number=6,
        name="whole blocks",
        does="a ConvNeXt block in one kernel at 8x8 and 16x16, in three elsewhere",
        kernels=("voxtune_block", *_PLANNED),
        make=_constructor(WholeBlocks, sized=True),
    ),
    Rung(
        number=7,
        name="on the GPU",
        does="only the image is transferred; skips are written directly into their slice of a preallocated buffer",
        kernels=("voxtune_depthwise_dynamic", "voxtune_conv_dynamic", "voxtune_block", "voxtune_gate"),
        make=_constructor(Resident, sized=True),
    ),
    Rung(
        number=8,
        name="constant shapes",
        does="shapes as compile-time constants",
        kernels=("voxtune_block", *_PLANNED),
        make=_constructor(Constant, sized=True),
    ),
    Rung(
        number=9,
        name="overlap",
        does="weights uploaded in order of use, each operation waits for its own; image and time network overlapped",
        kernels=("voxtune_block", *_PLANNED),
        make=_constructor(Overlapped, sized=True),
    ),
    Rung(
        number=10,
        name="one graph",
        does="the whole loop, noise and update included, as one CUDA graph",
        kernels=(*_PLANNED, "voxtune_update", "voxtune_begin"),
        make=Graph,
    ),
    Rung(
        number=11,
        name="plans",
        does='what general plans achieve: optimize(model, plan="auto")',
        kernels=(),
        make=Auto,
    ),
)


def rungs_of(text: str | None) -> list[Rung]:
    """Parses a list such as '1,4,8-10'; None means all rungs."""
    if text is None:
        return list(RUNGS)
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not all(re.fullmatch("[0-9]{1,4}", number) for number in (first, last or first)):
            raise InputError(f"--rungs {text}: expected numbers from 1 to {len(RUNGS)}, such as 1,4,8-10")
        numbers |= set(range(int(first), int(last or first) + 1))
    if not numbers or not numbers <= {rung.number for rung in RUNGS}:
        raise InputError(f"--rungs {text}: rungs are numbered 1 to {len(RUNGS)}")
    return [rung for rung in RUNGS if rung.number in numbers]

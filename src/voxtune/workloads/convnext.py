"""The 2D ConvNeXt U-Net with attention gates, in plain eager PyTorch.

Legend: N batch, C channels, H W pixels, E width of the time embedding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from voxtune.errors import InputError
from voxtune.workloads.base import TrainingRecipe, Workload, levels_that_fit

BLOCKS = 2


@dataclass(frozen=True, kw_only=True)
class ConvNeXtConfig:
    family: ClassVar[str] = "convnext"

    channels: int = 3
    width: int = 32
    multipliers: tuple[int, ...] = (1, 2, 4, 8)

    def __post_init__(self) -> None:
        if self.channels < 1 or not self.multipliers or min(self.multipliers) < 1:
            raise InputError("channels, the number of multipliers and each multiplier must be >= 1")
        if self.width < 4 or self.width % 2:
            raise InputError(f"width {self.width}: must be even and >= 4 (sines and cosines of the time embedding)")
        if max(self.channels, len(self.multipliers), *self.multipliers) > 64 or self.width > 1024:
            raise InputError("channels, levels and multipliers must be <= 64, width <= 1024")

    @property
    def in_channels(self) -> int:
        return self.channels

    @property
    def out_channels(self) -> int:
        return self.channels

    @property
    def mask_channels(self) -> int:
        return 0

    @property
    def divisor(self) -> int:
        return 2 ** (len(self.multipliers) - 1)

    @property
    def dimensions(self) -> int:
        return 2

    @property
    def settings(self) -> dict[str, Any]:
        return {"base": self.width, "multipliers": self.multipliers}

    def build(self) -> nn.Module:
        return ConvNeXtUNet(self)

    def variant(self, size: tuple[int, ...], *, images: int, labels: int, **settings: Any) -> ConvNeXtConfig:
        multipliers = settings.get("multipliers", levels_that_fit(self.multipliers, size))
        if any(m != int(m) for m in multipliers):
            raise InputError(f"multipliers {multipliers[:8]}: {self.family} requires whole numbers")
        return ConvNeXtConfig(
            channels=images, width=settings.get("base", self.width), multipliers=tuple(int(m) for m in multipliers)
        )

    def likely_size(self) -> tuple[int, ...]:
        return (8 * self.divisor,) * 2

    @classmethod
    def infer(cls, state: Mapping[str, Tensor]) -> ConvNeXtConfig | None:
        if "init_conv.weight" not in state or "time_mlp.0.weight" not in state:
            return None
        width, channels = state["init_conv.weight"].shape[:2]
        multipliers: list[int] = []
        while any(k.startswith(f"downs.{len(multipliers)}.") for k in state):
            prefix = f"downs.{len(multipliers)}.2"
            weight = state[f"{prefix}.conv.weight"] if f"{prefix}.conv.weight" in state else state[f"{prefix}.weight"]
            multipliers.append(weight.shape[0] // width)
        return cls(channels=channels, width=width, multipliers=tuple(multipliers))


WORKLOADS = (
    Workload(
        name="convnext",
        network=ConvNeXtConfig(),
        size=(64, 64),
        steps=100,
        schedule="linear",
        # Batch, rate and loss of Ho et al. (2020) on CIFAR-10.
        recipe=TrainingRecipe(batch=128, accumulation=1, learning_rate=2e-4, loss="l2"),
    ),
)


def time_sinusoid(t_N: Tensor, width: int) -> Tensor:
    """Sines, then cosines, with frequencies exp(-ln(10000) i / (half - 1)). (N, width)"""
    half = width // 2
    index = torch.arange(half, dtype=torch.float32, device=t_N.device)
    angle = t_N[:, None].float() * torch.exp(-math.log(10000) * index / (half - 1))[None]
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


class ConvNextBlock(nn.Module):
    def __init__(self, channels: int, out_channels: int, time_width: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.GELU(), nn.Linear(time_width, channels))
        self.in_conv = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.block = nn.Sequential(
            nn.GroupNorm(1, channels),
            nn.Conv2d(channels, 2 * out_channels, 3, padding=1),
            nn.GELU(),
            nn.GroupNorm(1, 2 * out_channels),
            nn.Conv2d(2 * out_channels, out_channels, 3, padding=1),
        )
        self.residual_conv = nn.Identity() if channels == out_channels else nn.Conv2d(channels, out_channels, 1)

    def forward(self, x: Tensor, time_NE: Tensor) -> Tensor:
        h = self.in_conv(x) + self.mlp(time_NE)[:, :, None, None]
        return self.block(h) + self.residual_conv(x)


class AttentionGate(nn.Module):
    """Weights each pixel of the skip connection by decoder and skip features together."""

    def __init__(self, channels: int, skip_channels: int):
        super().__init__()
        self.gate_conv = nn.Conv2d(channels, channels, 1)
        self.residual_conv = nn.Conv2d(skip_channels, channels, 1)
        self.in_conv = nn.Conv2d(channels, 1, 1)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        weight_N1HW = self.in_conv(F.relu(self.gate_conv(x) + self.residual_conv(skip))).sigmoid()
        return weight_N1HW * skip


class Down(nn.Module):
    def __init__(self, channels: int, out_channels: int):
        super().__init__()
        self.conv = nn.Conv2d(4 * channels, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pixel_unshuffle(x, 2))


class Up(nn.Module):
    def __init__(self, channels: int, out_channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, out_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2, mode="nearest"))


class ConvNeXtUNet(nn.Module):
    """Predicts the noise in x_t from x_t and the integer time step."""

    def __init__(self, config: ConvNeXtConfig):
        super().__init__()
        self.config = config
        width, time_width = config.width, 4 * config.width
        widths = [width, *(width * m for m in config.multipliers)]
        levels = list(itertools.pairwise(widths))
        last = len(levels) - 1
        self.init_conv = nn.Conv2d(config.channels, width, 7, padding=3)
        self.time_mlp = nn.Sequential(nn.Linear(width, time_width), nn.GELU(), nn.Linear(time_width, time_width))
        self.downs = nn.ModuleList()
        for level, (inner, outer) in enumerate(levels):
            blocks = [ConvNextBlock(inner, inner, time_width) for _ in range(BLOCKS)]
            down = nn.Conv2d(inner, outer, 3, padding=1) if level == last else Down(inner, outer)
            self.downs.append(nn.ModuleList([*blocks, down]))
        self.mid_block1 = ConvNextBlock(widths[-1], widths[-1], time_width)
        self.mid_block2 = ConvNextBlock(widths[-1], widths[-1], time_width)
        self.ups = nn.ModuleList()
        for level, (inner, outer) in reversed(list(enumerate(levels))):
            layers: list[nn.Module] = []
            for _ in range(BLOCKS):
                layers += [AttentionGate(outer, inner), ConvNextBlock(outer + inner, outer, time_width)]
            layers.append(nn.Conv2d(outer, inner, 3, padding=1) if level == 0 else Up(outer, inner))
            self.ups.append(nn.ModuleList(layers))
        self.final_res_block = ConvNextBlock(2 * width, width, time_width)
        self.final_conv = nn.Conv2d(width, config.channels, 1)

    def forward(self, x_NCHW: Tensor, t_N: Tensor, cond: Tensor | None = None) -> Tensor:
        check_input(self.config, x_NCHW, cond)
        stem = h = self.init_conv(x_NCHW)
        time_NE = self.time_mlp(time_sinusoid(t_N, self.config.width).to(h.dtype))
        skips = []
        for level in self.downs:
            *blocks, down = level.children()
            for block in blocks:
                h = block(h, time_NE)
                skips.append(h)
            h = down(h)
        h = self.mid_block2(self.mid_block1(h, time_NE), time_NE)
        for level in self.ups:
            *layers, up = level.children()
            for gate, block in zip(layers[::2], layers[1::2], strict=True):
                h = block(torch.cat([h, gate(h, skips.pop())], dim=1), time_NE)
            h = up(h)
        return self.final_conv(self.final_res_block(torch.cat([h, stem], dim=1), time_NE))


def check_input(config: ConvNeXtConfig, x: Tensor, cond: Tensor | None) -> None:
    """Raises for an input of the wrong shape."""
    if cond is not None:
        raise InputError("this network is unconditional and takes no mask")
    if x.dim() != 4 or x.shape[1] != config.channels:
        raise InputError(f"expected images as (batch, {config.channels}, height, width), got shape {tuple(x.shape)}")
    invalid = [n for n in x.shape[2:] if n % config.divisor]
    if invalid:
        raise InputError(f"size {tuple(x.shape[2:])}: every dimension must be a multiple of {config.divisor}")

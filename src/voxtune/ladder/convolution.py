"""One convolution as a prepared launch: packed weights, tile and buffers.

Legend: M pixels of all samples, C channels; a view (M, C) of a wider buffer is that buffer's slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from voxtune.kernels.convnext.conv import voxtune_conv
from voxtune.kernels.convnext.launch import Launch
from voxtune.kernels.convnext.packing import PackedConv
from voxtune.kernels.convnext.tiles import Tile, power_of_two

EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class Image:
    """A (M, C) view of a buffer, its resolution, and the partial sums stored by the kernel that wrote it."""

    data: Tensor
    side: tuple[int, int]
    sums: Tensor | None = None

    @property
    def channels(self) -> int:
        return self.data.shape[1]

    @property
    def stride(self) -> int:
        return self.data.stride(0)


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One operation of the network: a range of launches, the view they read and the view they write."""

    kind: str
    part: str
    reads: Tensor
    writes: Tensor
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """Arguments of the launch of one convolution."""

    packed: PackedConv
    tile: Tile
    x: Image
    source2: Image
    into: Tensor
    side: tuple[int, int]
    rows: int
    shape: dict[str, Any]
    after: dict[str, Any]
    batch: int
    precision: str
    part: str

    @property
    def padded(self) -> int:
        return self.packed.weight.shape[1]

    def sums(self) -> Tensor:
        tiles = self.side[0] * self.side[1] // self.tile.block_m * (self.padded // self.tile.block_k)
        return torch.empty((self.batch, 2, tiles), device=self.into.device)

    def launch(self, sums: Tensor | None, parts: Tensor, count: Tensor) -> Launch:
        packed, tile = self.packed, self.tile
        read = self.x.sums if self.after["NORM"] else None
        tiles = self.rows // tile.block_m * (self.padded // tile.block_k)
        constants = {
            "H": self.side[0],
            "W": self.side[1],
            "C": packed.channels,
            "K": packed.out_channels,
            "KP": self.padded,
            "LD2": self.source2.stride,
            "LDY": self.into.stride(0),
            "ROWS": self.rows,
            **self.after,
            "READ": 1 if read is None else read.shape[2],
            "BLOCK_R": 1 if read is None else power_of_two(read.shape[2]),
            "EPS": EPS,
            "SPLIT": tile.split,
            "CHAINED": False,
            **self.shape,
            "C2": self.source2.channels,
            "LDX": self.x.stride,
            "SIDE": packed.side,
            "BLOCK_M": tile.block_m,
            "BLOCK_K": tile.block_k,
            "BLOCK_C": tile.block_c,
            "WAYS": tile.ways,
            "NEAR": tile.near,
            "PRECISION": self.precision,
        }
        slope = packed.shift if packed.slope is None else packed.slope
        read = packed.shift if read is None else read
        residual = packed.weight if packed.residual is None else packed.residual
        out = packed.shift if sums is None else sums
        x2 = self.source2.data
        turns = tile.turns(packed.side**2 * packed.channels), tile.turns(self.source2.channels)
        return Launch(
            kernel=voxtune_conv,
            programs=tiles * tile.parts(residual=self.after["RESIDUAL"] == 2),
            arguments=(
                self.x.data,
                packed.weight,
                x2,
                residual,
                packed.shift,
                slope,
                read,
                self.into,
                out,
                parts,
                count,
                *turns,
            ),
            constants=constants,
            warps=tile.warps,
            stages=tile.stages,
            part=self.part,
        )

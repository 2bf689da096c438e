"""The 2D network as a list of prepared launches over preallocated buffers, for the upper rungs of the ladder.

A skip is written into its slice of the decoder block's input and gated there; concatenation, padding, upsampling and
unshuffling have no kernels of their own. A block is three launches (depthwise, two convolutions).

Legend: M pixels of all samples, C channels; a view (M, C) of a wider buffer is that buffer's slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from voxtune.errors import InputError
from voxtune.kernels.convnext.depthwise import pack_depthwise, voxtune_depthwise
from voxtune.kernels.convnext.launch import Launch
from voxtune.kernels.convnext.packing import pack_conv, unshuffled
from voxtune.kernels.convnext.stem import CHANNELS, pack_stem, voxtune_stem
from voxtune.kernels.convnext.tiles import Tile, conv_tile, depthwise_tile, divisor, power_of_two
from voxtune.kernels.convnext.time_terms import voxtune_time_terms
from voxtune.kernels.convnext.update import voxtune_update
from voxtune.ladder.convolution import Convolution, Image, Unit
from voxtune.ladder.gates import gate_launch
from voxtune.ladder.whole import whole_block
from voxtune.workloads.convnext import ConvNextBlock, ConvNeXtUNet, Down, Up

Tiles = Callable[[int, int, int, int], Tile]


class Program:
    """The launches of one step. `step` binds the time terms and the sampler coefficients of a step to them."""

    def __init__(
        self,
        network: ConvNeXtUNet,
        size: tuple[int, int],
        batch: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        tiles: Tiles | None = None,
        processors: int | None = None,
        whole: int = 0,
    ):
        """Blocks of at most `whole` pixels are one launch each."""
        check_size(network, size)
        self.network, self.size, self.batch, self.dtype = network, size, batch, dtype
        self.device = next(network.parameters()).device
        self.processors = processors or processors_of(self.device)
        self.tiles = tiles or (lambda *s: conv_tile(*s, processors=self.processors, bytes_each=dtype.itemsize))
        self.precision = "ieee"
        self.whole = whole
        self.counter = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.launches: list[Launch] = []
        self.tile_requests: list[tuple[int, int, int, int]] = []  # the shape of every convolution, as passed to `tiles`
        self.blocks: list[ConvNextBlock] = []
        self.units: list[Unit] = []
        channels = network.config.channels
        pixels = size[0] * size[1]
        self.x = torch.zeros((batch, channels, pixels), device=self.device)
        self.x4 = torch.zeros((batch * pixels, CHANNELS), dtype=dtype, device=self.device)
        self.eps = torch.zeros_like(self.x)
        self.seed = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.index = torch.arange(batch, dtype=torch.int64, device=self.device)
        self._scratch: dict[tuple[str, int, int], Tensor] = {}
        # Partial results of split sums; the counters are zero before and after every launch.
        self.parts = torch.empty(4, device=self.device)
        self.count = torch.zeros(4, dtype=torch.int32, device=self.device)
        self._build()
        self.time = self._time()
        self.launches = [
            one.with_arguments(parts_ptr=self.parts, count_ptr=self.count)
            if "parts_ptr" in one.kernel.arg_names
            else one
            for one in self.launches
        ]

    # -- buffers

    def buffer(self, side: tuple[int, int], channels: int) -> Tensor:
        return torch.empty((self.batch * side[0] * side[1], channels), dtype=self.dtype, device=self.device)

    def scratch(self, name: str, side: tuple[int, int], channels: int) -> Tensor:
        """A buffer that is used within one block; blocks of equal size share it."""
        key = (name, side[0] * side[1], channels)
        if key not in self._scratch:
            self._scratch[key] = self.buffer(side, channels)
        return self._scratch[key]

    # -- the network

    def _build(self) -> None:
        net: Any = self.network
        sides = [self.size]
        for _ in net.downs[:-1]:
            sides.append((sides[-1][0] // 2, sides[-1][1] // 2))
        width = net.config.width
        # For each level, the inputs of its two decoder blocks: decoder channels, then skip. The first one reads the second skip.
        inner = [level[0].in_conv.in_channels for level in net.downs]
        outer = [*inner[1:], net.mid_block1.in_conv.in_channels]
        joint = [[self.buffer(s, o + i) for _ in range(2)] for s, o, i in zip(sides, outer, inner, strict=True)]
        last = self.buffer(self.size, 2 * width)
        h = self._stem(last[:, width:])
        for level, (first, second, down) in enumerate(net.downs):
            h = self._block(first, h, joint[level][1][:, outer[level] :], f"downs.{level}.0")
            h = self._block(second, h, joint[level][0][:, outer[level] :], f"downs.{level}.1")
            h = self._between(
                down, h, self.buffer(sides[min(level + 1, len(sides) - 1)], outer[level]), f"downs.{level}.2"
            )
        h = self._block(net.mid_block1, h, self.buffer(h.side, h.channels), "mid_block1")
        h = self._block(net.mid_block2, h, joint[-1][0][:, : outer[-1]], "mid_block2")
        for step, layers in enumerate(net.ups):
            level = len(net.ups) - 1 - step
            gate1, block1, gate2, block2, up = layers
            name = f"ups.{step}"
            h = self._gate(gate1, h, joint[level][0], f"{name}.0")
            h = self._block(block1, h, joint[level][1][:, : outer[level]], f"{name}.1")
            h = self._gate(gate2, h, joint[level][1], f"{name}.2")
            h = self._block(block2, h, self.buffer(h.side, outer[level]), f"{name}.3")
            into = joint[level - 1][0][:, : outer[level - 1]] if level else last[:, :width]
            h = self._between(up, h, into, f"{name}.4")
        h = Image(data=last, side=self.size)
        h = self._block(net.final_res_block, h, self.buffer(self.size, width), "final_res_block")
        self._end(h)

    def _stem(self, into: Tensor) -> Image:
        conv: Any = self.network.init_conv
        K, (H, W) = conv.out_channels, self.size
        weight = pack_stem(conv.weight, self.dtype).to(self.device)
        KP = weight.shape[1]
        bias = F.pad(conv.bias.detach().float(), (0, KP - K)).contiguous()
        rows = self.batch * H * W
        block_k = divisor(KP, 32)
        block_m = divisor(H * W, 32 if self.batch == 1 else 64)
        self.launches.append(
            Launch(
                kernel=voxtune_stem,
                programs=rows // block_m * (KP // block_k),
                arguments=(self.x4, weight, bias, into),
                constants={
                    "H": H,
                    "W": W,
                    "K": K,
                    "KP": KP,
                    "LDY": into.stride(0),
                    "BLOCK_M": max(16, block_m),
                    "BLOCK_K": block_k,
                    "BLOCK_C": 128,
                    "PRECISION": self.precision,
                    "CHAINED": False,
                },
                part="init_conv",
            )
        )
        self._unit("stem", "init_conv", self.x4, into)
        return Image(data=into, side=self.size)

    def _unit(self, kind: str, part: str, reads: Tensor, writes: Tensor) -> None:
        """Groups the launches since the last unit as one operation of the network, which reads one view and writes one."""
        first = self.units[-1].last if self.units else 0
        self.units.append(Unit(kind=kind, part=part, reads=reads, writes=writes, first=first, last=len(self.launches)))

    def _depthwise(self, block: ConvNextBlock, x: Image, part: str) -> Image:
        (H, W), C = x.side, x.channels
        tile = depthwise_tile(self.batch * H * W, x.side, C, self.processors)
        tiles = tile.tiles(H * W, C)
        y = self.scratch("depthwise", x.side, C)
        sums = torch.empty((self.batch, 2, tiles), device=self.device)
        weight = pack_depthwise(block.in_conv.weight, self.dtype)
        term = torch.zeros(C, device=self.device)
        self.blocks.append(block)
        self.launches.append(
            Launch(
                kernel=voxtune_depthwise,
                programs=self.batch * tiles,
                arguments=(x.data, weight, term, y, sums),
                constants={
                    "H": H,
                    "W": W,
                    "C": C,
                    "LDX": x.stride,
                    "RUN": tile.run,
                    "BLOCK_P": tile.block_p,
                    "BLOCK_C": tile.block_c,
                    "BLOCK_I": tile.block_i,
                    "CHAINED": False,
                },
                warps=tile.warps,
                part=f"{part}.in_conv",
            )
        )
        return Image(data=y, side=x.side, sums=sums)

    def tile(self, rows: int, pixels: int, depth: int, channels: int) -> Tile:
        self.tile_requests.append((rows, pixels, depth, channels))
        return self.tiles(rows, pixels, depth, channels)

    def reserve(self, parts: int, tiles: int) -> None:
        """Grows the buffers for split sums. They are used within one launch, so one buffer of the largest size serves all."""
        if self.parts.numel() < parts:
            self.parts = torch.empty(parts, device=self.device)
        if self.count.numel() < tiles:
            self.count = torch.zeros(tiles, dtype=torch.int32, device=self.device)

    def _block(self, block: ConvNextBlock, x: Image, into: Tensor, part: str) -> Image:
        if x.side[0] * x.side[1] <= self.whole:
            self.blocks.append(block)
            self.launches += whole_block(self, block, x, into, part)
            self._unit("block", part, x.data, into)
            return Image(data=into, side=x.side)
        h = self._depthwise(block, x, part)
        layers: Any = block.block
        norm1, conv1, _, norm2, conv2 = layers
        between = self.scratch("between", x.side, conv1.out_channels)
        h = self._conv(conv1.weight, conv1.bias, h, between, f"{part}.block.1", norm=norm1, gelu=True, sums=True)
        y = self._conv(
            conv2.weight, conv2.bias, h, into, f"{part}.block.4", norm=norm2, shortcut=(x, block.residual_conv)
        )
        self._unit("block", part, x.data, into)
        return y

    def _between(self, layer: nn.Module, x: Image, into: Tensor, part: str) -> Image:
        """Down, Up, or the convolution of the last level."""
        H, W = x.side
        conv: Any = layer.conv if isinstance(layer, (Down, Up)) else layer
        weight = unshuffled(conv.weight) if isinstance(layer, Down) else conv.weight
        side = (H // 2, W // 2) if isinstance(layer, Down) else (2 * H, 2 * W) if isinstance(layer, Up) else x.side
        stride, double = 2 if isinstance(layer, Down) else 1, isinstance(layer, Up)
        y = self._conv(weight, conv.bias, x, into, part, side=side, stride=stride, double=double)
        self._unit("between", part, x.data, into)
        return y

    def _conv(
        self,
        weight: Tensor,
        bias: Tensor | None,
        x: Image,
        into: Tensor,
        part: str,
        *,
        side: tuple[int, int] | None = None,
        stride: int = 1,
        double: bool = False,
        norm: nn.GroupNorm | None = None,
        shortcut: tuple[Image, nn.Module] | None = None,
        gelu: bool = False,
        sums: bool = False,
    ) -> Image:
        assert bias is not None
        H, W = side or x.side
        K, C, taps, _ = weight.shape
        rows = self.batch * H * W
        tile = self.tile(rows, H * W, taps * taps * C, K)
        residual_conv: Any = shortcut[1] if shortcut and isinstance(shortcut[1], nn.Conv2d) else None
        packed = pack_conv(
            weight,
            bias,
            norm=None if norm is None else (norm.weight, norm.bias),
            residual=None if residual_conv is None else (residual_conv.weight, residual_conv.bias),
            dtype=self.dtype,
            block_c=tile.block_c * tile.ways,
            block_k=tile.block_k,
        )
        source2 = shortcut[0] if shortcut else x
        convolution = Convolution(
            packed=packed,
            tile=tile,
            x=x,
            source2=source2,
            into=into,
            side=(H, W),
            rows=rows,
            shape={"STRIDE": stride, "DOUBLE": double},
            after={
                "NORM": norm is not None,
                "RESIDUAL": 2 if residual_conv else 1 if shortcut else 0,
                "GELU": gelu,
                "SUMS": sums,
            },
            batch=self.batch,
            precision=self.precision,
            part=part,
        )
        out_sums = convolution.sums() if sums else None
        self.reserve(*tile.scratch_size(rows, convolution.padded))
        self.launches.append(convolution.launch(out_sums, self.parts, self.count))
        return Image(data=into, side=(H, W), sums=out_sums)

    def _gate(self, gate: Any, x: Image, joint: Tensor, part: str) -> Image:
        self.launches.append(gate_launch(self, gate, x, joint, part))
        self._unit("gate", part, joint, joint[:, x.channels :])
        return Image(data=joint, side=x.side)

    def _end(self, h: Image) -> None:
        conv: Any = self.network.final_conv
        V, C, K = self.size[0] * self.size[1], conv.out_channels, conv.in_channels
        block_v = divisor(V, 64)
        row = torch.zeros(8, device=self.device)
        weight, bias = conv.weight.detach().flatten(1).float().contiguous(), conv.bias.detach().float()
        self.launches.append(
            Launch(
                kernel=voxtune_update,
                programs=self.batch * V // block_v,
                arguments=(h.data, weight, bias, self.x, self.x4, self.eps, row, self.seed, self.index),
                constants={
                    "V": V,
                    "C": C,
                    "K": K,
                    "LDH": h.stride,
                    "BLOCK_K": power_of_two(K),
                    "BLOCK_V": block_v,
                    "KEEP": False,
                    "CHAINED": False,
                },
                warps=1,
                part="final_conv",
            )
        )
        self._unit("end", "final_conv", h.data, self.eps)

    # -- steps

    def time_terms(self, steps: list[int]) -> list[list[Tensor]]:
        """For each step and block, bias + time term (C,) float32: the time network for all steps at once."""
        t_S = torch.tensor(steps, dtype=torch.int64).to(self.device)
        table = torch.empty((len(steps), self.time[4].shape[0]), device=self.device)
        self.time_launch(t_S, table)()
        return self.terms_of(table)

    def terms_of(self, table_ST: Tensor) -> list[list[Tensor]]:
        """Slices of the table: for each step, for each block."""
        return [list(row.split([block.in_conv.in_channels for block in self.blocks])) for row in table_ST]

    def time_launch(self, t_S: Tensor, table_ST: Tensor) -> Launch:
        E, D = self.time[0].shape
        return Launch(
            kernel=voxtune_time_terms,
            programs=(-(-table_ST.shape[1] // 32), t_S.shape[0]),
            arguments=(t_S, *self.time, table_ST, table_ST.shape[1]),
            constants={"D": D, "E": E, "BLOCK_D": power_of_two(D), "BLOCK_E": power_of_two(E), "BLOCK_T": 32},
            part="time_mlp",
        )

    def _time(self) -> tuple[Tensor, ...]:
        """Weights of the time network, and the time layers of all blocks as one; a block's term includes its depthwise bias."""
        net: Any = self.network
        weights = [net.time_mlp[0].weight, net.time_mlp[0].bias, net.time_mlp[2].weight, net.time_mlp[2].bias]
        layers: list[Any] = [(block.mlp[1], block.in_conv) for block in self.blocks]
        block_weights = torch.cat([layer.weight.detach() for layer, _ in layers])
        bias = torch.cat([layer.bias.detach() + conv.bias.detach() for layer, conv in layers])
        return tuple(w.detach().float().contiguous() for w in (*weights, block_weights, bias))

    def step(self, terms: list[Tensor], row: Tensor | None, *, chained: bool = False) -> Iterator[Launch]:
        """The launches of a step. Without a row of sampler coefficients the predicted noise is written to `eps`."""
        remaining, term = iter(terms), terms[0]
        for planned in self.launches:
            launch = planned
            if "term_ptr" in launch.kernel.arg_names:
                # A block that runs in several phases has one term.
                term = next(remaining) if launch.constants.get("FIRST", 0) == 0 else term
                launch = launch.with_arguments(term_ptr=term)
            elif launch.kernel is voxtune_update:
                launch = replace(launch, constants={**launch.constants, "KEEP": row is None})
                launch = launch if row is None else launch.with_arguments(row_ptr=row)
            yield launch.chained() if chained else launch


def processors_of(device: torch.device) -> int:
    """Number of multiprocessors; 1 on a CPU, where Triton's interpreter runs programs one after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def check_size(network: ConvNeXtUNet, size: tuple[int, int]) -> None:
    multiple = network.config.divisor
    if any(s % multiple or s // multiple < 4 for s in size) or network.config.channels > CHANNELS:
        raise InputError(
            f"size {size[0]}x{size[1]}: height and width must be multiples of {multiple} and at least {4 * multiple}, "
            f"with at most {CHANNELS} image channels"
        )

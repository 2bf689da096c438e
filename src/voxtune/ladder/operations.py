"""Rungs 1 to 3: the network one operation at a time, in float32; activations are copied to the host and back around each.

Between two operations a value is a tensor on the host. Weights stay on the device. Each rung overrides the operations in its
name and inherits the others.

Legend: N batch, C K channels, H W pixels, E width of the time embedding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from voxtune.kernels.convnext.direct import voxtune_direct, voxtune_pad, voxtune_tiled
from voxtune.kernels.convnext.elementwise import (
    voxtune_binary,
    voxtune_concat,
    voxtune_linear,
    voxtune_unary,
    voxtune_unshuffle,
    voxtune_upsample2d,
)
from voxtune.kernels.convnext.layer_norm import (
    voxtune_norm_apply,
    voxtune_norm_naive,
    voxtune_norm_reduce,
    voxtune_norm_sums,
    voxtune_norm_warp,
)
from voxtune.kernels.convnext.tiles import power_of_two
from voxtune.ladder.machine import Machine
from voxtune.workloads.convnext import ConvNeXtUNet, Down, Up, time_sinusoid

EPS = 1e-5
# The interpreter's time depends on the number of programs, not on their size.
CPU_BLOCK = 1 << 16


class Naive:
    """Rung 1. One output per thread, separate padding before every convolution."""

    def __init__(self, network: ConvNeXtUNet, machine: Machine):
        self.network, self.machine = network, machine
        self.threads = 256 if machine.device.type == "cuda" else CPU_BLOCK

    # -- the network

    def __call__(self, x_NCHW: Tensor, t: int) -> Tensor:
        """The predicted noise in x; both are on the host."""
        net: Any = self.network
        t_N = torch.full((x_NCHW.shape[0],), t)
        stem = h = self.conv2d(x_NCHW, net.init_conv)
        time_NE = time_sinusoid(t_N, net.config.width)
        time_NE = self.linear(self.unary("gelu", self.linear(time_NE, net.time_mlp[0])), net.time_mlp[2])
        skips = []
        for first, second, down in net.downs:
            for block in (first, second):
                h = self.block(block, h, time_NE)
                skips.append(h)
            h = self.between(down, h)
        h = self.block(net.mid_block2, self.block(net.mid_block1, h, time_NE), time_NE)
        for gate1, block1, gate2, block2, up in net.ups:
            for gate, block in ((gate1, block1), (gate2, block2)):
                h = self.block(block, self.concat(h, self.gate(gate, h, skips.pop())), time_NE)
            h = self.between(up, h)
        return self.conv2d(self.block(net.final_res_block, self.concat(h, stem), time_NE), net.final_conv)

    def block(self, block: Any, x: Tensor, time_NE: Tensor) -> Tensor:
        h = self.conv2d(x, block.in_conv)
        h = self.binary("add", h, self.linear(self.unary("gelu", time_NE), block.mlp[1]), "channel")
        h = self.conv2d(self.layer_norm(h, block.block[0]), block.block[1])
        h = self.conv2d(self.layer_norm(self.unary("gelu", h), block.block[3]), block.block[4])
        shortcut = self.conv2d(x, block.residual_conv) if isinstance(block.residual_conv, nn.Conv2d) else x
        return self.binary("add", h, shortcut, "all")

    def gate(self, gate: Any, x: Tensor, skip: Tensor) -> Tensor:
        hidden = self.binary("add", self.conv2d(x, gate.gate_conv), self.conv2d(skip, gate.residual_conv), "all")
        weight = self.unary("sigmoid", self.conv2d(self.unary("relu", hidden), gate.in_conv))
        return self.binary("multiply", skip, weight, "pixel")

    def between(self, layer: nn.Module, x: Tensor) -> Tensor:
        if isinstance(layer, Down):
            return self.conv2d(self.unshuffle(x), layer.conv)
        if isinstance(layer, Up):
            return self.conv2d(self.upsample(x), layer.conv)
        return self.conv2d(x, layer)

    # -- one operation each: copy to the device, kernel, copy back

    def conv2d(self, x: Tensor, conv: Any) -> Tensor:
        N, C, H, W = x.shape
        side, K = conv.kernel_size[0], conv.out_channels
        x = self.pad(x, side // 2) if side > 1 else x
        x_device = self.up(x, "conv2d")
        y = x_device.new_empty((N, K, H, W))
        each = C // conv.groups
        self._launch(
            "conv2d",
            voxtune_direct,
            y.numel(),
            x_device,
            conv.weight,
            conv.bias,
            y,
            y.numel(),
            C,
            K,
            H,
            W,
            each,
            SIDE=side,
        )
        return self.down(y, "conv2d")

    def pad(self, x: Tensor, border: int) -> Tensor:
        N, C, H, W = x.shape
        x_device = self.up(x, "conv2d_pad")
        y = x_device.new_empty((N, C, H + 2 * border, W + 2 * border))
        self._launch("conv2d_pad", voxtune_pad, y.numel(), x_device, y, y.numel(), H, W, R=border)
        return self.down(y, "conv2d_pad")

    def layer_norm(self, x: Tensor, norm: Any) -> Tensor:
        x_device = self.up(x, "layer_norm")
        y = torch.empty_like(x_device)
        V, pixels = x[0].numel(), x.shape[2] * x.shape[3]
        block = 128 if self.machine.device.type == "cuda" else CPU_BLOCK
        self.machine.launch(
            "layer_norm",
            voxtune_norm_naive,
            (x.shape[0],),
            x_device,
            norm.weight,
            norm.bias,
            y,
            V,
            pixels,
            EPS=EPS,
            BLOCK=block,
        )
        return self.down(y, "layer_norm")

    def linear(self, x: Tensor, layer: Any) -> Tensor:
        x_device = self.up(x, "linear")
        K, C = layer.weight.shape
        y = x_device.new_empty((x.shape[0], K))
        self._launch("linear", voxtune_linear, y.numel(), x_device, layer.weight, layer.bias, y, y.numel(), C, K)
        return self.down(y, "linear")

    def unary(self, name: str, x: Tensor) -> Tensor:
        x_device = self.up(x, name)
        y = torch.empty_like(x_device)
        self._launch(name, voxtune_unary, y.numel(), x_device, y, y.numel(), NAME=name)
        return self.down(y, name)

    def binary(self, name: str, a: Tensor, b: Tensor, broadcast: str) -> Tensor:
        part = "identity" if name == "add" else "element_matmul"
        left, right = self.up(a, part), self.up(b, part)
        y = torch.empty_like(left)
        C, pixels = a.shape[1], a.shape[2] * a.shape[3]
        self._launch(part, voxtune_binary, y.numel(), left, right, y, y.numel(), C, pixels, NAME=name, WHAT=broadcast)
        return self.down(y, part)

    def concat(self, a: Tensor, b: Tensor) -> Tensor:
        left, right = self.up(a, "concat"), self.up(b, "concat")
        y = left.new_empty((a.shape[0], a.shape[1] + b.shape[1], *a.shape[2:]))
        self._launch("concat", voxtune_concat, y.numel(), left, right, y, y.numel(), a[0].numel(), b[0].numel())
        return self.down(y, "concat")

    def upsample(self, x: Tensor) -> Tensor:
        N, C, H, W = x.shape
        x_device = self.up(x, "upsample")
        y = x_device.new_empty((N, C, 2 * H, 2 * W))
        self._launch("upsample", voxtune_upsample2d, y.numel(), x_device, y, y.numel(), H, W)
        return self.down(y, "upsample")

    def unshuffle(self, x: Tensor) -> Tensor:
        N, C, H, W = x.shape
        x_device = self.up(x, "unshuffle")
        y = x_device.new_empty((N, 4 * C, H // 2, W // 2))
        self._launch("unshuffle", voxtune_unshuffle, y.numel(), x_device, y, y.numel(), H, W)
        return self.down(y, "unshuffle")

    # -- helpers

    def up(self, x: Tensor, part: str) -> Tensor:
        return self.machine.up(x, part)

    def down(self, x: Tensor, part: str) -> Tensor:
        return self.machine.down(x, part)

    def _launch(self, part: str, kernel: Any, count: int, *arguments: Any, **constants: Any) -> None:
        block = min(self.threads, power_of_two(count))
        self.machine.launch(part, kernel, (-(-count // block),), *arguments, **constants, BLOCK=block)


class Tiled(Naive):
    """Rung 2. Convolutions tiled in shared memory, without separate padding."""

    def conv2d(self, x: Tensor, conv: Any) -> Tensor:
        N, C, H, W = x.shape
        side, K = conv.kernel_size[0], conv.out_channels
        x_device = self.up(x, "conv2d")
        y = x_device.new_empty((N, K, H, W))
        depthwise = conv.groups > 1
        tile, block_k = 16, 1 if depthwise else 16
        inner = tile - 2 * (side // 2)
        self.machine.launch(
            "conv2d",
            voxtune_tiled,
            (-(-H // inner) * -(-W // inner), -(-K // block_k), N),
            x_device,
            conv.weight,
            conv.bias,
            y,
            C,
            K,
            H,
            W,
            C // conv.groups,
            SIDE=side,
            TAPS=max(16, power_of_two(side * side)),
            TILE=tile,
            BLOCK_K=block_k,
            ALONE=depthwise,
            warps=8,
        )
        return self.down(y, "conv2d")


class Reduced(Tiled):
    """Rung 3. Layer norm by warp-level reduction for small samples, by three kernels for large ones."""

    # Number of values per sample from which three kernels are faster than one program.
    large = 1 << 14

    def layer_norm(self, x: Tensor, norm: Any) -> Tensor:
        x_device = self.up(x, "layer_norm")
        y = torch.empty_like(x_device)
        (N, V), pixels = (x.shape[0], x[0].numel()), x.shape[2] * x.shape[3]
        if self.large > V:
            self.machine.launch(
                "layer_norm", voxtune_norm_warp, (N,), x_device, norm.weight, norm.bias, y, V, pixels,
                EPS=EPS, BLOCK=4096, warps=32,
            )  # fmt: skip
        else:
            self._three_kernels(x_device, norm, y)
        return self.down(y, "layer_norm")

    def _three_kernels(self, x: Tensor, norm: Any, y: Tensor, block: int = 2048) -> None:
        N, V, pixels = x.shape[0], x[0].numel(), x.shape[2] * x.shape[3]
        P = -(-V // block)
        sums, stats = x.new_empty((N, 2, P)), x.new_empty((N, 2))
        self.machine.launch("layer_norm", voxtune_norm_sums, (N * P,), x, sums, V, P, BLOCK=block)
        self.machine.launch("layer_norm", voxtune_norm_reduce, (N,), sums, stats, V, P, EPS=EPS, BLOCK=128)
        self._launch("layer_norm", voxtune_norm_apply, N * V, x, stats, norm.weight, norm.bias, y, V, pixels, N * V)

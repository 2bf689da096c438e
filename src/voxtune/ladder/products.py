"""Rungs 4 and 5: convolutions on tensor cores by im2col, then fused with neighbouring operations.

Activations are still copied to the host around each operation: fusions save kernels and, with them, transfers.

Legend: N batch, C K channels, V pixels of a sample, R a row's length (channels times taps).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from voxtune.kernels.convnext.im2col import (
    voxtune_depthwise_direct,
    voxtune_gate_apply,
    voxtune_gate_product,
    voxtune_im2col,
    voxtune_product,
)
from voxtune.kernels.convnext.tiles import divisor, power_of_two
from voxtune.ladder.machine import Machine
from voxtune.ladder.operations import EPS, Reduced
from voxtune.workloads.convnext import ConvNeXtUNet


class Products(Reduced):
    """Rung 4. im2col and a BF16 matrix product with float32 accumulation and bias in the epilogue; depthwise stays direct."""

    def __init__(self, network: ConvNeXtUNet, machine: Machine, dtype: torch.dtype = torch.bfloat16):
        super().__init__(network, machine)
        self.dtype = dtype
        self._packed: dict[int, Tensor] = {}
        # The interpreter's time depends on the number of operations, not on their size.
        large = machine.device.type != "cuda"
        self.block_v, self.block_r, self.pixels, self.channels = (1024, 512, 1024, 64) if large else (32, 64, 256, 1)
        self.tile_m, self.tile_k, self.tile_r = (1024, 1024, 128) if large else (64, 32, 64)

    def conv2d(self, x: Tensor, conv: Any) -> Tensor:
        x_device = self.up(x, "conv2d")
        y = self._depthwise(x_device, conv)[0] if conv.groups > 1 else self._convolve(x_device, conv)[0]
        return self.down(y, "conv2d")

    def _depthwise(
        self, x: Tensor, conv: Any, term_NC: Tensor | None = None, sums: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        N, C, H, W = x.shape
        block = min(self.pixels, power_of_two(H * W))
        block_c = min(self.channels, power_of_two(C))
        grid = (-(-H * W // block), -(-C // block_c), N)
        y = torch.empty_like(x)
        out_sums = x.new_empty((N, 2, grid[0] * grid[1])) if sums else None
        self.machine.launch(
            "conv2d", voxtune_depthwise_direct, grid,
            x, conv.weight, conv.bias, x if term_NC is None else term_NC, y, x if out_sums is None else out_sums, C, H, W,
            TERM=term_NC is not None, SUMS=sums, TILES=grid[0] * grid[1], BLOCK=block, BLOCK_C=block_c,
        )  # fmt: skip
        return y, out_sums

    def _convolve(
        self,
        x: Tensor,
        conv: Any,
        *,
        norm: tuple[Any, Tensor] | None = None,
        after: str = "none",
        add: Tensor | None = None,
        sums: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """`norm`: the preceding norm, with the partial sums stored by the kernel that wrote x."""
        N, C, H, W = x.shape
        K, side = conv.out_channels, conv.kernel_size[0]
        R = C * side * side
        RP = -(-R // self.tile_r) * self.tile_r
        rows = torch.empty((N * H * W, RP), dtype=self.dtype, device=x.device)
        block_v = min(self.block_v, power_of_two(H * W))
        P = norm[1].shape[2] if norm else 1
        self.machine.launch(
            "conv2d", voxtune_im2col, (-(-H * W // block_v), -(-RP // self.block_r), N),
            x, rows, norm[1] if norm else x, norm[0].weight if norm else x, norm[0].bias if norm else x, C, H, W, R, RP,
            SIDE=side, NORM=norm is not None, P=P, BLOCK_P=power_of_two(P), COUNT=C * H * W, EPS=EPS,
            BLOCK_V=block_v, BLOCK_R=self.block_r,
        )  # fmt: skip
        weight = self._weight(conv, R, RP)
        KP = weight.shape[1]
        block_m, block_k = max(16, divisor(H * W, self.tile_m)), divisor(KP, self.tile_k)
        across = -(-H * W // block_m)
        tiles = across * (KP // block_k)
        y = x.new_empty((N, K, H, W))
        out_sums = x.new_empty((N, 2, tiles)) if sums else None
        self.machine.launch(
            "conv2d", voxtune_product, (across, KP // block_k, N),
            rows, weight, conv.bias, y if add is None else add, y, y if out_sums is None else out_sums, H * W, K, KP,
            RP=RP, AFTER=after, ADD=add is not None, SUMS=sums, TILES=tiles,
            BLOCK_M=block_m, BLOCK_K=block_k, BLOCK_R=self.tile_r, PRECISION="ieee",
        )  # fmt: skip
        return y, out_sums

    def _weight(self, conv: Any, R: int, RP: int) -> Tensor:
        """(RP, KP) in the type of the product; packed once."""
        if id(conv) not in self._packed:
            rows = conv.weight.detach().reshape(conv.out_channels, R).t()
            K = rows.shape[1]
            KP = -(-K // 32) * 32 if K > 16 else 16
            self._packed[id(conv)] = F.pad(rows, (0, KP - K, 0, RP - R)).to(self.dtype).contiguous()
        return self._packed[id(conv)]


class Fused(Products):
    """Rung 5. Bias + GELU, gate + residual + ReLU, sigmoid times skip, time term and norm, each fused into its neighbour."""

    def block(self, block: Any, x: Tensor, time_NE: Tensor) -> Tensor:
        norm1, conv1, _, norm2, conv2 = block.block
        term = self.linear(self.unary("gelu", time_NE), block.mlp[1])
        x_device, term_device = self.up(x, "conv2d"), self.up(term, "conv2d")
        h, sums = self._depthwise(x_device, block.in_conv, term_device, sums=True)
        h, sums = self._via_host(h, sums, "conv2d")
        h, sums = self._convolve(h, conv1, norm=(norm1, sums), after="gelu", sums=True)
        h, sums = self._via_host(h, sums, "conv2d")
        shortcut = x_device
        if isinstance(block.residual_conv, nn.Conv2d):
            shortcut = self.up(self.down(self._convolve(x_device, block.residual_conv)[0], "conv2d"), "conv2d")
        y, _ = self._convolve(h, conv2, norm=(norm2, sums), add=shortcut)
        return self.down(y, "conv2d")

    def gate(self, gate: Any, x: Tensor, skip: Tensor) -> Tensor:
        x_device, skip_device = self.up(x, "gate"), self.up(skip, "gate")
        (N, C, H, W), CS, K = x.shape, skip.shape[1], gate.gate_conv.out_channels
        block_c = 32 if min(C, CS) >= 32 else 16
        CP, CSP = -(-C // block_c) * block_c, -(-CS // block_c) * block_c
        weight_x, weight_s = self._weight(gate.gate_conv, C, CP), self._weight(gate.residual_conv, CS, CSP)
        bias = gate.gate_conv.bias.detach() + gate.residual_conv.bias.detach()
        hidden, KP = x_device.new_empty((N, K, H, W)), weight_x.shape[1]
        block_m, block_k = max(16, divisor(H * W, self.tile_m)), divisor(KP, self.tile_k)
        self.machine.launch(
            "gate", voxtune_gate_product, (-(-H * W // block_m), KP // block_k, N),
            x_device, skip_device, weight_x, weight_s, bias, hidden, H * W, C, CS, K, KP,
            CP=CP, CSP=CSP, BLOCK_M=block_m, BLOCK_K=block_k, BLOCK_C=block_c, PRECISION="ieee",
        )  # fmt: skip
        hidden = self.up(self.down(hidden, "gate"), "gate")
        y = torch.empty_like(skip_device)
        block = min(self.pixels, power_of_two(H * W))
        self.machine.launch(
            "gate", voxtune_gate_apply, (-(-H * W // block), N),
            hidden, gate.in_conv.weight, gate.in_conv.bias, skip_device, y, H * W, K, CS, BLOCK=block,
        )  # fmt: skip
        return self.down(y, "gate")

    def _via_host(self, h: Tensor, sums: Tensor | None, part: str) -> tuple[Tensor, Any]:
        """Copies a tensor and its sums to the host and back."""
        assert sums is not None
        return self.up(self.down(h, part), part), self.up(self.down(sums, part), part)

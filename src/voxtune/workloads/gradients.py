"""Layers whose gradients have ways of their own when a GPU trains them in 16 bits. The answer is the same; what they save is
not measured yet (benchmarks/gpu_training.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def trained_in_16_bits(module: nn.Module, x: Tensor) -> bool:
    """On a GPU; elsewhere, and in float32, the layers are PyTorch's own."""
    return module.training and x.is_cuda and x.dtype.itemsize == 2


class Head(nn.Conv3d):
    """The last convolution, 3x3x3 to one or a few channels; trained in 16 bits on a GPU it computes eight, the others zero.

    Why: cuDNN's matrix-unit kernels take channels by eight. With one, the weight's gradient alone was a quarter of a step.
    """

    def __init__(self, channels: int, out_channels: int):
        super().__init__(channels, out_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.widened(x) if trained_in_16_bits(self, x) else super().forward(x)

    def widened(self, x: Tensor) -> Tensor:
        assert self.bias is not None
        more = -self.out_channels % 8
        weight, bias = F.pad(self.weight, (*[0] * 9, more)), F.pad(self.bias, (0, more))
        return F.conv3d(x, weight, bias, padding=1)[:, : self.out_channels]


def doubled(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="trilinear", align_corners=False)


class Doubled(torch.autograd.Function):
    """`doubled` in x's own type, and its gradient as sums of neighbours: PyTorch's adds to memory atomically, in any order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        # Autocast would compute it, and keep it, in float32.
        with torch.autocast(x.device.type, enabled=False):
            return doubled(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return doubled_adjoint(gradient)


def doubled_adjoint(gradient: Tensor) -> Tensor:
    """An inner value gave 1/4, 3/4, 3/4, 1/4 to four along each axis; the outermost one is its own neighbour."""
    g = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    for axis in (2, 3, 4):
        even, odd = g.unflatten(axis, (-1, 2)).unbind(axis + 1)
        length = even.shape[axis]
        before = torch.cat([even.narrow(axis, 0, 1), odd.narrow(axis, 0, length - 1)], axis)
        after = torch.cat([even.narrow(axis, 1, length - 1), odd.narrow(axis, length - 1, 1)], axis)
        g = 0.75 * (even + odd) + 0.25 * (before + after)
    return g.to(gradient.dtype)

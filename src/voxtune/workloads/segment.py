"""A small 3D U-Net that assigns a class to each voxel; its pooled bottleneck is a feature vector of the volume.

It evaluates generated volumes: its labels are compared with the input mask, its features give distances between sets.
Blocks of 2x2x2 voxels become channels before the first convolution and voxels again after the last. This is lossless and
makes the network small enough for a CPU.

Legend: N batch, C channels, K classes (0 is background), F features, D H W voxels, d h w = D/2 H/2 W/2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from voxtune.errors import InputError

GROUPS = 4
BLOCK = 2


@dataclass(frozen=True, kw_only=True)
class SegmentConfig:
    """The architecture: level i has `base` * 2^i channels; level 0 has half the resolution. `classes` includes the background."""

    in_channels: int = 1
    classes: int = 3
    base: int = 16
    levels: int = 3

    def __post_init__(self) -> None:
        if not 1 <= self.in_channels <= 64 or not 2 <= self.classes <= 256:
            raise InputError(f"{self.in_channels} images, {self.classes} classes: must be in 1 to 64 and in 2 to 256")
        if self.base < GROUPS or self.base % GROUPS or self.base > 128 or not 2 <= self.levels <= 6:
            raise InputError(
                f"base {self.base}, levels {self.levels}: base must be a multiple of {GROUPS} up to 128, levels in 2 to 6"
            )

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(self.base * 2**level for level in range(self.levels))

    @property
    def divisor(self) -> int:
        """Every dimension of a volume must be a multiple of this."""
        return BLOCK * 2 ** (self.levels - 1)

    @property
    def features(self) -> int:
        return self.widths[-1]


class ConvNormAct(nn.Sequential):
    """3x3x3 convolution, GroupNorm, SiLU. Results do not depend on the rest of the batch."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1):
        super().__init__(
            nn.Conv3d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            nn.GroupNorm(GROUPS, outputs),
            nn.SiLU(),
        )


class SegmentUNet(nn.Module):
    """A U-Net with two convolutions per encoder level and one per decoder level."""

    def __init__(self, config: SegmentConfig):
        super().__init__()
        self.config = config
        widths = config.widths
        inputs = (config.in_channels * BLOCK**3, *widths[:-1])
        self.down = nn.ModuleList(
            nn.Sequential(ConvNormAct(c, w, 1 if level == 0 else 2), ConvNormAct(w, w))
            for level, (c, w) in enumerate(zip(inputs, widths, strict=True))
        )
        self.narrow = nn.ModuleList(nn.Conv3d(2 * w, w, 1) for w in widths[:-1])
        self.up = nn.ModuleList(ConvNormAct(2 * w, w) for w in widths[:-1])
        # The head also gets the voxels of each block: few channels cannot represent the edges within eight voxels.
        voxels, hidden = config.in_channels * BLOCK**3, 2 * config.classes * BLOCK**3
        self.head = nn.Sequential(
            nn.Conv3d(widths[0] + voxels, hidden, 1), nn.SiLU(), nn.Conv3d(hidden, config.classes * BLOCK**3, 1)
        )

    def forward(self, x_NCDHW: Tensor) -> Tensor:
        """Logits (N, K, D, H, W) of images in [-1, 1]."""
        return self.forward_both(x_NCDHW)[0]

    def forward_both(self, x_NCDHW: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (N, K, D, H, W) and features (N, F) from one forward pass."""
        blocks = self._blocks(x_NCDHW)
        levels = self._encode(blocks)
        x = levels[-1]
        for level in reversed(range(len(levels) - 1)):
            # The 1x1x1 convolution before the upsampling: the same result at an eighth of the cost.
            x = F.interpolate(self.narrow[level](x), scale_factor=2.0, mode="nearest")
            x = self.up[level](torch.cat([x, levels[level]], dim=1))
        return blocks_to_voxels(self.head(torch.cat([x, blocks], dim=1))), _pooled(levels[-1])

    def features(self, x_NCDHW: Tensor) -> Tensor:
        """(N, F): the mean over the volume of each channel of the bottleneck."""
        return _pooled(self._encode(self._blocks(x_NCDHW))[-1])

    def _blocks(self, x: Tensor) -> Tensor:
        if x.dim() != 5 or x.shape[1] != self.config.in_channels or any(s % self.config.divisor for s in x.shape[2:]):
            raise InputError(
                f"volumes of shape {tuple(x.shape)}: expected (batch, {self.config.in_channels}, D, H, W), with D, H, W "
                f"multiples of {self.config.divisor}"
            )
        return voxels_to_blocks(x)

    def _encode(self, x: Tensor) -> list[Tensor]:
        levels = []
        for block in self.down:
            x = block(x)
            levels.append(x)
        return levels


def voxels_to_blocks(x_NCDHW: Tensor) -> Tensor:
    """(N, C * 8, d, h, w): each block of 2x2x2 voxels as channels."""
    n, c, *size = x_NCDHW.shape
    depth, height, width = (s // BLOCK for s in size)
    x = x_NCDHW.reshape(n, c, depth, BLOCK, height, BLOCK, width, BLOCK)
    return x.permute(0, 1, 3, 5, 7, 2, 4, 6).reshape(n, c * BLOCK**3, depth, height, width)


def blocks_to_voxels(x_NCdhw: Tensor) -> Tensor:
    """(N, C / 8, D, H, W): the inverse of `voxels_to_blocks`."""
    n, c, depth, height, width = x_NCdhw.shape
    x = x_NCdhw.reshape(n, c // BLOCK**3, BLOCK, BLOCK, BLOCK, depth, height, width)
    return x.permute(0, 1, 5, 2, 6, 3, 7, 4).reshape(n, c // BLOCK**3, depth * BLOCK, height * BLOCK, width * BLOCK)


def _pooled(bottleneck: Tensor) -> Tensor:
    return bottleneck.float().mean(dim=(2, 3, 4))

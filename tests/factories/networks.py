"""Networks that the passes have to work on: ours and others', tiny, with no layer left at zero."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from voxtune.workloads import ConvNeXtConfig, MedDDPMConfig, build

T = torch.tensor([120])
# A batch of one at these sizes falls to PyTorch's slow convolution on a CPU.
T2 = torch.tensor([120, 30])


def med_ddpm():
    net = build(MedDDPMConfig(base=32, multipliers=(1, 2), attention=(2,)))
    return net, (torch.randn(2, 1, 8, 8, 8), T2, torch.randn(2, 2, 8, 8, 8).sign())


def convnext():
    net = build(ConvNeXtConfig(width=8, multipliers=(1, 2)))
    return net, (torch.randn(1, 3, 16, 16), T // 2)


def _monai(dimensions: int, in_channels: int, **more):
    from monai.networks.nets import DiffusionModelUNet

    return DiffusionModelUNet(
        spatial_dims=dimensions,
        in_channels=in_channels,
        out_channels=1,
        channels=(32, 64),
        attention_levels=(False, True),
        num_res_blocks=1,
        num_head_channels=32,
        norm_num_groups=32,
        **more,
    )


def monai_3d():
    return _monai(3, 3), (torch.randn(2, 3, 8, 8, 8), T2)


def monai_2d():
    return _monai(2, 1, resblock_updown=True), (torch.randn(2, 1, 16, 16), T2)


def diffusers_2d():
    from diffusers import UNet2DModel

    net = UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return net, (torch.randn(1, 3, 16, 16), T)


def diffusers_3d():
    from diffusers import UNet3DConditionModel

    net = UNet3DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(32, 64),
        norm_num_groups=32,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        cross_attention_dim=32,
        attention_head_dim=8,
    )
    return net, (torch.randn(1, 4, 2, 8, 8), T, torch.randn(1, 3, 32))


NETWORKS = {f.__name__: f for f in (med_ddpm, convnext, monai_3d, monai_2d, diffusers_2d, diffusers_3d)}

# For checks that are repeated for every network: the costlier ones run with the slow tests.
EVERY_NETWORK = [
    pytest.param(name, marks=pytest.mark.slow) if name in ("diffusers_3d", "monai_2d") else name for name in NETWORKS
]


def make(name: str, seed: int = 0) -> tuple[nn.Module, tuple]:
    torch.manual_seed(seed)
    net, args = NETWORKS[name]()
    for parameter in net.parameters():
        if parameter.dim() > 1 and not parameter.any():
            nn.init.normal_(parameter, std=0.05)
    return net.eval(), args


REWRITING = (
    "cleanup",
    "sdpa",
    "time",
    "small_images",
    "fuse_norm",
    "doubling",
    "upsample",
    "edges",
    "conv3d",
    "strided",
    "pointwise",
    "epilogue",
    "elementwise",
    "channels_last",
)

"""The networks that the benchmarks measure, from this project and from other libraries, with inputs of a given size.

The weights are random, without zeros: zero-initialised layers would hide every error and reduce the power consumption.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from voxtune.workloads import build, without_zeros, workload


def _monai(dimensions: int, channels: tuple[int, ...], attention: tuple[bool, ...], **more: object) -> nn.Module:
    from monai.networks.nets import DiffusionModelUNet

    return DiffusionModelUNet(
        spatial_dims=dimensions,
        channels=channels,
        attention_levels=attention,
        num_res_blocks=1,
        norm_num_groups=32,
        out_channels=1,
        **more,
    )


def _diffusers_2d() -> nn.Module:
    """The architecture of DDPM for faces at 256 x 256."""
    from diffusers import UNet2DModel

    down, up = ["DownBlock2D"] * 6, ["UpBlock2D"] * 6
    down[4], up[1] = "AttnDownBlock2D", "AttnUpBlock2D"
    widths = (128, 128, 256, 256, 512, 512)
    return UNet2DModel(
        sample_size=256,
        layers_per_block=2,
        block_out_channels=widths,
        down_block_types=tuple(down),
        up_block_types=tuple(up),
    )


def _diffusers_3d() -> nn.Module:
    """The default widths of the class, those of a text-to-video network."""
    from diffusers import UNet3DConditionModel

    return UNet3DConditionModel(sample_size=32)


NNUNET = {"norm_op": nn.InstanceNorm3d, "norm_op_kwargs": {"eps": 1e-5, "affine": True}, "conv_bias": True}
NNUNET |= {"nonlin": nn.LeakyReLU, "nonlin_kwargs": {"inplace": True}, "deep_supervision": False}
FEATURES, STRIDES = (32, 64, 128, 256, 320, 320), [1, 2, 2, 2, 2, 2]


def nnunet_plain() -> nn.Module:
    """nnU-Net's default architecture for patches of 128^3, with one channel and four classes."""
    from dynamic_network_architectures.architectures.unet import PlainConvUNet

    return PlainConvUNet(1, 6, FEATURES, nn.Conv3d, 3, STRIDES, 2, 4, 2, **NNUNET)


def nnunet_resenc_l() -> nn.Module:
    from dynamic_network_architectures.architectures.unet import ResidualEncoderUNet

    return ResidualEncoderUNet(1, 6, FEATURES, nn.Conv3d, 3, STRIDES, (1, 3, 4, 6, 6, 6), 4, (1,) * 5, **NNUNET)


def segresnet() -> nn.Module:
    """MONAI's network for BraTS."""
    from monai.networks.nets import SegResNet

    return SegResNet(init_filters=32, in_channels=4, out_channels=3)


# Their input is an image alone, and their results are classes.
SEGMENTATION = {"nnunet_plain": nnunet_plain, "nnunet_resenc_l": nnunet_resenc_l, "segresnet": segresnet}
FOREIGN = {
    "monai": lambda: _monai(
        3, (64, 64, 128, 192, 256), (False, False, False, True, True), in_channels=3, num_head_channels=64
    ),
    "monai_2d": lambda: _monai(2, (128, 256, 256), (False, True, True), in_channels=1, num_head_channels=256),
    "diffusers_2d": _diffusers_2d,
    "diffusers_3d": _diffusers_3d,
    **SEGMENTATION,
}
CHANNELS = {"monai": 3, "monai_2d": 1, "diffusers_2d": 3, "diffusers_3d": 4}
CHANNELS |= {"nnunet_plain": 1, "nnunet_resenc_l": 1, "segresnet": 4}


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    net = FOREIGN[name]() if name in FOREIGN else build(workload(name).network)
    return without_zeros(net).eval()


def inputs(name: str, size: tuple[int, ...]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    t = torch.tensor([120])
    if name in FOREIGN:
        x = torch.randn(1, CHANNELS[name], *size, generator=generator)
        if name in SEGMENTATION:
            return (x,)
        return (x, t, torch.randn(1, 77, 1024, generator=generator)) if name == "diffusers_3d" else (x, t)
    config = workload(name).network
    x = torch.randn(1, config.out_channels, *size, generator=generator)
    return x, t, torch.randn(1, config.mask_channels, *size, generator=generator).sign()

"""Networks of other libraries whose norms, activations and residuals the passes have to fuse, tiny."""

from __future__ import annotations

import torch
from torch import nn


def _nnunet(kind: str, **more):
    from dynamic_network_architectures.architectures import unet

    return getattr(unet, kind)(
        input_channels=1,
        n_stages=3,
        features_per_stage=(16, 32, 40),
        conv_op=nn.Conv3d,
        kernel_sizes=3,
        strides=(1, 2, 2),
        num_classes=3,
        conv_bias=True,
        norm_op=nn.InstanceNorm3d,
        norm_op_kwargs={"eps": 1e-5, "affine": True},
        nonlin=nn.LeakyReLU,
        nonlin_kwargs={"inplace": False},
        **more,
    )


def plain_conv_unet():
    return _nnunet("PlainConvUNet", n_conv_per_stage=2, n_conv_per_stage_decoder=2)


def residual_encoder_unet():
    return _nnunet("ResidualEncoderUNet", n_blocks_per_stage=(1, 2, 2), n_conv_per_stage_decoder=1)


def segresnet():
    from monai.networks.nets import SegResNet

    return SegResNet(init_filters=16, in_channels=1, out_channels=2, blocks_down=(1, 2), blocks_up=(1,))


def monai_unet(norm="INSTANCE"):
    from monai.networks.nets import UNet

    return UNet(3, 1, 2, (16, 32, 64), (2, 2), num_res_units=2, norm=norm)


def batch_norm_unet():
    net = monai_unet("BATCH")
    for module in net.modules():
        if isinstance(module, nn.BatchNorm3d):
            nn.init.uniform_(module.running_mean, -0.5, 0.5)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return net


def dynunet():
    from monai.networks.nets import DynUNet

    net = DynUNet(3, 1, 2, (3, 3, 3), (1, 2, 2), (2, 2), res_block=True)
    for module in net.modules():
        if isinstance(module, nn.LeakyReLU):
            module.inplace = False
    return net


def wan_block():
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanResidualBlock

    return WanResidualBlock(1, 24)


def ltx_norm():
    from diffusers.models.autoencoders.autoencoder_kl_ltx2 import PerChannelRMSNorm

    return nn.Sequential(nn.Conv3d(1, 24, 1), PerChannelRMSNorm(), nn.SiLU())


NORM_NETWORKS = {
    f.__name__: f
    for f in (
        *(plain_conv_unet, residual_encoder_unet, segresnet, monai_unet, batch_norm_unet, dynunet, wan_block, ltx_norm),
    )
}


def make(name: str, seed: int = 0) -> tuple[nn.Module, tuple]:
    """The network and its inputs; affine parameters are drawn, so that a forgotten one is noticed."""
    torch.manual_seed(seed)
    net = NORM_NETWORKS[name]()
    for parameter in net.parameters():
        if parameter.dim() == 1 or parameter.shape[1:] == (1, 1, 1):
            nn.init.normal_(parameter, 0.5, 0.3)
    return net.eval(), (torch.randn(2, 1, 16, 16, 16),)

"""Tiny versions of the networks that users bring, built by their own packages, with inputs: (network, args, kwargs)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
IMAGE = (1, 1, 16, 16, 16)
NNUNET = {"norm_op": nn.InstanceNorm3d, "norm_op_kwargs": {"eps": 1e-5, "affine": True}, "conv_bias": True}
NNUNET |= {"nonlin": nn.LeakyReLU, "nonlin_kwargs": {"inplace": True}, "deep_supervision": False}


def nnunet_plain() -> Made:
    unet = pytest.importorskip("dynamic_network_architectures.architectures.unet")
    net = unet.PlainConvUNet(1, 3, (16, 32, 32), nn.Conv3d, 3, [1, 2, 2], 2, 4, 2, **NNUNET)
    return net, (torch.randn(IMAGE),), {}


def nnunet_residual() -> Made:
    unet = pytest.importorskip("dynamic_network_architectures.architectures.unet")
    net = unet.ResidualEncoderUNet(1, 3, (16, 32, 32), nn.Conv3d, 3, [1, 2, 2], (1, 2, 2), 4, (1, 1), **NNUNET)
    return net, (torch.randn(IMAGE),), {}


def monai_dynunet() -> Made:
    nets = pytest.importorskip("monai.networks.nets")
    norm = ("INSTANCE", {"affine": True})
    net = nets.DynUNet(3, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], filters=[16, 32, 32], norm_name=norm)
    return net, (torch.randn(IMAGE),), {}


def monai_unet() -> Made:
    nets = pytest.importorskip("monai.networks.nets")
    return nets.UNet(3, 1, 2, (16, 32, 32), (2, 2), num_res_units=2), (torch.randn(IMAGE),), {}


def monai_segresnet() -> Made:
    nets = pytest.importorskip("monai.networks.nets")
    return nets.SegResNet(init_filters=16, blocks_down=(1, 2), blocks_up=(1,)), (torch.randn(IMAGE),), {}


def maisi_unet() -> Made:
    module = pytest.importorskip("monai.apps.generation.maisi.networks.diffusion_model_unet_maisi")
    net = module.DiffusionModelUNetMaisi(
        spatial_dims=3,
        in_channels=4,
        out_channels=4,
        num_channels=(32, 64),
        attention_levels=(False, True),
        num_head_channels=(0, 32),
        num_res_blocks=1,
        include_spacing_input=True,
    )
    return net, (torch.randn(1, 4, 8, 8, 8), torch.tensor([100])), {"spacing_tensor": torch.rand(1, 3)}


def maisi_decoder() -> Made:
    module = pytest.importorskip("monai.apps.generation.maisi.networks.autoencoderkl_maisi")
    autoencoder = module.AutoencoderKlMaisi(
        spatial_dims=3,
        in_channels=1,
        out_channels=1,
        latent_channels=4,
        num_channels=(32, 64),
        num_res_blocks=(1, 1),
        norm_num_groups=32,
        norm_eps=1e-6,
        attention_levels=(False, False),
        with_encoder_nonlocal_attn=False,
        with_decoder_nonlocal_attn=False,
        use_checkpointing=False,
        use_convtranspose=False,
        norm_float16=False,
        num_splits=1,
        dim_split=1,
    )
    return autoencoder.decoder, (torch.randn(1, 4, 8, 8, 8),), {}


class WanDecoder(nn.Module):
    """A causal 3D decoder, called for one clip without its cache."""

    def __init__(self) -> None:
        super().__init__()
        diffusers = pytest.importorskip("diffusers")
        options = {"base_dim": 16, "z_dim": 4, "dim_mult": [1, 2, 2], "num_res_blocks": 1}
        self.decoder = diffusers.AutoencoderKLWan(**options, temperal_downsample=[False, True]).decoder

    def forward(self, z: Tensor) -> Tensor:
        return self.decoder(z)


def wan_decoder() -> Made:
    return WanDecoder(), (torch.randn(1, 4, 2, 8, 8),), {}


def diffusers_conditional() -> Made:
    diffusers = pytest.importorskip("diffusers")
    net = diffusers.UNet2DConditionModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
    )
    return net, (torch.randn(1, 4, 16, 16), torch.tensor([3]), torch.randn(1, 7, 32)), {}


NETWORKS = (nnunet_plain, nnunet_residual, monai_dynunet, monai_unet, monai_segresnet, maisi_unet, maisi_decoder)
USERS_NETWORKS = {f.__name__: f for f in (*NETWORKS, wan_decoder, diffusers_conditional)}


def make_users(name: str) -> Made:
    torch.manual_seed(0)
    net, args, kwargs = USERS_NETWORKS[name]()
    for parameter in net.parameters():
        if parameter.dim() > 1 and not parameter.any():
            nn.init.normal_(parameter, std=0.05)
    return net.eval(), args, kwargs

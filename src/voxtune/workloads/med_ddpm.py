"""Med-DDPM's 3D U-Net (Dorjsembe et al., IEEE JBHI 2024) in plain eager PyTorch.

Parameter names and shapes are those of the published checkpoints, so that these load unchanged. This is the reference
with which every plan is compared.

Legend: N batch, C channels, D H W voxels, L = D*H*W, E width of the time embedding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from voxtune.errors import InputError
from voxtune.workloads.base import TrainingRecipe, Workload, levels_that_fit

GROUPS = 32
# Published channel multipliers by in-plane image size.
PUBLISHED_MULTIPLIERS: Mapping[int, tuple[float, ...]] = {
    64: (1, 2, 3, 4),
    128: (1, 1, 2, 3, 4),
    192: (1, 1, 2, 3, 4),
    256: (1, 1, 2, 2, 4, 4),
    512: (0.5, 1, 1, 2, 2, 4, 4),
}


@dataclass(frozen=True, kw_only=True)
class MedDDPMConfig:
    """The architecture. Residual blocks at the downsampling factors in `attention` are followed by attention."""

    family: ClassVar[str] = "med-ddpm"

    in_channels: int = 3
    out_channels: int = 1
    base: int = 64
    blocks: int = 1
    multipliers: tuple[float, ...] = (1, 1, 2, 3, 4)
    attention: tuple[int, ...] = (8,)

    def __post_init__(self) -> None:
        if min(self.in_channels, self.out_channels, self.base, self.blocks) < 1 or not self.multipliers:
            raise InputError("in_channels, out_channels, base, blocks and the number of multipliers must be >= 1")
        if self.in_channels < self.out_channels:
            raise InputError(
                f"in_channels ({self.in_channels}) must include the out_channels ({self.out_channels}) of the image"
            )
        if max(self.in_channels, self.out_channels, self.blocks, len(self.multipliers)) > 64 or self.base > 1024:
            raise InputError("channels, blocks and levels must be <= 64, base <= 1024")
        for multiplier in self.multipliers:
            width = multiplier * self.base
            if width <= 0 or width != int(width) or int(width) % GROUPS:
                raise InputError(
                    f"base {self.base} x multiplier {multiplier} = {width:g} channels: must be a multiple of {GROUPS}, "
                    "the number of groups of GroupNorm"
                )
        factors = [2**level for level in range(len(self.multipliers))]
        wrong = [a for a in self.attention if a not in factors]
        if wrong:
            raise InputError(f"attention at downsampling factor {wrong[0]}: choose from {factors}")

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(int(m * self.base) for m in self.multipliers)

    @property
    def divisor(self) -> int:
        return 2 ** (len(self.multipliers) - 1)

    @property
    def mask_channels(self) -> int:
        return self.in_channels - self.out_channels

    @property
    def dimensions(self) -> int:
        return 3

    @property
    def settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("base", "blocks", "multipliers", "attention")}

    def build(self) -> nn.Module:
        return MedDDPMUNet(self)

    def variant(self, size: tuple[int, ...], *, images: int, labels: int, **settings: Any) -> MedDDPMConfig:
        multipliers = settings.get("multipliers", default_multipliers(size))
        values = {
            "base": self.base,
            "blocks": self.blocks,
            "multipliers": multipliers,
            "attention": default_attention(size, multipliers),
        }
        return MedDDPMConfig(in_channels=images + labels, out_channels=images, **{**values, **settings})

    def likely_size(self) -> tuple[int, ...]:
        """The published rule, reversed: attention stands where the downsampling is size // 16."""
        return (16 * max(self.attention, default=self.divisor),) * 3

    @classmethod
    def infer(cls, state: Mapping[str, Tensor]) -> MedDDPMConfig | None:
        if "input_blocks.0.0.weight" not in state or "time_embed.0.weight" not in state:
            return None
        base = state["time_embed.0.weight"].shape[1]
        widths: list[list[int]] = [[]]
        attention = set()
        block = 1
        while any(k.startswith(f"input_blocks.{block}.") for k in state):
            if f"input_blocks.{block}.0.op.weight" in state:
                widths.append([])
            else:
                widths[-1].append(state[f"input_blocks.{block}.0.in_layers.2.weight"].shape[0])
                if f"input_blocks.{block}.1.qkv.weight" in state:
                    attention.add(2 ** (len(widths) - 1))
            block += 1
        return cls(
            in_channels=state["input_blocks.0.0.weight"].shape[1],
            out_channels=state["out.2.weight"].shape[0],
            base=base,
            blocks=len(widths[0]),
            multipliers=tuple(level[0] / base for level in widths),
            attention=tuple(sorted(attention)),
        )


def default_multipliers(size: tuple[int, ...]) -> tuple[float, ...]:
    """Those of the largest published size that is not larger, with as many levels as the size allows."""
    published = max((s for s in PUBLISHED_MULTIPLIERS if s <= max(size)), default=min(PUBLISHED_MULTIPLIERS))
    return levels_that_fit(PUBLISHED_MULTIPLIERS[published], size)


def default_attention(size: tuple[int, ...], multipliers: tuple[float, ...]) -> tuple[int, ...]:
    """At published sizes where the downsampling equals the in-plane size // 16; otherwise in the middle block alone."""
    factor = max(size) // 16
    return (factor,) if max(size) in PUBLISHED_MULTIPLIERS and factor in [2**i for i in range(len(multipliers))] else ()


def published_config(image_size: int, *, in_channels: int, out_channels: int, base: int, blocks: int) -> MedDDPMConfig:
    """The published rules: multipliers by size, attention where the downsampling equals size // 16."""
    if image_size not in PUBLISHED_MULTIPLIERS:
        known = ", ".join(map(str, PUBLISHED_MULTIPLIERS))
        raise InputError(f"no published multipliers for image size {image_size}; choose from {known}")
    multipliers = PUBLISHED_MULTIPLIERS[image_size]
    factors = [2**level for level in range(len(multipliers))]
    return MedDDPMConfig(
        in_channels=in_channels,
        out_channels=out_channels,
        base=base,
        blocks=blocks,
        multipliers=multipliers,
        attention=tuple(f for f in factors if f == image_size // 16),
    )


WHOLE_HEAD = published_config(128, in_channels=3, out_channels=1, base=64, blocks=1)
BRATS = published_config(192, in_channels=8, out_channels=4, base=64, blocks=2)
RECIPE = TrainingRecipe(batch=1, accumulation=2, learning_rate=1e-5, loss="l1")

WORKLOADS = (
    Workload(
        name="med-ddpm",
        network=WHOLE_HEAD,
        size=(128, 128, 128),
        steps=250,
        schedule="cosine",
        recipe=RECIPE,
        contract={
            "spacing": (1.5, 1.5, 1.5),
            "orientation": "RAS",
            "labels": ({"name": "head", "value": 1, "channel": 0}, {"name": "tumour", "value": 2, "channel": 1}),
            "mask_range": "signed",
            "images": ("T1w",),
        },
    ),
    Workload(
        name="med-ddpm-brats",
        network=BRATS,
        size=(144, 192, 192),
        steps=250,
        schedule="cosine",
        recipe=RECIPE,
        contract={
            "spacing": (1.0, 1.0, 1.0),
            "orientation": "LPS",
            # 1, 2, 3 are the parts of the tumour in the order of BraTS, whose 4, the enhancing part, becomes 3.
            "labels": (
                {"name": "necrotic core", "value": 1, "channel": 0},
                {"name": "oedema", "value": 2, "channel": 1},
                {"name": "enhancing tumour", "value": 3, "channel": 2},
                {"name": "brain", "value": 4, "channel": 3},
            ),
            "mask_range": "unit",
            "images": ("T1", "T1ce", "T2", "FLAIR"),
        },
        fixed_spacing=True,
    ),
)


def time_sinusoid(t_N: Tensor, width: int) -> Tensor:
    """Cosines, then sines, with frequencies exp(-ln(1000) i / half): 1000, not the usual 10000. (N, width)"""
    half = width // 2
    frequency = torch.exp(-math.log(1000) * torch.arange(half, dtype=torch.float32, device=t_N.device) / half)
    angle = t_N[:, None].float() * frequency[None]
    embedding = torch.cat([angle.cos(), angle.sin()], dim=-1)
    return F.pad(embedding, (0, 1)) if width % 2 else embedding


class GroupNorm32(nn.GroupNorm):
    """GroupNorm with 32 groups and float32 statistics, whatever the storage type."""

    def __init__(self, channels: int):
        super().__init__(GROUPS, channels, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            return torch.group_norm(x, GROUPS, self.weight, self.bias, self.eps)
        # torch.group_norm, unlike F.group_norm, accepts groups of a single value (a level of one voxel).
        return torch.group_norm(x.float(), GROUPS, self.weight.float(), self.bias.float(), self.eps).to(x.dtype)


def _zeroed(module: nn.Conv3d | nn.Conv1d) -> nn.Conv3d | nn.Conv1d:
    nn.init.zeros_(module.weight)
    if module.bias is not None:
        nn.init.zeros_(module.bias)
    return module


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, out_channels: int, time_width: int):
        super().__init__()
        self.in_layers = nn.Sequential(
            GroupNorm32(channels), nn.SiLU(), nn.Conv3d(channels, out_channels, 3, padding=1)
        )
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(time_width, out_channels))
        self.out_layers = nn.Sequential(
            GroupNorm32(out_channels),
            nn.SiLU(),
            nn.Dropout(0.0),
            _zeroed(nn.Conv3d(out_channels, out_channels, 3, padding=1)),
        )
        self.skip_connection = nn.Identity() if channels == out_channels else nn.Conv3d(channels, out_channels, 1)

    def forward(self, x: Tensor, time_NE: Tensor) -> Tensor:
        h = self.in_layers(x) + self.emb_layers(time_NE)[:, :, None, None, None]
        return self.skip_connection(x) + self.out_layers(h)


class Attention(nn.Module):
    """Self-attention with one head over all voxels."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = GroupNorm32(channels)
        self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        self.proj_out = _zeroed(nn.Conv1d(channels, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        x_NCL = x.flatten(2)
        q, k, v = self.qkv(self.norm(x_NCL)).chunk(3, dim=1)
        # 1 / sqrt(sqrt(C)) on both factors rather than 1 / sqrt(C) on the product keeps half precision in range.
        scale = q.shape[1] ** -0.25
        weight_NLL = torch.einsum("ncl,ncm->nlm", q * scale, k * scale)
        attention_NLL = weight_NLL.softmax(dim=-1, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)
        h_NCL = torch.einsum("nlm,ncm->ncl", attention_NLL, v)
        return (x_NCL + self.proj_out(h_NCL)).view(x.shape)


class Downsample(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.op = nn.Conv3d(channels, channels, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x)


class Upsample(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv3d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2, mode="trilinear", align_corners=False))


class TimestepSequential(nn.Sequential):
    """A sequence that passes the time embedding to its residual blocks only."""

    def forward(self, x: Tensor, time_NE: Tensor) -> Tensor:  # type: ignore[override]
        for layer in self:
            x = layer(x, time_NE) if isinstance(layer, ResidualBlock) else layer(x)
        return x


class MedDDPMUNet(nn.Module):
    """Predicts the noise in x_t from cat([x_t, mask]) and the integer time step."""

    def __init__(self, config: MedDDPMConfig):
        super().__init__()
        self.config = config
        time_width = 4 * config.base
        self.time_embed = nn.Sequential(
            nn.Linear(config.base, time_width), nn.SiLU(), nn.Linear(time_width, time_width)
        )
        stem = config.widths[0]
        self.input_blocks = nn.ModuleList([TimestepSequential(nn.Conv3d(config.in_channels, stem, 3, padding=1))])
        skips = self._build_encoder(stem, time_width)
        width = config.widths[-1]
        self.middle_block = TimestepSequential(
            ResidualBlock(width, width, time_width), Attention(width), ResidualBlock(width, width, time_width)
        )
        self.output_blocks = nn.ModuleList()
        self._build_decoder(width, skips, time_width)
        self.out = nn.Sequential(
            GroupNorm32(stem), nn.SiLU(), _zeroed(nn.Conv3d(stem, config.out_channels, 3, padding=1))
        )

    def _build_encoder(self, width: int, time_width: int) -> list[int]:
        config = self.config
        skips = [width]
        for level, out in enumerate(config.widths):
            for _ in range(config.blocks):
                layers: list[nn.Module] = [ResidualBlock(width, out, time_width)]
                if 2**level in config.attention:
                    layers.append(Attention(out))
                width = out
                self.input_blocks.append(TimestepSequential(*layers))
                skips.append(width)
            if level + 1 < len(config.widths):
                self.input_blocks.append(TimestepSequential(Downsample(width)))
                skips.append(width)
        return skips

    def _build_decoder(self, width: int, skips: list[int], time_width: int) -> None:
        config = self.config
        for level, out in reversed(list(enumerate(config.widths))):
            for block in range(config.blocks + 1):
                layers: list[nn.Module] = [ResidualBlock(width + skips.pop(), out, time_width)]
                if 2**level in config.attention:
                    layers.append(Attention(out))
                width = out
                if level and block == config.blocks:
                    layers.append(Upsample(width))
                self.output_blocks.append(TimestepSequential(*layers))
        assert not skips, "every encoder output is used once"

    def forward(self, x_NCDHW: Tensor, t_N: Tensor, cond_NCDHW: Tensor | None = None) -> Tensor:
        h, time_NE = begin(self.config, self.time_embed, x_NCDHW, t_N, cond_NCDHW)
        skips = encode(self.input_blocks, h, time_NE)
        h = self.middle_block(skips[-1], time_NE)
        return self.out(decode(self.output_blocks, h, skips, time_NE))

    def split(self, depth: int) -> tuple[FullStep, ShallowStep]:
        """(full, shallow) for the feature cache: a full step returns the deep feature, a shallow step reuses it.

        A shallow step runs the `depth` outermost levels; with 0 only the stem, the last block and the head.
        """
        levels = len(self.config.widths)
        if not 0 <= depth < levels:
            raise InputError(f"cache depth {depth}: must be in 0 to {levels - 1} for a network of {levels} levels")
        skips = depth * (self.config.blocks + 1) or 1
        return FullStep(self, skips), ShallowStep(self, skips)


class FullStep(nn.Module):
    """The whole network; also returns the deep feature: the input of the last `skips` decoder blocks."""

    def __init__(self, network: MedDDPMUNet, skips: int):
        super().__init__()
        self.network, self.skips = network, skips
        self.train(network.training)

    def forward(self, x_NCDHW: Tensor, t_N: Tensor, cond_NCDHW: Tensor | None = None) -> tuple[Tensor, Tensor]:
        network = self.network
        h, time_NE = begin(network.config, network.time_embed, x_NCDHW, t_N, cond_NCDHW)
        skips = encode(network.input_blocks, h, time_NE)
        h = network.middle_block(skips[-1], time_NE)
        deep = decode(network.output_blocks[: -self.skips], h, skips, time_NE)
        return network.out(decode(network.output_blocks[-self.skips :], deep, skips, time_NE)), deep

    def extra_repr(self) -> str:
        """Distinguishes splits of different depth, which have equal weights and inputs."""
        return f"skips={self.skips}"


class ShallowStep(nn.Module):
    """The outer levels around a deep feature of an earlier step. Shares its modules with the network."""

    def __init__(self, network: MedDDPMUNet, skips: int):
        super().__init__()
        self.config, self.time_embed = network.config, network.time_embed
        self.input_blocks = nn.ModuleList(network.input_blocks[:skips])
        self.output_blocks = nn.ModuleList(network.output_blocks[-skips:])
        self.out = network.out
        self.train(network.training)

    def forward(self, x_NCDHW: Tensor, t_N: Tensor, cond_NCDHW: Tensor | None, deep: Tensor) -> Tensor:
        h, time_NE = begin(self.config, self.time_embed, x_NCDHW, t_N, cond_NCDHW)
        skips = encode(self.input_blocks, h, time_NE)
        return self.out(decode(self.output_blocks, deep, skips, time_NE))


def begin(
    config: MedDDPMConfig, time_embed: nn.Module, x: Tensor, t_N: Tensor, cond: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Image and mask as one volume, and the time embedding."""
    check_input(config, x, cond)
    h = x if cond is None else torch.cat([x, cond], dim=1)
    return h, time_embed(time_sinusoid(t_N, config.base).to(h.dtype))


def encode(stages: Iterable[nn.Module], h: Tensor, time_NE: Tensor) -> list[Tensor]:
    """The output of every stage, the outermost first."""
    skips = []
    for stage in stages:
        h = stage(h, time_NE)
        skips.append(h)
    return skips


def decode(stages: Iterable[nn.Module], h: Tensor, skips: list[Tensor], time_NE: Tensor) -> Tensor:
    """Removes the skips that it uses from the end of `skips`."""
    for stage in stages:
        h = stage(torch.cat([h, skips.pop()], dim=1), time_NE)
    return h


def check_input(config: MedDDPMConfig, x: Tensor, cond: Tensor | None) -> None:
    """Raises for inputs of the wrong shape."""
    if x.dim() != 5:
        raise InputError(f"expected volumes as (batch, channel, depth, height, width), got shape {tuple(x.shape)}")
    channels = x.shape[1] + (0 if cond is None else cond.shape[1])
    if channels != config.in_channels:
        raise InputError(
            f"expected {config.in_channels} channels ({config.out_channels} image + {config.mask_channels} mask), "
            f"got {channels}"
        )
    if cond is not None and (cond.shape[0] != x.shape[0] or cond.shape[2:] != x.shape[2:]):
        raise InputError(f"mask {tuple(cond.shape)} and volume {tuple(x.shape)} differ in batch or size")
    invalid = [n for n in x.shape[2:] if n % config.divisor]
    if invalid:
        raise InputError(f"size {tuple(x.shape[2:])}: every dimension must be a multiple of {config.divisor}")

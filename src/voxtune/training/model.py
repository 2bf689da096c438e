"""The model of a training run: fresh as its settings say, or that of a model it goes on from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from voxtune.data.cifar import CHANNELS, SIDE
from voxtune.data.contract import BRATS, WHOLE_HEAD, DataContract
from voxtune.diffusion import DiffusionConfig
from voxtune.errors import InputError
from voxtune.runtime.model import ModelConfig
from voxtune.training.config import TrainConfig
from voxtune.training.data import packed_contract
from voxtune.workloads import WORKLOADS, ConvNeXtConfig, MedDDPMConfig, NetworkConfig
from voxtune.workloads.med_ddpm import PUBLISHED_MULTIPLIERS

# A level narrower than this has too few voxels for its norms to mean anything.
SMALLEST_SIDE = 4


def model_config(config: TrainConfig, start: ModelConfig | None = None) -> ModelConfig:
    """The model of a run: fresh as its settings say, or that of `start`, the model it goes on from."""
    settings = config.model
    if start is None:
        return _fresh_images(config) if settings.dimensions == 2 else _fresh_volumes(config)
    if start.network.dimensions != settings.dimensions:
        raise InputError(f"model: init: {settings.init} is a {start.family} model; give --workload {start.family}")
    own = {"schedule": start.diffusion.schedule, "diffusion_steps": start.diffusion.steps} | _settings_of(start.network)
    for name, found in own.items():
        if getattr(settings, name) not in (None, found):
            raise InputError(f"model: {name} is {found} in {settings.init}; leave it out")
    size = settings.size or start.size
    contract = None if start.data is None else _contract(config, start.data, _three(size))
    diffusion = replace(start.diffusion, loss=config.loss)
    return ModelConfig(network=start.network, size=size, diffusion=diffusion, data=contract)


def _settings_of(network: NetworkConfig) -> dict[str, Any]:
    """What the settings of a fresh network would be for this one."""
    if isinstance(network, ConvNeXtConfig):
        return {"base": network.width, "multipliers": network.multipliers}
    return {name: getattr(network, name) for name in ("base", "blocks", "multipliers", "attention")}


def _fresh_volumes(config: TrainConfig) -> ModelConfig:
    settings, published = config.model, WORKLOADS[config.model.workload]
    assert isinstance(published.network, MedDDPMConfig)
    template = BRATS if settings.workload == "med-ddpm-brats" else WHOLE_HEAD
    if config.data.subjects is not None:
        template = packed_contract(config.data.subjects)
    size = _three(settings.size or template.size)
    contract = _contract(config, template, size)
    multipliers = default_multipliers(size) if settings.multipliers is None else settings.multipliers
    network = MedDDPMConfig(
        in_channels=len(contract.images) + len(contract.labels),
        out_channels=len(contract.images),
        base=published.network.base if settings.base is None else settings.base,
        blocks=published.network.blocks if settings.blocks is None else settings.blocks,
        multipliers=multipliers,
        attention=default_attention(size, multipliers) if settings.attention is None else settings.attention,
    )
    return ModelConfig(network=network, size=size, diffusion=_diffusion(config), data=contract)


def _fresh_images(config: TrainConfig) -> ModelConfig:
    settings, published = config.model, WORKLOADS[config.model.workload].network
    assert isinstance(published, ConvNeXtConfig)
    # The data's own size: enlarged images hold nothing more, and cost as much as they are larger.
    size = settings.size or (SIDE, SIDE)
    multipliers = settings.multipliers
    if multipliers is None:
        multipliers = _levels_that_fit(published.multipliers, size)
    if any(m != int(m) for m in multipliers):
        raise InputError(f"model: multipliers {multipliers[:8]}: convnext takes whole numbers")
    network = ConvNeXtConfig(
        channels=CHANNELS,
        width=published.width if settings.base is None else settings.base,
        multipliers=tuple(int(m) for m in multipliers),
    )
    return ModelConfig(network=network, size=size, diffusion=_diffusion(config))


def _diffusion(config: TrainConfig) -> DiffusionConfig:
    settings, published = config.model, WORKLOADS[config.model.workload]
    steps = published.steps if settings.diffusion_steps is None else settings.diffusion_steps
    return DiffusionConfig(schedule=settings.schedule or published.schedule, steps=steps, loss=config.loss)


def _three(size: tuple[int, ...]) -> tuple[int, int, int]:
    depth, height, width = size
    return depth, height, width


def default_multipliers(size: tuple[int, int, int]) -> tuple[float, ...]:
    """The published ones of the largest published size that is not larger, with as many levels as the sides allow."""
    known = max((s for s in PUBLISHED_MULTIPLIERS if s <= max(size)), default=min(PUBLISHED_MULTIPLIERS))
    return _levels_that_fit(PUBLISHED_MULTIPLIERS[known], size)


def _levels_that_fit(multipliers: tuple[float, ...], size: tuple[int, ...]) -> tuple[float, ...]:
    levels = len(multipliers)
    while levels > 1 and any(s % 2 ** (levels - 1) or s // 2 ** (levels - 1) < SMALLEST_SIDE for s in size):
        levels -= 1
    return multipliers[:levels]


def default_attention(size: tuple[int, int, int], multipliers: tuple[float, ...]) -> tuple[int, ...]:
    """Where the downsampling equals the in-plane size // 16, at published sizes; elsewhere in the middle alone."""
    factor = max(size) // 16
    return (factor,) if max(size) in PUBLISHED_MULTIPLIERS and factor in [2**i for i in range(len(multipliers))] else ()


def _contract(config: TrainConfig, template: DataContract, size: tuple[int, int, int]) -> DataContract:
    """The workload's contract, or the packed subjects', with the run's own settings over it; a smaller grid covers the
    same head."""
    data = config.data
    if data.cohort is not None and data.spacing is None:
        from voxtune.data.cohort import cohort_spacing

        spacing = (cohort_spacing(size),) * 3
    else:
        depth, height, width = (mm * n / s for mm, n, s in zip(template.spacing, template.size, size, strict=True))
        spacing = data.spacing or (depth, height, width)
    changed: dict[str, Any] = {
        "labels": data.labels,
        "images": data.modalities,
        "orientation": data.orientation,
        "mask_range": data.mask_range,
        "scaling": data.scaling,
    }
    given = {k: v for k, v in changed.items() if v is not None}
    return replace(template, size=size, spacing=spacing, **given)

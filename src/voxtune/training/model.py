"""The model of a training run: freshly initialised from its settings, or that of a stored model; and its card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from voxtune.data.cifar import CHANNELS, SIDE
from voxtune.data.contract import DataContract, Label
from voxtune.data.labels import parse_labels
from voxtune.data.pairing import folder_images
from voxtune.data.subjects import packed_contract
from voxtune.diffusion import DiffusionConfig
from voxtune.errors import InputError
from voxtune.files import recorded_path
from voxtune.runtime.card import model_card
from voxtune.runtime.model import Model, ModelConfig, workload_contract
from voxtune.runtime.sampling import SamplingConfig
from voxtune.training.config import ModelSettings, TrainConfig, make_config, read_config
from voxtune.training.distill import describe as describe_distillation
from voxtune.training.distill import student_diffusion, student_sampling
from voxtune.versions import __version__
from voxtune.workloads import WORKLOADS, NetworkConfig


def model_config(config: TrainConfig, start: ModelConfig | None = None) -> ModelConfig:
    """The model of a run: a fresh one of its settings, or that of `start`, the model to fine-tune."""
    settings = config.model
    if start is None:
        template = workload_contract(WORKLOADS[settings.workload])
        return _fresh_images(config) if template is None else _fresh_volumes(config, template)
    _check_architecture(settings, start)
    size = settings.size or start.size
    contract = None if start.data is None else _contract(config, start.data, _three(size))
    try:
        diffusion = replace(start.diffusion, loss=config.loss, **settings.noise)
    except InputError as error:
        raise InputError(f"model: init: {settings.init}: {error}") from None
    sampling = SamplingConfig()
    if config.distill is not None:
        sampling, diffusion = student_sampling(config, start.sampling), student_diffusion(diffusion)
    return ModelConfig(network=start.network, size=size, diffusion=diffusion, sampling=sampling, data=contract)


def _check_architecture(settings: ModelSettings, start: ModelConfig) -> None:
    """Raises if a run is to have another network or prediction than the model that it starts from."""
    if start.family != WORKLOADS[settings.workload].network.family:
        raise InputError(f"model: init: {settings.init} is a {start.family} model; pass --workload {start.family}")
    diffusion = start.diffusion
    fixed = {"schedule": diffusion.schedule, "diffusion_steps": diffusion.steps, "prediction": diffusion.prediction}
    values = {name: (value, getattr(settings, name)) for name, value in (fixed | start.network.settings).items()}
    different = [
        f"{name} is {own} in {settings.init}, not {given}"
        for name, (own, given) in values.items()
        if given not in (None, own)
    ]
    if different:
        raise InputError(
            f"model: {'; '.join(different)}: a run has the network and the prediction of the model that it starts from; omit "
            "these settings"
        )


def new_run(file: Path | None, overrides: Mapping[str, Any], where: str) -> tuple[TrainConfig, str]:
    """(the settings of a new run: of a file and of `overrides`, a sentence about the image kind of its folder)."""
    return with_folder_image(make_config({}, overrides, where) if file is None else read_config(file, overrides))


def with_folder_image(config: TrainConfig) -> tuple[TrainConfig, str]:
    """(`config` with the image kind of its folder, a sentence about it), for a new model of one image without a kind."""
    data, template = config.data, workload_contract(WORKLOADS[config.model.workload])
    if template is None or len(template.images) > 1 or data.images is None or data.masks is None:
        return config, ""
    if data.modalities is not None or config.model.init is not None:
        return config, ""
    kind, sentence = folder_images(data.images, data.masks, template.images[0])
    return replace(config, data=replace(data, modalities=(kind,))), sentence


def _fresh_volumes(config: TrainConfig, template: DataContract) -> ModelConfig:
    settings = config.model
    if config.data.subjects is not None:
        template = packed_contract(config.data.subjects)
    size = _three(settings.size or template.size)
    contract = _contract(config, template, size)
    network = _network(settings, size, images=len(contract.images), labels=len(contract.labels))
    return ModelConfig(network=network, size=size, diffusion=_diffusion(config), data=contract)


def _fresh_images(config: TrainConfig) -> ModelConfig:
    # The size of the data by default: enlarged images hold no more detail and cost more.
    size = config.model.size or (SIDE, SIDE)
    network = _network(config.model, size, images=CHANNELS, labels=0)
    return ModelConfig(network=network, size=size, diffusion=_diffusion(config))


def _network(settings: ModelSettings, size: tuple[int, ...], *, images: int, labels: int) -> NetworkConfig:
    published = WORKLOADS[settings.workload].network
    values = {name: getattr(settings, name) for name in published.settings}
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return published.variant(size, images=images, labels=labels, **given)
    except InputError as error:
        raise InputError(f"model: {error}") from None


def _diffusion(config: TrainConfig) -> DiffusionConfig:
    settings, published = config.model, WORKLOADS[config.model.workload]
    steps = published.steps if settings.diffusion_steps is None else settings.diffusion_steps
    prediction = settings.prediction or "epsilon"
    try:
        return DiffusionConfig(
            schedule=settings.schedule or published.schedule,
            steps=steps,
            loss=config.loss,
            prediction=prediction,
            **settings.noise,
        )
    except InputError as error:
        raise InputError(f"model: {error}") from None


def _three(size: tuple[int, ...]) -> tuple[int, int, int]:
    depth, height, width = size
    return depth, height, width


def _contract(config: TrainConfig, template: DataContract, size: tuple[int, int, int]) -> DataContract:
    """`template` on a grid of `size` with the same field of view, with the run's own settings applied."""
    data = config.data
    spacing = data.spacing or template.resized(size).spacing
    if data.cohort is not None:
        from voxtune.data.cohort import LABELS, cohort_spacing

        if data.spacing is None:
            spacing = (cohort_spacing(size),) * 3
        if config.model.init is None and template.values == tuple(label.value for label in LABELS):
            # Simulated subjects are skull-stripped: their label 1 is the brain, not the head.
            template = replace(template, labels=LABELS)
    settings: dict[str, Any] = {
        "labels": _labels(config, template),
        "overlapping": data.overlapping,
        "images": data.modalities,
        "orientation": data.orientation,
        "mask_range": data.mask_range,
        "scaling": data.scaling,
    }
    given = {k: v for k, v in settings.items() if v is not None}
    return replace(template, size=size, spacing=spacing, **given)


def _labels(config: TrainConfig, template: DataContract) -> tuple[Label, ...] | None:
    """The labels of the masks: those that are set, else those of --labels; a model to fine-tune keeps its own."""
    data = config.data
    if data.labels is not None or data.label_map is None:
        return data.labels
    label_map = parse_labels(data.label_map)
    if label_map.model_values or config.model.init is not None:
        label_map.for_contract(template)
        return None
    return label_map.labels(overlapping=bool(data.overlapping))


def training_card(
    config: TrainConfig,
    model: Model,
    step: int,
    seconds: float,
    *,
    plan: str,
    origin: str,
    commands: list[str],
    processes: int = 1,
) -> str:
    """The model card after `step`, with data, recipe and commands."""
    start = "" if config.model.init is None else f", from the weights of `{recorded_path(config.model.init)}`"
    device = "a CPU" if model.device.type == "cpu" else torch.cuda.get_device_name(model.device)
    if processes > 1:
        device = f"{processes} processes, each on {device}"
    stored = ", stored in BF16" if config.store == "bf16" else ""
    lines = [
        f"Trained with voxtune {__version__} for {step} of {config.steps} steps{start}; {seconds / 60:.1f} minutes on "
        f"{device}. These are the EMA weights{stored}.",
        "",
        *([] if config.distill is None else describe_distillation(config)),
        f"- Data: {origin}",
        f"- Recipe: Adam, {_describe_rate(config)}, {config.loss.upper()} loss, batch {config.batch} x {config.accumulation} "
        f"accumulated, EMA {config.ema_decay:g} every {config.ema_every} steps from step {config.ema_start}, {plan}, "
        f"gradient clip {config.clip or 'none'}, seed {config.seed}",
    ]
    if commands:
        lines += ["", "```", *commands, "```"]
    title = "A model trained with voxtune" if config.distill is None else "A model distilled with voxtune"
    return model_card(model, title=title, origin="\n".join(lines))


def _describe_rate(config: TrainConfig) -> str:
    warm = f", warmed up over {config.warmup} steps" if config.warmup else ""
    length = f"{config.steps} steps"
    if config.minutes is not None:
        length += f" or {config.minutes:g} minutes, whichever progressed further"
    decay = f", decaying along a cosine to a hundredth over {length}" if config.decay == "cosine" else ""
    return f"learning rate {config.learning_rate:g}{warm}{decay}"

"""The model card that goes with every stored model."""

from __future__ import annotations

import torch

from voxtune.runtime.model import Model
from voxtune.runtime.trainconfig import TrainConfig


def model_card(model: Model, *, title: str, origin: str) -> str:
    """Markdown that says what the model is, where it came from, what it takes, and what it must not be used for."""
    config = model.config
    parameters = sum(p.numel() for p in model.network.parameters())
    size = " x ".join(map(str, config.size))
    lines = [
        "---",
        "library_name: voxtune",
        f"tags: [diffusion, unet{', mri' if config.network.dimensions == 3 else ''}]",
        "---",
        f"# {title}",
        "",
        origin,
        "",
        f"- Network: {config.family}, {parameters:,} parameters, {size} (tensor order), sides divide by "
        f"{config.network.divisor}",
        f"- Diffusion: {config.diffusion.schedule} schedule, {config.diffusion.steps} steps, "
        f"{config.diffusion.loss.upper()} loss",
    ]
    if config.data is not None:
        lines += [
            f"- Mask: {config.data.describe_labels()}",
            f"- Images: {', '.join(config.data.images)}; orientation {config.data.orientation}, "
            f"spacing {' x '.join(f'{s:g}' for s in config.data.spacing)} mm",
        ]
    lines += [
        "",
        "## Use",
        "```",
        f"voxtune sample THIS_FOLDER {'--mask MASK.nii.gz' if config.network.mask_channels else '--count 16'} -o OUT",
        "```",
        "",
        "## Limits",
        "Synthetic images for research. Not a medical device: not for diagnosis, treatment or any clinical decision.",
        "",
    ]
    return "\n".join(lines)


def training_card(
    config: TrainConfig, model: Model, step: int, seconds: float, *, origin: str, command: str | None
) -> str:
    """The card of a run's model after `step`: the data, the recipe and the command."""
    from voxtune import __version__

    start = "" if config.model.init is None else f", from the weights of `{config.model.init}`"
    device = "a CPU" if model.device.type == "cpu" else torch.cuda.get_device_name(model.device)
    stored = ", stored in BF16" if config.store == "bf16" else ""
    lines = [
        f"Trained with voxtune {__version__} for {step} of {config.steps} steps{start}; {seconds / 60:.1f} minutes on "
        f"{device}. These are the EMA weights{stored}.",
        "",
        f"- Data: {origin}",
        f"- Recipe: Adam, {_rate(config)}, {config.loss.upper()} loss, batch {config.batch} x {config.accumulation} "
        f"accumulated, EMA {config.ema_decay:g} every {config.ema_every} steps from step {config.ema_start}, autocast "
        f"{config.autocast}, gradient clip {config.clip or 'none'}, seed {config.seed}",
    ]
    if command:
        lines += ["", "```", command, "```"]
    return model_card(model, title="A model trained with voxtune", origin="\n".join(lines))


def _rate(config: TrainConfig) -> str:
    warm = f", warmed up over {config.warmup} steps" if config.warmup else ""
    length = f"{config.steps} steps"
    if config.minutes is not None:
        length += f" or {config.minutes:g} minutes, whichever were further along"
    decay = f", decaying along a cosine to a hundredth over {length}" if config.decay == "cosine" else ""
    return f"learning rate {config.learning_rate:g}{warm}{decay}"

"""The model card of a stored model."""

from __future__ import annotations

from voxtune.runtime.model import Model


def model_card(model: Model, *, title: str, origin: str) -> str:
    """The model's network, origin, inputs, use and limits, as Markdown."""
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
        f"- Network: {config.family}, {parameters:,} parameters, size {size} (tensor order), dimensions must be multiples "
        f"of {config.network.divisor}",
        f"- Diffusion: {config.diffusion.describe()}, {config.diffusion.loss.upper()} loss",
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

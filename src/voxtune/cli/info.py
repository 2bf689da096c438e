"""voxtune info: describe a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from voxtune.cli.common import JsonOption, Output, OverwriteOption, QuietOption, parse_size
from voxtune.files import check_outputs, write_output

if TYPE_CHECKING:
    from voxtune.workloads import NetworkConfig

if TYPE_CHECKING:
    from voxtune.runtime.model import ModelConfig


def command(
    model: Annotated[
        str,
        typer.Argument(
            help="Model folder, published .pt checkpoint, demo (the included model), or a workload: {workload}."
        ),
    ],
    size: Annotated[str | None, typer.Option(help="Size as D,H,W (or H,W). Default: the model's.")] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.svg",
            help="Also draw the network: its blocks with channels, FLOPs and bytes of one step.",
        ),
    ] = None,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show the parameters, FLOPs, sampling settings, input sizes and labels of a model."""
    from voxtune.data.modality import kind_name
    from voxtune.errors import InputError
    from voxtune.runtime.describe import describe
    from voxtune.runtime.model import workload_config
    from voxtune.runtime.storage import included, load
    from voxtune.workloads import WORKLOADS

    dimensions = parse_size(size) if size else None
    if picture is not None:
        check_outputs([picture], overwrite=overwrite)
    if model in WORKLOADS and not Path(model).exists():
        config = workload_config(model)
        # Workloads can be of one family.
        facts = {**describe(config, dimensions), "workload": model}
    elif not included(Path(model)).exists():
        names = ", ".join(WORKLOADS)
        raise InputError(
            f"{model}: no such model; give a model folder, a published .pt checkpoint, demo, or one of the workloads {names}"
        )
    else:
        config = load(model).config
        facts = describe(config, dimensions)
    output = Output(json=json, quiet=quiet)
    size_text = " x ".join(map(str, facts["size"]))
    rows = {
        "workload": facts["workload"],
        "parameters": f"{facts['parameters']:,} ({facts['weights_mib']} MiB in float32)",
        "size": f"{size_text} ({_order(len(facts['size']))}); dimensions must be multiples of {facts['divisor']}",
        "channels": f"{facts['in_channels']} in, {facts['out_channels']} out",
        "one step": f"{facts['flop_per_step'] / 1e12:.3f} TFLOP",
        "diffusion": _diffusion(config),
        "sampling": config.sampling.resolve(config.available_steps).describe(),
        "labels": facts["labels"] or "none (unconditional)",
        "images": ", ".join(map(kind_name, facts["images"])) if facts["images"] else None,
        "grid": _grid(facts),
    }
    if not json:
        for name, value in rows.items():
            if value is not None:
                output.say(f"{name:11} {value}")
    if picture is not None:
        _draw(config.network, facts, picture, overwrite=overwrite)
        output.say(f"{picture}: picture of {model}")
        facts["picture"] = str(picture)
    output.result(facts)


def _draw(network: NetworkConfig, facts: dict[str, Any], target: Path, *, overwrite: bool) -> None:
    from voxtune.analysis.network import network_plan
    from voxtune.report.network import draw_network

    size = tuple(facts["size"])
    sides = " × ".join(map(str, size))
    subtitle = (
        f"One step at {sides}, batch 1, float32: {facts['flop_per_step'] / 1e12:.3f} TFLOP; {facts['parameters']:,} "
        "parameters. Dashed: skip connections."
    )
    write_output(target, draw_network(network_plan(network, size), facts["workload"], subtitle), overwrite=overwrite)


def _order(dimensions: int) -> str:
    return "D x H x W" if dimensions == 3 else "H x W"


def _diffusion(config: ModelConfig) -> str:
    text = config.diffusion.describe()
    if config.sampling.start is not None:
        text += f", sampling starts at step {config.sampling.start} ({config.available_steps} steps available)"
    return text


def _grid(facts: dict[str, Any]) -> str | None:
    if not facts["images"]:
        return None
    spacing = " x ".join(f"{mm:g}" for mm in facts["spacing_mm"])
    return f"spacing {spacing} mm ({_order(3)}), orientation {facts['orientation']}"

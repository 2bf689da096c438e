"""voxtune info: describe a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from voxtune.cli.common import JsonOption, Output, QuietOption, parse_size


def command(
    model: Annotated[str, typer.Argument(help="Model folder, published .pt checkpoint, or name of a workload.")],
    size: Annotated[str | None, typer.Option(help="Size as D,H,W (or H,W). Default: the model's.")] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show the parameters, FLOPs, sampling settings, input sizes and labels of a model."""
    from voxtune.runtime.describe import describe
    from voxtune.runtime.model import workload_config
    from voxtune.runtime.storage import load
    from voxtune.workloads import WORKLOADS

    config = workload_config(model) if model in WORKLOADS and not Path(model).exists() else load(model).config
    facts = describe(config, parse_size(size) if size else None)
    output = Output(json=json, quiet=quiet)
    size_text = " x ".join(map(str, facts["size"]))
    rows = {
        "workload": facts["workload"],
        "parameters": f"{facts['parameters']:,} ({facts['weights_mib']} MiB in float32)",
        "size": f"{size_text} (tensor order); dimensions must be multiples of {facts['divisor']}",
        "channels": f"{facts['in_channels']} in, {facts['out_channels']} out",
        "one step": f"{facts['flop_per_step'] / 1e12:.3f} TFLOP",
        "diffusion": f"{facts['diffusion']['schedule']} schedule, {facts['diffusion']['steps']} steps",
        "sampling": config.sampling.resolve(config.available_steps).describe(),
        "labels": facts["labels"] or "none (unconditional)",
        "images": ", ".join(facts["images"]) if facts["images"] else None,
        "grid": _grid(facts),
    }
    if not json:
        for name, value in rows.items():
            if value is not None:
                output.say(f"{name:11} {value}")
    output.result(facts)


def _grid(facts: dict[str, Any]) -> str | None:
    if not facts["images"]:
        return None
    return f"{facts['orientation']}, {' x '.join(f'{s:g}' for s in facts['spacing_mm'])} mm"

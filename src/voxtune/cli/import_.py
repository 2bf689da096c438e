"""voxtune import: convert a published checkpoint or a MONAI bundle to a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from voxtune.cli.common import JsonOption, Output, OverwriteOption, QuietOption, parse_size


def command(
    checkpoint: Annotated[Path, typer.Argument(help="Published .pt checkpoint, or a MONAI bundle of voxtune export.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Model folder to write.")],
    size: Annotated[
        str | None, typer.Option(help="Size of the volumes as D,H,W. Default: inferred from the network.")
    ] = None,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Convert a published checkpoint or a MONAI bundle to a model folder. Nothing in it is executed."""
    from voxtune.errors import InputError
    from voxtune.files import check_outputs, locked_folder, recorded_path
    from voxtune.runtime.card import model_card
    from voxtune.runtime.monai_bundle import is_bundle, read_bundle
    from voxtune.runtime.published import load_published
    from voxtune.runtime.storage import model_files, save

    output = Output(json=json, quiet=quiet)
    bundle = is_bundle(checkpoint)
    if not bundle and not checkpoint.is_file():
        raise InputError(
            f"{checkpoint}: no such file; pass a published .pt checkpoint or a MONAI bundle of voxtune export"
        )
    if bundle and size is not None:
        raise InputError("--size applies to checkpoints; a MONAI bundle has its size")
    check_outputs(model_files(out), overwrite=overwrite, folder=out)
    if bundle:
        model = read_bundle(checkpoint)
        origin = f"Imported from the MONAI bundle `{recorded_path(checkpoint)}`."
    else:
        model = load_published(checkpoint, size=parse_size(size) if size else None)
        origin = f"Imported from the published checkpoint `{checkpoint.name}` (the EMA weights, if it has any)."
    with locked_folder(out):
        save(model, out, card=model_card(model, title=recorded_path(out), origin=origin), overwrite=overwrite)
    config = model.config
    parameters = sum(p.numel() for p in model.network.parameters())
    output.say(
        f"{config.family}, {parameters / 1e6:.1f} M parameters, {config.diffusion.schedule} schedule of "
        f"{config.diffusion.steps} steps, size {'x'.join(map(str, config.size))}"
    )
    if config.data is not None:
        output.say(f"labels: {config.data.describe_labels()} (to change them, edit {out / 'config.json'})")
    output.say(f"wrote {out}")
    output.result({"model": str(out), "parameters": parameters, "config": config.to_json()})

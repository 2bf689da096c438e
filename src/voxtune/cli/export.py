"""voxtune export: write a model as a MONAI bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from voxtune.cli.common import JsonOption, Output, QuietOption


def command(
    model: Annotated[
        Path, typer.Argument(help="Model folder, published .pt checkpoint, or demo (the included model).")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Bundle folder to write; it must not exist yet.")],
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write a model as a MONAI bundle, which MONAI runs where Voxtune is installed. voxtune import reads it again."""
    from voxtune.runtime.monai_bundle import INFERENCE, bundle_document, write_bundle
    from voxtune.runtime.storage import included, load

    output = Output(json=json, quiet=quiet)
    write_bundle(load(model), out, document=bundle_document(included(model)))
    output.say(f"wrote {out}")
    output.say(f"python -m monai.bundle run --config_file {out / INFERENCE} --bundle_root {out} --mask MASK")
    output.result({"bundle": str(out)})

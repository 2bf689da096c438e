"""voxtune pack: subjects in one file, for machines that have no NIfTI reader and few files to copy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from voxtune.cli.common import JsonOption, Output, QuietOption, parse_labels, parse_size


def command(
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write, subjects.npz say.")],
    cohort: Annotated[int | None, typer.Option(min=1, help="Subjects of the embedded cohort to learn from.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the cohort; default 0.")] = None,
    images: Annotated[Path | None, typer.Option(help="Folder of NIfTI images, in place of the cohort.")] = None,
    masks: Annotated[Path | None, typer.Option(help="Folder of their masks, paired by name.")] = None,
    labels: Annotated[str | None, typer.Option(help="The masks' labels, as brain=1,tumour=2.")] = None,
    held_out: Annotated[
        int | None, typer.Option(min=1, help="Subjects that nothing learns from; default 24, or a tenth of the folder.")
    ] = None,
    size: Annotated[str | None, typer.Option(help="Voxels as depth,height,width; default 64,64,64.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="A model whose grid and labels are to be met, in place of --size and --labels.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write subjects, prepared and checked, into one file that `train`, `steps` and `usefulness` take by --subjects."""
    from voxtune.data.splits import single_image_contract
    from voxtune.data.subjects import open_sources, pack
    from voxtune.errors import InputError
    from voxtune.files import check_output_path
    from voxtune.runtime.storage import load

    check_output_path(out, overwrite)
    if model is not None and (size is not None or labels is not None):
        raise InputError("--model has a size and labels: leave --size and --labels away")
    output = Output(json=json, quiet=quiet)
    train, last, origin = open_sources(
        parse_size(size or "64,64,64"),
        contract=None if model is None else single_image_contract(load(model).config.data),
        cohort=cohort,
        seed=seed,
        images=images,
        masks=masks,
        labels=parse_labels(labels),
        held_out=held_out,
    )
    with output.progress("subjects", len(train) + len(last)) as update:
        pack(train, last, out, lambda done, _total: update(done), origin=origin)
    output.say(f"wrote {len(train)} + {len(last)} held-out subjects to {out}, {out.stat().st_size / 2**20:.1f} MiB")
    output.result({"file": str(out), "subjects": len(train), "held_out": len(last), "origin": origin})

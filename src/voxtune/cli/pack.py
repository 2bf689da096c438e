"""voxtune pack: subjects in one file, for machines without a NIfTI reader."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from voxtune.cli.common import (
    ImageOption,
    JsonOption,
    LabelsOption,
    Output,
    OverlappingOption,
    OverwriteOption,
    QuietOption,
    parse_labels,
    parse_size,
    simulators,
)


def command(
    out: Annotated[Path, typer.Option("--out", "-o", help="Output file, such as subjects.npz.")],
    cohort: Annotated[int | None, typer.Option(min=1, help="Number of simulated subjects to train on.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Random seed of the simulated subjects; default 0.")] = None,
    cohort_version: Annotated[
        int | None, typer.Option(min=1, help="Version of the simulated cohort, 1 or 2; default 1.")
    ] = None,
    images: Annotated[Path | None, typer.Option(help="Folder of NIfTI images, instead of simulated subjects.")] = None,
    masks: Annotated[Path | None, typer.Option(help="Folder of masks, matched to --images by name.")] = None,
    labels: LabelsOption = None,
    overlapping: OverlappingOption = False,
    image: ImageOption = None,
    held_out: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of held-out subjects; default 24 (96 of --cohort-version 2), or a tenth of --images."
        ),
    ] = None,
    size: Annotated[str | None, typer.Option(help="Size in voxels as depth,height,width; default 64,64,64.")] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Use the size, labels and image kinds of this model, instead of --size and --image; --labels then maps "
            "the masks to its labels."
        ),
    ] = None,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write preprocessed subjects into one file, for the --subjects option of `train`, `steps` and `usefulness`."""
    from voxtune.data.contract import no_organ
    from voxtune.data.modality import parse_images
    from voxtune.data.splits import mask_model_contract
    from voxtune.data.subjects import open_sources, pack
    from voxtune.errors import InputError
    from voxtune.files import check_outputs, locked_file
    from voxtune.runtime.storage import load
    from voxtune.training.data import cache_limit

    check_outputs([out], overwrite=overwrite)
    if model is not None and (size is not None or overlapping or image is not None):
        raise InputError("--model cannot be combined with --size, --overlapping-labels or --image; it defines them")
    if overlapping and labels is None:
        raise InputError("--overlapping-labels requires --labels")
    output = Output(json=json, quiet=quiet)
    train, rest, origin = open_sources(
        parse_size(size or "64,64,64"),
        contract=None if model is None else mask_model_contract(load(model).config.data),
        cohort=cohort,
        seed=seed,
        version=cohort_version,
        workers=simulators(cohort_version),
        cache_bytes=cache_limit("auto"),
        images=images,
        masks=masks,
        labels=parse_labels(labels),
        overlapping=overlapping,
        modalities=None if image is None else parse_images(image),
        held_out=held_out,
        say=output.say,
        warn=output.warn,
    )
    warning = no_organ(train.contract) if model is None else None
    if warning is not None:
        output.warn(warning)
    with locked_file(out), output.progress("subjects", len(train) + len(rest)) as update:
        pack(train, rest, out, lambda done, _total: update(done), origin=origin, overwrite=overwrite)
    output.say(
        f"wrote {len(train)} training and {len(rest)} held-out subjects to {out}, {out.stat().st_size / 2**20:.1f} MiB"
    )
    result = {"file": str(out), "subjects": len(train), "held_out": len(rest), "origin": origin}
    output.result(result | {"images": list(train.contract.images)})

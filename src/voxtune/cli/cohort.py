"""voxtune cohort: simulated subjects as a BIDS dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from voxtune.cli.common import JsonOption, Output, OverwriteOption, QuietOption, parse_size


def command(
    count: Annotated[int, typer.Argument(min=1, max=100_000, help="Number of subjects.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Output folder of the dataset.")],
    seed: Annotated[int, typer.Option(min=0, help="Random seed; subject i of a seed is always the same.")] = 0,
    first: Annotated[
        int,
        typer.Option(
            min=0,
            max=2**31,
            help="Number of the first subject; with --healthy 0, subjects from 100000 on are the held-out ones.",
        ),
    ] = 0,
    size: Annotated[str, typer.Option(help="Size in voxels as depth,height,width.")] = "128,128,128",
    cohort_version: Annotated[
        int, typer.Option(help="1: T1w images, as published results used; 2: folds, tissues, and four image kinds.")
    ] = 1,
    image: Annotated[
        str | None, typer.Option(help="Image kinds of version 2: T1w, or several, such as t1,t1ce,t2,flair.")
    ] = None,
    healthy: Annotated[float, typer.Option(min=0, max=1, help="Fraction of subjects without a lesion.")] = 0.1,
    contact_sheet: Annotated[
        Path | None, typer.Option(help="Also write a PNG with slices of the first subjects.")
    ] = None,
    write_template: Annotated[
        Path | None,
        typer.Option(
            help="Also write the tissue maps of version 2 into this .safetensors file, for machines without nilearn "
            "(VOXTUNE_TEMPLATE)."
        ),
    ] = None,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write simulated subjects (T1w images and masks) as a BIDS dataset.

    Subjects are random deformations of the MNI152 template with simulated lesions; none is a real scan.
    """
    from voxtune.data.bids import write_cohort
    from voxtune.data.modality import parse_images
    from voxtune.errors import InputError
    from voxtune.files import check_outputs

    shape = parse_size(size)
    if len(shape) != 3:
        raise InputError(f"--size {size}: give three dimensions, depth,height,width")
    output = Output(json=json, quiet=quiet)
    kinds = ("T1w",) if image is None else parse_images(image)
    extra = [file for file in (contact_sheet, write_template) if file is not None]
    check_outputs(extra, overwrite=overwrite)
    with output.progress("subjects", count) as update:
        pairs = write_cohort(
            out,
            count,
            seed,
            (shape[0], shape[1], shape[2]),
            lambda done, _n: update(done),
            overwrite=overwrite,
            healthy_fraction=healthy,
            first=first,
            version=cohort_version,
            kinds=kinds,
        )
    output.say(f"wrote {len(pairs)} simulated subjects to {out} (labels: 0 background, 1 brain, 2 tumour)")
    result = {"folder": str(out), "seed": seed, "version": cohort_version, "subjects": [p.id for p in pairs]}
    if contact_sheet is not None:
        from voxtune.report.contact_sheet import case_sheet

        sheet = case_sheet(out, contact_sheet, masks=out / "derivatives" / "masks", overwrite=overwrite)
        output.say(f"wrote {sheet.path} with {', '.join(sheet.cases)}")
        result["contact_sheet"] = str(sheet.path)
    if write_template is not None:
        from voxtune.data.atlas import TEMPLATE_FILE
        from voxtune.data.atlas import write_template as write_maps

        result["template"] = str(write_maps(write_template, overwrite=overwrite))
        output.say(f"wrote {write_template}; set {TEMPLATE_FILE} to its path on a machine without nilearn")
    output.result(result)

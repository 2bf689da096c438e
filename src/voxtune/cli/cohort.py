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
    healthy: Annotated[float, typer.Option(min=0, max=1, help="Fraction of subjects without a lesion.")] = 0.1,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write simulated subjects (T1w images and masks) as a BIDS dataset.

    Subjects are random deformations of the MNI152 template with simulated lesions; none is a real scan.
    """
    from voxtune.data.bids import write_cohort
    from voxtune.errors import InputError

    shape = parse_size(size)
    if len(shape) != 3:
        raise InputError(f"--size {size}: give three dimensions, depth,height,width")
    output = Output(json=json, quiet=quiet)
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
        )
    output.say(f"wrote {len(pairs)} simulated subjects to {out} (labels: 0 background, 1 brain, 2 tumour)")
    output.result({"folder": str(out), "seed": seed, "subjects": [p.id for p in pairs]})

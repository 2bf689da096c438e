"""voxtune cohort: the embedded cohort as a BIDS data set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from voxtune.cli.common import JsonOption, Output, QuietOption, parse_size


def command(
    count: Annotated[int, typer.Argument(min=1, max=100_000, help="How many subjects.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The data set's folder.")],
    seed: Annotated[int, typer.Option(min=0, help="Subject i of a seed is always the same.")] = 0,
    first: Annotated[
        int,
        typer.Option(
            min=0, max=2**31, help="Number of the first subject; with --healthy 0, 100000 and up are the held-out ones."
        ),
    ] = 0,
    size: Annotated[str, typer.Option(help="Voxels as depth,height,width.")] = "128,128,128",
    healthy: Annotated[float, typer.Option(min=0, max=1, help="Share of subjects without a lesion.")] = 0.1,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a cohort that is there.")] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write subjects of the embedded cohort (T1w and masks) as BIDS."""
    from voxtune.data.bids import write_cohort
    from voxtune.errors import InputError

    sides = parse_size(size)
    if len(sides) != 3:
        raise InputError(f"--size {size}: give three sides, depth,height,width")
    output = Output(json=json, quiet=quiet)
    with output.progress("subjects", count) as update:
        pairs = write_cohort(
            out,
            count,
            seed,
            (sides[0], sides[1], sides[2]),
            lambda done, _n: update(done),
            overwrite=overwrite,
            healthy_fraction=healthy,
            first=first,
        )
    output.say(f"wrote {len(pairs)} subjects to {out} (labels: 0 background, 1 brain, 2 tumour)")
    output.result({"folder": str(out), "seed": seed, "subjects": [p.id for p in pairs]})

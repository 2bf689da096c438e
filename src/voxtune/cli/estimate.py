"""voxtune estimate: will it fit and how long, on cards that are not here."""

from __future__ import annotations

from typing import Annotated

import typer

from voxtune.cli.common import JsonOption, Output, QuietOption, parse_size


def command(
    workload: Annotated[str, typer.Argument(help="med-ddpm, med-ddpm-brats or convnext.")],
    gpu: Annotated[str, typer.Option(help="Cards, separated by commas: h200,a100,rtx3090, ... or all.")] = "all",
    mode: Annotated[str, typer.Option(help="sample, train or both.")] = "both",
    config: Annotated[
        str, typer.Option(help="baseline, tf32, bf16, channels_last, compile, joined by +.")
    ] = "baseline",
    size: Annotated[
        str | None, typer.Option(help="Sides, such as 128,128,128; the published size if left out.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Volumes at a time.")] = 1,
    steps: Annotated[int | None, typer.Option(help="Denoising passes; the published number if left out.")] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Estimate memory and time from shapes and a card table; nothing is run."""
    from voxtune.analysis.estimate import cards, estimate
    from voxtune.analysis.table import as_text
    from voxtune.workloads import workload as find_workload

    out = Output(json=as_json, quiet=quiet)
    table = estimate(
        find_workload(workload),
        list(cards()) if gpu == "all" else gpu.split(","),
        modes=("sample", "train") if mode == "both" else (mode,),
        config=config,
        size=parse_size(size) if size else None,
        batch=batch,
        steps=steps,
    )
    out.result(table.to_json())
    if not as_json:
        out.say(as_text(table))

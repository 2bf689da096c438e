"""voxtune estimate: memory and time on GPUs that are not in this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from voxtune.cli.choices import one_of
from voxtune.cli.common import JsonOption, Output, QuietOption, StepModes, parse_size
from voxtune.errors import InputError


def command(
    workload: Annotated[
        str | None, typer.Argument(help="Workload: {workload}. Not with --cards.", **one_of("workload"))
    ] = None,
    gpu: Annotated[str, typer.Option(help="Comma-separated GPUs, or all: {gpu}.")] = "all",
    mode: Annotated[StepModes, typer.Option(help="What to estimate.")] = StepModes.both,
    config: Annotated[str, typer.Option(help="Configuration, joined by + from: {estimate}.")] = "baseline",
    size: Annotated[str | None, typer.Option(help="Size as D,H,W (or H,W). Default: the published size.")] = None,
    batch: Annotated[int, typer.Option(help="Batch size.")] = 1,
    steps: Annotated[int | None, typer.Option(help="Sampling steps. Default: the published number.")] = None,
    show_cards: Annotated[
        bool, typer.Option("--cards", help="Show the table of GPUs and their datasheet features instead.")
    ] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Estimate memory and time from tensor shapes and a table of GPUs, without running anything."""
    from voxtune.analysis.estimate import card_table, cards, estimate
    from voxtune.analysis.table import as_text
    from voxtune.workloads import workload as find_workload

    output = Output(json=as_json, quiet=quiet)
    if show_cards:
        if workload is not None:
            raise InputError("--cards cannot be combined with a workload")
        table = card_table(gpu.split(",") if gpu != "all" else None)
        output.result(table.to_json())
        if not as_json:
            output.say(as_text(table))
        return
    if workload is None:
        raise InputError("missing workload: give one, or --cards for the table of GPUs")
    table = estimate(
        find_workload(workload),
        list(cards()) if gpu == "all" else gpu.split(","),
        modes=("sample", "train") if mode is StepModes.both else mode.modes(),
        config=config,
        size=parse_size(size) if size else None,
        batch=batch,
        steps=steps,
    )
    output.result(table.to_json())
    if not as_json:
        output.say(as_text(table))

"""voxtune estimate: memory and time on GPUs that are not in this machine, and what a large data set takes."""

from __future__ import annotations

from typing import Annotated

import typer

from voxtune.cli.choices import one_of
from voxtune.cli.common import JsonOption, Output, QuietOption, StepModes, parse_size
from voxtune.errors import InputError


def command(
    workload: Annotated[
        str | None,
        typer.Argument(
            help="Workload: {workload}; with --volumes by default med-ddpm. Not with --cards.", **one_of("workload")
        ),
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
    volumes: Annotated[
        int | None,
        typer.Option(
            help="Estimate a data set of this many volumes: hours, cost, storage, repeated work.", show_default=False
        ),
    ] = None,
    gpus: Annotated[int, typer.Option(help="GPUs that draw the data set.")] = 1,
    failure_rate: Annotated[float, typer.Option(help="Expected losses of a worker per GPU-hour, such as 0.001.")] = 0.0,
    price_per_gpu_hour: Annotated[
        float | None, typer.Option(help="Price of a GPU for an hour, in any currency.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Estimate memory and time from tensor shapes and a table of GPUs, without running anything."""
    from voxtune.analysis.estimate import card_table, cards, estimate
    from voxtune.analysis.table import as_text
    from voxtune.workloads import workload as find_workload

    output = Output(json=as_json, quiet=quiet)
    chosen = list(cards()) if gpu == "all" else gpu.split(",")
    if show_cards:
        if workload is not None or volumes is not None:
            raise InputError("--cards cannot be combined with a workload or --volumes")
        table = card_table(gpu.split(",") if gpu != "all" else None)
        output.result(table.to_json())
        if not as_json:
            output.say(as_text(table))
        return
    if volumes is not None:
        from voxtune.analysis.dataset import DataSetJob, estimate_data_set

        job = DataSetJob(volumes=volumes, gpus=gpus, failure_rate=failure_rate, price=price_per_gpu_hour, batch=batch)
        grid = parse_size(size) if size else None
        table = estimate_data_set(find_workload(workload or "med-ddpm"), chosen, job, size=grid, steps=steps)
        output.result(table.to_json())
        if not as_json:
            output.say(as_text(table))
        return
    if gpus != 1 or failure_rate or price_per_gpu_hour is not None:
        raise InputError("--gpus, --failure-rate and --price-per-gpu-hour require --volumes")
    if workload is None:
        raise InputError("missing workload: give one, or --cards for the table of GPUs")
    table = estimate(
        find_workload(workload),
        chosen,
        modes=("sample", "train") if mode is StepModes.both else mode.modes(),
        config=config,
        size=parse_size(size) if size else None,
        batch=batch,
        steps=steps,
    )
    output.result(table.to_json())
    if not as_json:
        output.say(as_text(table))

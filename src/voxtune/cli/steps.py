"""voxtune steps: find the fewest sampling steps that are non-inferior to all steps, on held-out subjects."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from voxtune.cli.common import (
    DeviceOption,
    JsonOption,
    LabelsOption,
    MasksOption,
    ModelArgument,
    Output,
    OverwriteOption,
    PlanOption,
    QuietOption,
    RealOption,
    RecordPathsOption,
    ResamplesOption,
    SubjectsOption,
    choose_device,
    parse_labels,
)


def command(
    model: ModelArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for steps.json and steps.md.")],
    held_out: Annotated[
        int | None,
        typer.Option(help="Number of held-out subjects. Default: 64 of the simulated cohort, or all of --subjects."),
    ] = None,
    skip: Annotated[
        int | None,
        typer.Option(min=0, help="Skip the first held-out subjects. Default: 0; with --confirm, those of that table."),
    ] = None,
    confirm: Annotated[
        Path | None,
        typer.Option(
            help="steps.json of an earlier search: test only its choice, and the same settings with more steps."
        ),
    ] = None,
    subjects: SubjectsOption = None,
    real: RealOption = None,
    masks: MasksOption = None,
    labels: LabelsOption = None,
    segmenter: Annotated[
        Path | None, typer.Option(help="Segmenter folder. Default: the one that ships with Voxtune.")
    ] = None,
    samplers: Annotated[
        str | None, typer.Option(help="Comma-separated samplers to compare: {sampler}. Default: all.")
    ] = None,
    steps: Annotated[
        str | None, typer.Option(help="Comma-separated numbers of steps to compare. Default: 5,8,10,15,20,25,50.")
    ] = None,
    timestep_spacings: Annotated[
        str | None, typer.Option(help="Comma-separated timestep spacings to compare: {timestep_spacing}. Default: all.")
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option(help="Also try feature caching: comma-separated INTERVAL or INTERVAL:DEPTH, such as 2,3 or 2:0."),
    ] = None,
    distilled: Annotated[
        Path | None,
        typer.Option(help="A model that voxtune distill made of MODEL: another row, which is never the choice."),
    ] = None,
    plan: PlanOption = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the noise and of the bootstrap.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Batch size in volumes.")] = 8,
    margin: Annotated[
        float, typer.Option(help="Non-inferiority margin, in standard deviations of a volume between random seeds.")
    ] = 0.5,
    resamples: ResamplesOption = 1000,
    numerics: Annotated[
        bool, typer.Option("--numerics", help="Compare precisions, from the same noise, instead of steps.")
    ] = False,
    store: Annotated[
        bool, typer.Option("--store", help="Store the choice in the model's config.json, for --steps auto.")
    ] = False,
    overwrite: OverwriteOption = False,
    record_paths: RecordPathsOption = False,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Find the fewest sampling steps that are non-inferior to DDPM with all steps on every metric, over held-out subjects."""
    from voxtune.evaluation.steps import StepsRequest, run

    output = Output(json=json, quiet=quiet)
    request = StepsRequest(
        model=model,
        out=out,
        held_out=held_out,
        skip=skip,
        confirm=confirm,
        subjects=subjects,
        real=real,
        masks=masks,
        labels=parse_labels(labels),
        segmenter=segmenter,
        samplers=samplers,
        steps=steps,
        timestep_spacings=timestep_spacings,
        cache=cache,
        distilled=distilled,
        plan=plan,
        seed=seed,
        batch=batch,
        margin=margin,
        resamples=resamples,
        numerics=numerics,
        store=store,
        overwrite=overwrite,
        device=choose_device(device),
    )
    table = run(request, output.say, output.warn)
    for note in table.notes:
        output.warn(note)
    output.say(f"wrote {request.result}, {request.result.with_suffix('.md')}")
    output.result(table.to_json())

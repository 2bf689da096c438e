"""voxtune steps: how few sampling steps are enough, measured on held-out subjects."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from voxtune.cli.common import (
    DeviceOption,
    JsonOption,
    MasksOption,
    ModelArgument,
    Output,
    PlanOption,
    QuietOption,
    RealOption,
    ResamplesOption,
    SubjectsOption,
    choose_device,
)


def command(
    model: ModelArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for steps.json and steps.md.")],
    held_out: Annotated[
        int | None, typer.Option(help="Subjects of the embedded cohort, or of --subjects; default 64, or all.")
    ] = None,
    skip: Annotated[
        int | None,
        typer.Option(min=0, help="Leave the first subjects out; default none, with --confirm those of that table."),
    ] = None,
    confirm: Annotated[
        Path | None,
        typer.Option(help="The steps.json of a search: draw what it chose, and the same in more steps, and no more."),
    ] = None,
    subjects: SubjectsOption = None,
    real: RealOption = None,
    masks: MasksOption = None,
    segmenter: Annotated[Path | None, typer.Option(help="Another segmenter than the shipped one.")] = None,
    samplers: Annotated[
        str | None, typer.Option(help="Comma-separated samplers to compare: {sampler}. Default: all.")
    ] = None,
    steps: Annotated[str | None, typer.Option(help="Steps to compare; default: 5,8,10,15,20,25,50.")] = None,
    spacings: Annotated[
        str | None, typer.Option(help="Comma-separated spacings to compare: {spacing}. Default: all.")
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option(help="Also try features kept between steps: a full step every 2,3; 2:0 runs the least."),
    ] = None,
    plan: PlanOption = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise and of the bootstrap.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Volumes computed together.")] = 8,
    margin: Annotated[float, typer.Option(help="What is still not worse, in seed-to-seed spreads of a volume.")] = 0.5,
    resamples: ResamplesOption = 1000,
    numerics: Annotated[
        bool, typer.Option("--numerics", help="Compare precisions, each from the same noise, in place of steps.")
    ] = False,
    store: Annotated[bool, typer.Option("--store", help="Keep the choice with the model, for --steps auto.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a table that is there.")] = False,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Find the fewest steps that are not worse than DDPM with all of them, on any figure, over held-out subjects."""
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
        segmenter=segmenter,
        samplers=samplers,
        steps=steps,
        spacings=spacings,
        cache=cache,
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
    table = run(request, output.say)
    for note in table.notes:
        output.warn(note)
    output.say(f"wrote {request.result}, {request.result.with_suffix('.md')}")
    output.result(table.to_json())

"""voxtune usefulness: what synthetic volumes are worth as training data of a segmenter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from voxtune.cli.common import (
    ClipOption,
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
    SamplerOption,
    SubjectsOption,
    TimestepSpacingOption,
    choose_device,
    parse_labels,
    sampler_options,
)


def command(
    model: ModelArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for usefulness.json and usefulness.md.")],
    volumes: Annotated[
        int, typer.Option(help="Number of synthetic volumes; one per mask of the training subjects.")
    ] = 240,
    few: Annotated[
        int | None,
        typer.Option(help="Add two arms: this many training subjects, alone and with all synthetic volumes."),
    ] = None,
    held_out: Annotated[
        int | None, typer.Option(help="Number of test subjects. Default: 64, or all held-out subjects of --subjects.")
    ] = None,
    subjects: SubjectsOption = None,
    real: RealOption = None,
    masks: MasksOption = None,
    labels: LabelsOption = None,
    segment_steps: Annotated[int, typer.Option(help="Training steps of each segmenter.")] = 2000,
    segment_batch: Annotated[int, typer.Option(help="Batch size of segmenter training.")] = 8,
    seeds: Annotated[int, typer.Option(help="Number of random seeds that each arm is trained with.")] = 2,
    sampler: SamplerOption = None,
    steps: Annotated[
        str | None,
        typer.Option(help="Sampling steps, or auto for those stored with the model. Default: as in voxtune sample."),
    ] = None,
    timestep_spacing: TimestepSpacingOption = None,
    clip: ClipOption = None,
    plan: PlanOption = "auto",
    seed: Annotated[int, typer.Option(min=0, help="First random seed of noise, training and bootstrap.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Batch size of sampling, in volumes.")] = 8,
    resamples: ResamplesOption = 1000,
    overwrite: OverwriteOption = False,
    record_paths: RecordPathsOption = False,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Train a segmenter on training subjects, on synthetic volumes and on both; compare Dice on held-out subjects."""
    from voxtune.evaluation.usefulness import UsefulnessRequest, run

    output = Output(json=json, quiet=quiet)
    request = UsefulnessRequest(
        model=model,
        out=out,
        volumes=volumes,
        few=few,
        held_out=held_out,
        subjects=subjects,
        real=real,
        masks=masks,
        labels=parse_labels(labels),
        segment_steps=segment_steps,
        segment_batch=segment_batch,
        seeds=seeds,
        sampling=sampler_options(sampler=sampler, steps=steps, timestep_spacing=timestep_spacing, clip=clip),
        plan=plan,
        seed=seed,
        batch=batch,
        resamples=resamples,
        overwrite=overwrite,
        device=choose_device(device),
    )
    result = run(request, output.say, output.warn)
    for note in result.notes:
        output.warn(note)
    output.say(f"wrote {request.result}, {request.result.with_suffix('.md')}")
    output.result(result.to_json())

"""voxtune usefulness: what synthetic volumes are worth to a segmenter that learns from them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from voxtune.cli.common import (
    ClipOption,
    DeviceOption,
    JsonOption,
    MasksOption,
    ModelArgument,
    Output,
    PlanOption,
    QuietOption,
    RealOption,
    ResamplesOption,
    SamplerOption,
    SpacingOption,
    SubjectsOption,
    choose_device,
    sampler_options,
)


def command(
    model: ModelArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for usefulness.json and usefulness.md.")],
    volumes: Annotated[int, typer.Option(help="Synthetic volumes, one for each subject's mask.")] = 240,
    few: Annotated[
        int | None, typer.Option(help="Also learn from this few real subjects, alone and with all synthetic volumes.")
    ] = None,
    held_out: Annotated[
        int | None, typer.Option(help="Subjects to test on; default 64, or all that are held out.")
    ] = None,
    subjects: SubjectsOption = None,
    real: RealOption = None,
    masks: MasksOption = None,
    segment_steps: Annotated[int, typer.Option(help="Training steps of each segmenter.")] = 2000,
    segment_batch: Annotated[int, typer.Option(help="Volumes in each of them.")] = 8,
    seeds: Annotated[int, typer.Option(help="How often each arm is trained.")] = 2,
    sampler: SamplerOption = None,
    steps: Annotated[
        str | None, typer.Option(help="Sampling steps, or auto: those stored with the model; default as in `sample`.")
    ] = None,
    spacing: SpacingOption = None,
    clip: ClipOption = None,
    plan: PlanOption = "auto",
    seed: Annotated[int, typer.Option(min=0, help="First seed of noise, training and bootstrap.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Volumes drawn together.")] = 8,
    resamples: ResamplesOption = 1000,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a result that is there.")] = False,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Train a segmenter on real volumes, on synthetic ones and on both; compare them on held-out subjects."""
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
        segment_steps=segment_steps,
        segment_batch=segment_batch,
        seeds=seeds,
        sampling=sampler_options(sampler=sampler, steps=steps, spacing=spacing, clip=clip),
        plan=plan,
        seed=seed,
        batch=batch,
        resamples=resamples,
        overwrite=overwrite,
        device=choose_device(device),
    )
    result = run(request, output.say)
    for note in result.notes:
        output.warn(note)
    output.say(f"wrote {request.result}, {request.result.with_suffix('.md')}")
    output.result(result.to_json())

"""voxtune ema: choose among the averages of a run's weights by the loss on held-out subjects."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from voxtune.cli.common import (
    DeviceOption,
    JsonOption,
    LabelsOption,
    MasksOption,
    Output,
    OverwriteOption,
    QuietOption,
    RealOption,
    RecordPathsOption,
    SubjectsOption,
    choose_device,
    parse_labels,
)
from voxtune.errors import InputError
from voxtune.files import locked_folder, recorded_command


def command(
    run: Annotated[Path, typer.Argument(help="Run folder of voxtune train.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Model folder to write.")],
    held_out: Annotated[int, typer.Option(min=2, help="Number of held-out subjects.")] = 16,
    timesteps: Annotated[int, typer.Option(min=1, help="Diffusion steps of each subject, evenly spaced.")] = 8,
    subjects: SubjectsOption = None,
    real: RealOption = None,
    masks: MasksOption = None,
    labels: LabelsOption = None,
    overwrite: OverwriteOption = False,
    record_paths: RecordPathsOption = False,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write the model of the average, of all that a run's checkpoints hold, with the smallest loss on held-out subjects."""
    from voxtune.config import to_mapping
    from voxtune.runtime.storage import check_model_folder
    from voxtune.training.averages import candidates, choose_average, held_out_subjects
    from voxtune.training.folder import read_run

    output, target = Output(json=json, quiet=quiet), choose_device(device)
    if (real is None) != (masks is None):
        raise InputError("--real and --masks must be given together")
    if real is not None and subjects is not None:
        raise InputError("--real cannot be combined with --subjects")
    check_model_folder(out, overwrite=overwrite)
    newest = candidates(run)[-1][0]
    data = newest.config.data if real is not None or subjects is not None else read_run(run).data
    chosen_from = held_out_subjects(
        data, newest.model.data, held_out, subjects=subjects, real=real, masks=masks, labels=parse_labels(labels)
    )
    with locked_folder(out):
        result = choose_average(
            run,
            out,
            chosen_from,
            count=timesteps,
            device=target,
            overwrite=overwrite,
            say=output.say,
            command=recorded_command(["voxtune", *sys.argv[1:]]),
        )
    output.say(f"wrote {out}: {result.chosen.describe()}")
    output.result({**to_mapping(result), "model": str(result.model)})

"""voxtune distill: train a student of a model that samples in a few steps."""

from __future__ import annotations

import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from voxtune.cli.common import (
    DeviceOption,
    JsonOption,
    LabelsOption,
    ModelArgument,
    Output,
    OverwriteOption,
    QuietOption,
    RecordPathsOption,
    SubjectsOption,
    choose_device,
)
from voxtune.cli.train import Screen, _absolute, _assignments, _finish, _label_map, _memory, stopping_on_signals
from voxtune.errors import InputError
from voxtune.files import recorded_command

# Of a student, which starts where its teacher is: short, at a rate between those of a first training and of its end.
RECIPE: dict[str, Any] = {
    "steps": 2000,
    "batch": 1,
    "accumulation": 1,
    "learning_rate": 1e-4,
    "warmup": 20,
    "decay": "cosine",
    "loss": "l2",
    "clip": 1.0,
    "ema_start": 0,
    "ema_every": 1,
    "ema_decay": 0.99,
    "checkpoint_every": 200,
    "sample_every": 200,
}


def _option(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, show_default=False)


def command(
    model: ModelArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="Run folder to write; the student is in its folder model.")],
    steps: Annotated[int, typer.Option(min=1, help="Sampling steps of the student.")] = 4,
    timesteps: Annotated[
        str | None, _option(help="The student's timesteps, such as 249,187,124,62. Default: learned from the teacher.")
    ] = None,
    teacher_steps: Annotated[int, typer.Option(min=2, help="Steps of the teacher's deterministic sampler.")] = 50,
    images: Annotated[str | None, _option(help="Folder of NIfTI images.")] = None,
    masks: Annotated[
        str | None,
        _option(help="Folder of NIfTI masks, paired with the images by name; only the masks are learned from."),
    ] = None,
    labels: LabelsOption = None,
    subjects: SubjectsOption = None,
    cohort: Annotated[int | None, _option(help="Use this many simulated subjects of the embedded cohort.")] = None,
    updates: Annotated[
        int | None, _option(help=f"Length of the training: updates of the weights. Default: {RECIPE['steps']}.")
    ] = None,
    minutes: Annotated[
        float | None, _option(help="Time limit in minutes; may end the training before --updates.")
    ] = None,
    batch: Annotated[int | None, _option(help=f"Masks of an update. Default: {RECIPE['batch']}.")] = None,
    learning_rate: Annotated[
        float | None,
        _option("--learning-rate", "--lr", help=f"Learning rate. Default: {RECIPE['learning_rate']:g}."),
    ] = None,
    plan: Annotated[
        str | None,
        _option(help="What computes the networks, as in voxtune train: {training_plan}. Default: {default_plan}."),
    ] = None,
    seed: Annotated[int | None, _option(help="Random seed of order and noise. Default: {default_seed}.")] = None,
    settings: Annotated[
        list[str] | None, _option("--set", help="Any other setting of voxtune train, such as distill.inputs=teacher.")
    ] = None,
    overwrite: OverwriteOption = False,
    record_paths: RecordPathsOption = False,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Distil MODEL to a few sampling steps: a student with its own weights and card, from the same noise as its teacher.

    Resume with: voxtune train --resume OUT
    """
    from voxtune.runtime.storage import included
    from voxtune.training.config import make_config
    from voxtune.training.data import open_source
    from voxtune.training.distill import load_teacher, prepared
    from voxtune.training.distributed import process_count, wait_for_all
    from voxtune.training.folder import check_new_run
    from voxtune.training.loop import train

    if process_count() > 1:
        raise InputError("distill trains in one process; start it without torchrun")
    output, target = Output(json=json, quiet=quiet), choose_device(device)
    model = included(model)
    check_apart(out, model)
    check_new_run(out, overwrite=overwrite)
    values: dict[str, Any] = {"data.images": _absolute(images), "data.masks": _absolute(masks), "data.cohort": cohort}
    values |= {"data.subjects": None if subjects is None else str(Path(subjects).absolute())}
    values |= {"data.label_map": _label_map(labels), "model.init": str(Path(model).absolute())}
    values |= {"steps": updates, "minutes": minutes, "batch": batch, "learning_rate": learning_rate}
    values |= {"plan": plan, "seed": seed, "distill.steps": steps, "distill.teacher_steps": teacher_steps}
    values |= {"distill.timesteps": _timesteps(timesteps)}
    given = {name: value for name, value in values.items() if value is not None} | _assignments(settings or [])
    length = int(given.get("steps", RECIPE["steps"]))
    recipe = RECIPE | {"warmup": min(RECIPE["warmup"], length)}
    config = make_config({}, recipe | given, "options")
    teacher = load_teacher(config)
    config = replace(config, model=replace(config.model, workload=_workload(teacher.config)))
    source = open_source(config, teacher.config, output.warn, check=True)
    config = prepared(config, source, target, output.say)
    screen = Screen(output, _memory(config, target))
    with stopping_on_signals(output) as stop, output.progress("distilling", config.steps) as update:
        result = train(
            config,
            None,
            out,
            lambda step, total, loss: update(step, f"loss {loss:.4g}", total=total),
            device=target,
            overwrite=overwrite,
            command=recorded_command(["voxtune", *sys.argv[1:]]),
            stop=stop,
            warn=output.warn,
            report=screen.show,
            say=output.say,
        )
    assert config.distill is not None and config.distill.timesteps is not None
    output.result({**result.to_json(), "timesteps": list(config.distill.timesteps), "overview": screen.to_json()})
    try:
        _finish(result, stop.caught[0] if stop.caught else signal.SIGTERM, output)
        output.say(f"Sample it with: voxtune sample {shlex.quote(str(result.model))} ...")
    finally:
        sys.stdout.flush()
        wait_for_all()


def check_apart(out: Path, teacher: Path) -> None:
    """Raises if the student's run would replace its teacher."""
    student, origin = out.resolve(), Path(teacher).resolve()
    if student == origin or student in origin.parents:
        raise InputError(
            f"{out}: holds the teacher {teacher}; choose another folder, a student never replaces its teacher"
        )


def _workload(config: Any) -> str:
    """A workload with the teacher's kind of network."""
    from voxtune.workloads import closest_workload

    return closest_workload(config.network).name


def _timesteps(text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and len(part) <= 9 for part in parts):
        raise InputError(f"--timesteps {text[:80]}: must be whole numbers, such as 249,187,124,62")
    return [int(part) for part in parts]

"""voxtune train: teaches a model to draw volumes for masks, or images."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from voxtune.cli.common import DeviceOption, JsonOption, Output, QuietOption, choose_device, parse_labels, parse_size
from voxtune.errors import InputError

if TYPE_CHECKING:
    from voxtune.training.loop import TrainResult


def _option(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, show_default=False)


def command(
    config: Annotated[Path | None, _option("--config", "-c", help="A YAML or JSON file; options go over it.")] = None,
    resume: Annotated[Path | None, _option(help="Go on with the run in this folder.")] = None,
    out: Annotated[Path | None, _option("--out", "-o", help="The run folder to write.")] = None,
    images: Annotated[str | None, _option(help="Folder of NIfTI images; with convnext of CIFAR-10 batches.")] = None,
    masks: Annotated[str | None, _option(help="Folder of NIfTI masks, paired with the images by name.")] = None,
    labels: Annotated[str | None, _option(help="The masks' labels, as brain=1,tumour=2.")] = None,
    subjects: Annotated[str | None, _option(help="One file of packed subjects; its held-out ones are left.")] = None,
    cohort: Annotated[int | None, _option(help="Train on this many subjects of the embedded cohort.")] = None,
    workload: Annotated[str | None, _option(help="Workload: {trainable}. Default: med-ddpm.")] = None,
    init: Annotated[str | None, _option(help="Fine-tune: a model or run folder, or a checkpoint.")] = None,
    size: Annotated[str | None, _option(help="Voxels, depth first, as 64,64,64; or pixels, as 32,32.")] = None,
    base: Annotated[int | None, _option(help="Channels at full resolution.")] = None,
    multipliers: Annotated[str | None, _option(help="Channels of each level in units of base, as 1,2,3,4.")] = None,
    steps: Annotated[int | None, _option(help="Updates of the weights (default 100000).")] = None,
    minutes: Annotated[float | None, _option(help="End in this time, with fewer steps if need be.")] = None,
    batch: Annotated[int | None, _option(help="Subjects computed at once (default 1; convnext 128).")] = None,
    accumulation: Annotated[int | None, _option(help="Batches to one update (default 2; convnext 1).")] = None,
    learning_rate: Annotated[
        float | None, _option("--learning-rate", "--lr", help="Adam's (default 1e-5; convnext 2e-4).")
    ] = None,
    warmup: Annotated[int | None, _option(help="Steps over which the learning rate rises (default 0).")] = None,
    decay: Annotated[str | None, _option(help="Decay of the learning rate: {decay}. Default: none.")] = None,
    loss: Annotated[str | None, _option(help="Loss: {loss}. Default: l1 (convnext: l2).")] = None,
    autocast: Annotated[str | None, _option(help="Autocast: {autocast}. Default: none.")] = None,
    seed: Annotated[int | None, _option(help="Fixes order, noise and first weights (default 0).")] = None,
    checkpoint_every: Annotated[int | None, _option(help="Steps between checkpoints (default 1000).")] = None,
    sample_every: Annotated[int | None, _option(help="Steps between sample pictures; 0 for none.")] = None,
    settings: Annotated[list[str] | None, _option("--set", help="Any other setting, as ema_decay=0.999.")] = None,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Train a model on your folders, the embedded cohort or CIFAR-10; it can be stopped and resumed at any moment."""
    output = Output(json=json, quiet=quiet)
    plain: dict[str, Any] = {"data.images": _absolute(images), "data.masks": _absolute(masks), "data.cohort": cohort}
    plain |= {"data.subjects": _absolute(subjects)}
    plain |= {"model.workload": workload, "model.init": _absolute(init), "model.base": base}
    plain |= {"steps": steps, "batch": batch, "accumulation": accumulation, "learning_rate": learning_rate}
    plain |= {"minutes": minutes, "warmup": warmup, "decay": decay}
    plain |= {"loss": loss, "autocast": autocast, "seed": seed}
    plain |= {"checkpoint_every": checkpoint_every, "sample_every": sample_every}
    plain |= {"model.size": None if size is None else list(parse_size(size)), "data.labels": parse_labels(labels)}
    plain["model.multipliers"] = _numbers(multipliers)
    overrides = {k: v for k, v in plain.items() if v is not None} | _assignments(settings or [])
    if workload == "segment":
        if config is not None or resume is not None:
            raise InputError("a segmenter trains in one go from options: leave --config and --resume away")
        train_segment(overrides, out, choose_device(device), output)
        return
    _finish(_train(config, resume, out, overrides, choose_device(device), output), output)


def _train(
    file: Path | None, resume: Path | None, out: Path | None, overrides: dict[str, Any], device: str, output: Output
) -> tuple[TrainResult, int]:
    """The result, and the number of the signal that stopped it (0 for none)."""
    from voxtune.training.config import make_config, read_config
    from voxtune.training.loop import read_run, train

    if resume is not None and (file is not None or (out is not None and out != resume)):
        raise InputError("--resume takes settings and folder from the run; leave --config and --out away")
    folder = resume or out
    if folder is None:
        raise InputError("where to? give a run folder with -o RUN, or continue one with --resume RUN")
    if resume is not None:
        config = read_run(folder, overrides)
    else:
        config = read_config(file, overrides) if file else make_config({}, overrides, "options")
    with stopping_on_signals(output) as caught, output.progress("training", config.steps) as update:
        result = train(
            config,
            None,
            folder,
            lambda step, _steps, loss: update(step, f"loss {loss:.4f}"),
            device=device,
            resume=resume is not None,
            command=shlex.join(["voxtune", *sys.argv[1:]]),
            stop=lambda: bool(caught),
            warn=output.warn,
        )
    return result, caught[0] if caught and result.stopped else 0


def _finish(done: tuple[TrainResult, int], output: Output) -> None:
    result, signal_number = done
    output.result(result.to_json())
    again = f"voxtune train --resume {shlex.quote(str(result.out))}"
    if result.stopped:
        output.say(f"Stopped after step {result.step} of {result.steps}; everything is saved. Go on with: {again}")
        # What a shell expects of a process that a signal ended, so that `train && next` does not go on.
        raise typer.Exit(128 + signal_number)
    if result.resumed_from == result.step:
        more = "--minutes M" if result.ended == "minutes" else "--steps N"
        output.say(f"This run is complete at step {result.step}; for more, add {more}. Model: {result.model}")
        return
    loss = "" if result.loss is None else f", last loss {result.loss:.4f}"
    planned = f" of {result.steps}" if result.ended == "minutes" else ""
    output.say(f"Trained {result.step}{planned} steps in {result.seconds:.0f} s{loss}. Model: {result.model}")


@contextmanager
def stopping_on_signals(output: Output) -> Iterator[list[int]]:
    """Gives a list that the first SIGINT or SIGTERM is put into; the second one acts as if this were not here."""
    caught: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        for each, handler in before.items():
            signal.signal(each, handler)
        if not output.quiet:
            # Not print: the signal may have come in the middle of one.
            os.write(2, b"Finishing this step and writing a checkpoint; once more stops at once.\n")

    for number in before:
        signal.signal(number, handle)
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).absolute())


def _numbers(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--multipliers {text}: give numbers, such as 1,2,3,4") from None


def _assignments(texts: list[str]) -> dict[str, Any]:
    from voxtune.training.config import parse_value, setting_names

    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in setting_names():
            raise InputError(f"--set {text}: give NAME=VALUE with one of {', '.join(setting_names())}")
        try:
            found[name] = parse_value(value)
        except ValueError as error:
            raise InputError(f"--set {text}: {error}") from None
    return found


SIDE = 64
TAKES = {
    *("data.images", "data.masks", "data.cohort", "data.cohort_seed", "data.labels", "data.subjects"),
    *("model.workload", "model.base", "model.size", "steps", "batch", "learning_rate", "autocast", "seed", "minutes"),
}


def train_segment(settings: dict[str, Any], out: Path | None, device: str, output: Output) -> None:
    """Trains in one go, in minutes, so there is nothing to resume; prints Dice on held-out subjects."""
    from voxtune.segmentation.train import SegmentTraining, run_segment

    unused = sorted(set(settings) - TAKES)
    if unused:
        raise InputError(f"{unused[0]}: training a segmenter has no such setting; leave it away")
    if out is None:
        raise InputError("where to? give a folder with -o DIR; a segmenter trains in one go, without --resume")
    if (out / "config.json").exists():
        raise InputError(f"{out}: holds a model already; choose another folder")
    plain = {
        k: settings[k] for k in ("steps", "batch", "learning_rate", "autocast", "seed", "minutes") if k in settings
    }
    training = SegmentTraining(**plain)
    train, held_out, data = _sources(settings)
    output.say(f"{len(train)} subjects to learn from, {len(held_out)} held out, on {device}")
    with output.progress("training", training.steps) as update:
        result = run_segment(
            train,
            held_out,
            training,
            out,
            data=data,
            command=shlex.join(["voxtune", *sys.argv[1:]]),
            base=settings.get("model.base"),
            device=device,
            progress=lambda step, loss: update(step, f"loss {loss:.4f}"),
        )
    for name, dice in result.dice.items():
        output.say(
            f"Dice {name}: {dice['mean']:.4f} (least {dice['least']:.4f}) on {dice['subjects']} held-out subjects"
        )
    output.say(f"Trained {result.steps} steps in {result.seconds:.0f} s. Segmenter: {result.folder}")
    output.result(result.to_json())


def _sources(settings: dict[str, Any]) -> tuple[Any, Any, str]:
    from voxtune.data.subjects import open_sources, unpack

    given = {name: settings.get(f"data.{name}") for name in ("cohort", "images", "masks")}
    names = ("data.subjects", "data.labels", "model.size", "data.cohort_seed")
    subjects, labels, size, seed = (settings.get(name) for name in names)
    if subjects is not None:
        if any(value is not None for value in (*given.values(), labels, size, seed)):
            raise InputError(
                "--subjects: leave --cohort and its seed, --images, --masks, --labels and --size away, the file has them"
            )
        train, held_out = unpack(subjects)
        return train, held_out, train.origin or f"{len(train)} packed subjects, {len(held_out)} more held out"
    return open_sources(tuple(size or (SIDE,) * 3), **given, seed=seed, labels=labels)

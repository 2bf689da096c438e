"""voxtune train: train a model that generates volumes from masks, or images."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from voxtune.cli.common import (
    ARRIVED_SIGNALS,
    DeviceOption,
    ImageOption,
    JsonOption,
    LabelsOption,
    Output,
    OverlappingOption,
    OverwriteOption,
    QuietOption,
    RecordPathsOption,
    Silence,
    choose_device,
    parse_labels,
    parse_size,
    simulators,
)
from voxtune.errors import InputError
from voxtune.files import recorded_command

if TYPE_CHECKING:
    from voxtune.data.labels import LabelMap
    from voxtune.training.config import TrainConfig
    from voxtune.training.loop import TrainResult
    from voxtune.training.overview import Overview


DRY_RUN = "Dry run: nothing was written."


def _option(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, show_default=False)


def command(
    config: Annotated[
        Path | None, _option("--config", "-c", help="YAML or JSON file of settings; options override it.")
    ] = None,
    resume: Annotated[Path | None, _option(help="Resume the run in this folder.")] = None,
    out: Annotated[Path | None, _option("--out", "-o", help="Run folder to write.")] = None,
    images: Annotated[
        str | None, _option(help="Folder of NIfTI images, or of CIFAR-10 batches for a network for images.")
    ] = None,
    masks: Annotated[str | None, _option(help="Folder of NIfTI masks, paired with the images by name.")] = None,
    labels: LabelsOption = None,
    overlapping: OverlappingOption = False,
    image: ImageOption = None,
    subjects: Annotated[
        str | None, _option(help="File of packed subjects. Its held-out subjects are not trained on.")
    ] = None,
    cohort: Annotated[int | None, _option(help="Train on this many simulated subjects of the embedded cohort.")] = None,
    cohort_version: Annotated[int | None, _option(help="Version of the simulated cohort, 1 or 2. Default: 1.")] = None,
    workload: Annotated[str | None, _option(help="Workload: {trainable}. Default: {default_workload}.")] = None,
    init: Annotated[str | None, _option(help="Model folder, run folder or checkpoint to fine-tune.")] = None,
    size: Annotated[
        str | None, _option(help="Size as D,H,W (or H,W). Default: that of the workload or of the data.")
    ] = None,
    base: Annotated[int | None, _option(help="Channels at full resolution. Default: the workload's.")] = None,
    multipliers: Annotated[
        str | None, _option(help="Channels of each level as multiples of --base, such as 1,2,3,4. Default: by size.")
    ] = None,
    steps: Annotated[int | None, _option(help="Updates of the weights. Default: {default_steps}.")] = None,
    epochs: Annotated[
        int | None, _option(help="Length of the run in place of --steps: how often every subject is seen.")
    ] = None,
    minutes: Annotated[float | None, _option(help="Time limit in minutes; may end the run before --steps.")] = None,
    batch: Annotated[
        int | None,
        _option(help="Batch size; with torchrun that of all processes together. Default: {default_batch}."),
    ] = None,
    accumulation: Annotated[int | None, _option(help="Batches per update. Default: {default_accumulation}.")] = None,
    learning_rate: Annotated[
        float | None, _option("--learning-rate", "--lr", help="Learning rate. Default: {default_learning_rate}.")
    ] = None,
    warmup: Annotated[
        int | None, _option(help="Steps of linear learning-rate warm-up. Default: {default_warmup}.")
    ] = None,
    decay: Annotated[str | None, _option(help="Decay of the learning rate: {decay}. Default: {default_decay}.")] = None,
    loss: Annotated[str | None, _option(help="Loss: {loss}. Default: {default_loss}.")] = None,
    precision: Annotated[
        str | None, _option(help="Precision: {precision}. Default: {default_precision}, BF16 on a GPU that has it.")
    ] = None,
    plan: Annotated[
        str | None,
        _option(
            help="What computes the network: {training_plan}. Default: {default_plan}, the fastest that passes the gate."
        ),
    ] = None,
    memory_budget: Annotated[
        str | None,
        _option(
            "--memory-budget",
            help="Memory of a step, such as 12GB: what exceeds it is computed again in the backward pass, by plan voxtune.",
        ),
    ] = None,
    auto_fit: Annotated[
        bool,
        typer.Option("--auto-fit", help="After running out of GPU memory, go on with settings estimated to fit."),
    ] = False,
    autocast: Annotated[
        str | None, _option(help="Autocast: {autocast}, with --plan baseline or compile. Default: by --precision.")
    ] = None,
    seed: Annotated[
        int | None, _option(help="Random seed of initial weights, order and noise. Default: {default_seed}.")
    ] = None,
    cache: Annotated[
        str | None,
        _option(
            help="Memory for subjects that were read: auto (half of the free memory), none or a size. Default: auto."
        ),
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Same bits in every run on the same GPU; slower.")
    ] = False,
    checkpoint_every: Annotated[
        int | None, _option(help="Steps between checkpoints. Default: {default_checkpoint_every}.")
    ] = None,
    sample_every: Annotated[
        int | None, _option(help="Steps between sample pictures, 0 for none. Default: {default_sample_every}.")
    ] = None,
    settings: Annotated[
        list[str] | None, _option("--set", help="Any other setting as NAME=VALUE, such as ema_decay=0.999.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check the data, run one step, print what would be trained; write nothing."),
    ] = False,
    overwrite: OverwriteOption = False,
    record_paths: RecordPathsOption = False,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Train a model on your own scans, simulated subjects or CIFAR-10. A run can be stopped and resumed at any time.

    On several GPUs: torchrun --nproc-per-node N -m voxtune train ...
    """
    from voxtune.data.modality import parse_images
    from voxtune.training.distributed import is_leader, process_count

    output = Output(json=json, quiet=quiet) if is_leader() else Silence()
    plain: dict[str, Any] = {"data.images": _absolute(images), "data.masks": _absolute(masks), "data.cohort": cohort}
    plain |= {"data.subjects": _absolute(subjects), "data.cohort_version": cohort_version}
    plain |= {"model.workload": workload, "model.init": _absolute(init), "model.base": base}
    plain |= {"steps": steps, "batch": batch, "accumulation": accumulation, "learning_rate": learning_rate}
    plain |= {"epochs": epochs, "minutes": minutes, "warmup": warmup, "decay": decay}
    plain |= {"memory_budget": memory_budget, "cache": cache, "deterministic": deterministic or None}
    plain |= {"loss": loss, "precision": precision, "plan": plan, "autocast": autocast, "seed": seed}
    plain |= {"checkpoint_every": checkpoint_every, "sample_every": sample_every}
    plain |= {"model.size": None if size is None else list(parse_size(size)), "data.label_map": _label_map(labels)}
    plain["data.overlapping"] = overlapping or None
    plain["data.modalities"] = None if image is None else list(parse_images(image))
    plain["model.multipliers"] = _numbers(multipliers)
    overrides = {k: v for k, v in plain.items() if v is not None} | _assignments(settings or [])
    if workload == "segment":
        if config is not None or resume is not None or auto_fit:
            raise InputError("--workload segment cannot be combined with --config, --resume or --auto-fit")
        if process_count() > 1:
            raise InputError("--workload segment trains in one process; start it without torchrun")
        train_segment(overrides, out, choose_device(device), output, dry_run=dry_run, overwrite=overwrite)
    elif dry_run:
        if resume is not None:
            raise InputError("--dry-run cannot be combined with --resume")
        _dry_run(config, overrides, choose_device(device), output)
    else:
        _train(config, resume, out, overrides, choose_device(device), output, overwrite=overwrite, auto_fit=auto_fit)


class Screen:
    """Prints what is trained on before the first step, and the time once it is known."""

    def __init__(self, output: Output, memory: Callable[[Overview], float]):
        self.output, self.memory = output, memory
        self.facts: Overview | None = None

    def show(self, facts: Overview) -> None:
        """Prints all facts; in a second call only new ones."""
        before = [] if self.facts is None else self.facts.lines()
        memory = self.memory(facts) if self.facts is None else self.facts.memory_bytes
        self.facts = replace(facts, memory_bytes=memory)
        for line in self.facts.lines():
            if line not in before:
                self.output.say(line)

    def to_json(self) -> dict[str, Any] | None:
        return None if self.facts is None else self.facts.to_json()


def _memory(config: TrainConfig, device: str) -> Callable[[Overview], float]:
    """The estimated memory of a run with these settings."""
    from voxtune.analysis.estimate import Recipe, training_bytes
    from voxtune.training.distributed import process_count
    from voxtune.training.plan import budget_of

    requested = config.requested_precision
    half = requested in ("bf16", "fp16") or (requested == "auto" and device != "cpu")
    precision: Any = "half" if half else "fp32"
    compiled = config.requested_plan == "compile"
    batch = min(config.batch, -(-config.samples_per_step // process_count()))
    if config.requested_plan == "voxtune":
        plan = Recipe(precision="tf32" if requested == "tf32" else precision, plan=True)
        more: dict[str, Any] = {"accumulated": config.accumulation > 1, "budget": budget_of(config)}
        return lambda facts: training_bytes(facts.network, facts.size, batch, plan, **more)  # type: ignore[arg-type]
    recipe = Recipe(precision=precision, channels_last=config.channels_last, compiled=compiled)
    return lambda facts: training_bytes(facts.network, facts.size, batch, recipe)  # type: ignore[arg-type]


def _dry_run(file: Path | None, overrides: dict[str, Any], device: str, output: Output) -> None:
    from voxtune.training.loop import dry_run
    from voxtune.training.model import new_run

    config, sentence = new_run(file, overrides, "options")
    if isinstance(output, Silence):
        return  # every process would measure the same
    if sentence:
        output.say(sentence)
    screen = Screen(output, _memory(config, device))
    screen.show(dry_run(config, device=device, warn=output.warn, say=output.say))
    output.say(DRY_RUN)
    output.result({"dry_run": True, "overview": screen.to_json()})


def _train(
    file: Path | None,
    resume: Path | None,
    out: Path | None,
    overrides: dict[str, Any],
    device: str,
    output: Output,
    *,
    overwrite: bool,
    auto_fit: bool,
) -> None:
    import torch

    from voxtune.training.distributed import is_leader, join_processes, wait_for_all, was_restarted
    from voxtune.training.folder import CONFIG, check_new_run, read_run
    from voxtune.training.loop import train
    from voxtune.training.model import new_run

    if resume is not None and (file is not None or (out is not None and out != resume) or overwrite):
        raise InputError(
            "--resume cannot be combined with --config, --out or --overwrite; the run folder holds the settings"
        )
    folder = resume or out
    if folder is None:
        raise InputError("missing output folder: pass -o RUN, or --resume RUN to continue a run")
    if resume is None and was_restarted(torch.device(device)):
        started = join_processes(torch.device(device)).lead((folder / CONFIG).exists)
        if started:
            output.say(f"started again by torchrun: resuming {folder}")
            resume, overrides = folder, {}
    if resume is not None:
        config = read_run(folder, overrides)
    else:
        if is_leader():
            check_new_run(folder, overwrite=overwrite)
        config, sentence = new_run(file, overrides, "options")
        if sentence:
            output.say(sentence)
    screen = Screen(output, _memory(config, device))
    with stopping_on_signals(output) as stop, output.progress("training", config.steps) as update:
        result = train(
            config,
            None,
            folder,
            lambda step, steps, loss: update(step, f"loss {loss:.4f}", total=steps),
            device=device,
            resume=resume is not None,
            overwrite=overwrite and resume is None,
            command=recorded_command([*_launcher(), *sys.argv[1:]]),
            stop=stop,
            warn=output.warn,
            report=screen.show,
            say=output.say,
            auto_fit=auto_fit,
        )
    output.result({**result.to_json(), "overview": screen.to_json()})
    # In a run of several processes, another one may have received the signal.
    number = stop.caught[0] if stop.caught else signal.SIGTERM
    try:
        _finish(result, number, output)
    finally:
        sys.stdout.flush()
        wait_for_all()


def _launcher() -> list[str]:
    """The words of the command line before the options of voxtune."""
    from voxtune.training.distributed import local_count, process_count

    if process_count() == 1:
        return ["voxtune"]
    machines = process_count() // local_count()
    nodes = ["--nnodes", str(machines)] if machines > 1 else []
    return ["torchrun", *nodes, "--nproc-per-node", str(local_count()), "-m", "voxtune"]


def _finish(result: TrainResult, signal_number: int, output: Output) -> None:
    """`signal_number`: that of the signal that stopped the run, if one did."""
    resume = f"voxtune train --resume {shlex.quote(str(result.out))}"
    if result.stopped:
        output.say(
            f"Stopped after step {result.step} of {result.steps}; a checkpoint was written. Resume with: {resume}"
        )
        # The exit code of a process that was ended by a signal, so that `voxtune train && next` stops here.
        sys.exit(128 + signal_number)
    if result.resumed_from == result.step:
        option = "--minutes M" if result.ended == "minutes" else "--steps N or --epochs N"
        output.say(f"The run is complete at step {result.step}; to extend it, pass {option}. Model: {result.model}")
        return
    loss = "" if result.loss is None else f", last loss {result.loss:.4f}"
    planned = f" of {result.steps}" if result.ended == "minutes" else ""
    several = f" in {result.processes} processes" if result.processes > 1 else ""
    idle = "" if result.idle is None else f", {result.idle:.1%} of the time waiting for data"
    output.say(
        f"Trained {result.step}{planned} steps{several} in {result.seconds:.0f} s{loss}{idle}. Model: {result.model}"
    )


class SignalStop:
    """Called by the run before and after its steps: from the first call on, SIGINT and SIGTERM are requests to stop.

    Before that, and from the second signal on, signals are handled as usual, because there is nothing to save. With torchrun,
    Ctrl-C is two signals: of the terminal, and of torchrun, which passes on its own.
    """

    def __init__(self, output: Output, *, requests: int = 1):
        self.output, self.requests = output, requests
        self.caught: list[int] = []
        self._before: dict[int, Any] = {}

    def __call__(self) -> bool:
        if not self._before:
            if ARRIVED_SIGNALS:  # and the library that was interrupted went on
                raise KeyboardInterrupt
            self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return bool(self.caught)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.caught.append(number)
        if len(self.caught) >= self.requests:
            self.restore()
        if not self.output.quiet and len(self.caught) == 1:
            # Not print(), which the signal may have interrupted.
            os.write(2, b"Finishing this step and writing a checkpoint; interrupt again to stop immediately.\n")

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


@contextmanager
def stopping_on_signals(output: Output) -> Iterator[SignalStop]:
    """Yields the `stop` of a training run; signals are handled as before when the block ends."""
    from voxtune.training.distributed import ignore_signals, process_count

    several = process_count() > 1
    stop = SignalStop(output, requests=2 if several else 1)
    try:
        yield stop
    finally:
        stop.restore()
        if several:
            ignore_signals()


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).absolute())


def _numbers(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--multipliers {text}: must be numbers, such as 1,2,3,4") from None


def _assignments(texts: list[str]) -> dict[str, Any]:
    from voxtune.training.config import parse_value, setting_names

    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in setting_names():
            raise InputError(f"--set {text}: must be NAME=VALUE; choose NAME from {', '.join(setting_names())}")
        try:
            values[name] = parse_value(value)
        except ValueError as error:
            raise InputError(f"--set {text[:80]}: {error}") from None
    return values


SEGMENTER_SIZE = (64, 64, 64)
SEGMENTER_SETTINGS = {
    *(
        "data.images",
        "data.masks",
        "data.cohort",
        "data.cohort_seed",
        "data.cohort_version",
        "data.labels",
        "data.label_map",
        "data.overlapping",
        "data.modalities",
        "data.subjects",
    ),
    *("model.workload", "model.base", "model.size", "steps", "batch", "learning_rate", "autocast", "seed", "minutes"),
}


def train_segment(
    settings: dict[str, Any],
    out: Path | None,
    device: str,
    output: Output,
    *,
    dry_run: bool = False,
    overwrite: bool = False,
) -> None:
    """Trains a segmenter in minutes, without checkpoints, and prints its Dice on held-out subjects."""
    from voxtune.analysis.estimate import Recipe, segmenter_bytes
    from voxtune.runtime.storage import check_model_folder
    from voxtune.segmentation.train import SegmentTraining, dry_run_segment, run_segment

    unused = sorted(set(settings) - SEGMENTER_SETTINGS)
    if unused:
        raise InputError(f"{unused[0]}: does not apply to --workload segment; omit it")
    if out is None and not dry_run:
        raise InputError("missing output folder: pass -o DIR")
    if out is not None and not dry_run:
        check_model_folder(out, overwrite=overwrite)
    names = ("steps", "batch", "learning_rate", "autocast", "seed", "minutes")
    training = SegmentTraining(**{name: settings[name] for name in names if name in settings})
    train, held_out, data = _sources(settings, output, ahead=not dry_run)
    recipe = Recipe(precision="fp32" if training.autocast == "none" else "half")
    screen = Screen(output, lambda facts: segmenter_bytes(facts.network, facts.size, training.batch, recipe))  # type: ignore[arg-type]
    options: dict[str, Any] = {
        "data": data,
        "base": settings.get("model.base"),
        "device": device,
        "report": screen.show,
    }
    if dry_run:
        dry_run_segment(train, held_out, training, **options)
        output.say(DRY_RUN)
        output.result({"dry_run": True, "overview": screen.to_json()})
        return
    assert out is not None
    with output.progress("training", training.steps) as update:
        result = run_segment(
            train,
            held_out,
            training,
            out,
            overwrite=overwrite,
            command=recorded_command(["voxtune", *sys.argv[1:]]),
            progress=lambda step, loss: update(step, f"loss {loss:.4f}"),
            **options,
        )
    for name, dice in result.dice.items():
        output.say(
            f"Dice {name}: {dice['mean']:.4f} (minimum {dice['least']:.4f}) on {dice['subjects']} held-out subjects"
        )
    for name, row in result.lesions.items():
        output.say(
            f"Lesions {name.replace('_', ' ')}: Dice {row['dice']:.4f}, {row['detection']:.0%} of {row['lesions']} detected"
        )
    output.say(f"Trained {result.steps} steps in {result.seconds:.0f} s. Segmenter: {result.folder}")
    output.result({**result.to_json(), "overview": screen.to_json()})


def _sources(settings: dict[str, Any], output: Output, *, ahead: bool) -> tuple[Any, Any, str]:
    """Training and held-out subjects, and their description; simulated ones are simulated `ahead` of training."""
    from voxtune.data.subjects import open_sources, unpack
    from voxtune.training.data import cache_limit

    given = {name: settings.get(f"data.{name}") for name in ("cohort", "images", "masks")}
    names = ("data.subjects", "data.modalities", "model.size", "data.cohort_seed", "data.cohort_version")
    subjects, modalities, size, seed, version = (settings.get(name) for name in names)
    labels, overlapping = _segmenter_labels(settings), settings.get("data.overlapping")
    if subjects is not None:
        if any(value is not None for value in (*given.values(), labels, overlapping, modalities, size, seed, version)):
            raise InputError(
                "--subjects cannot be combined with --cohort, --images, --masks, --labels, --image, --size or "
                "data.cohort_seed"
            )
        train, held_out = unpack(subjects)
        return train, held_out, train.origin or f"{len(train)} packed subjects, {len(held_out)} held-out subjects"
    images = None if modalities is None else tuple(modalities)
    return open_sources(
        tuple(size or SEGMENTER_SIZE),
        **given,
        seed=seed,
        version=version,
        workers=simulators(version) if ahead else 1,
        cache_bytes=cache_limit("auto"),
        labels=labels,
        overlapping=bool(overlapping),
        modalities=images,
        say=output.say,
        warn=output.warn,
    )


def _label_map(text: str | None) -> str | None:
    """The text of `--labels` for the settings of a run, which must not depend on a file."""
    labels = parse_labels(text)
    return None if labels is None else str(labels)


def _segmenter_labels(settings: dict[str, Any]) -> LabelMap | None:
    from voxtune.config import from_mapping
    from voxtune.data.contract import Label
    from voxtune.data.labels import LabelMap

    if settings.get("data.label_map") is not None:
        return parse_labels(settings["data.label_map"])
    labels = settings.get("data.labels")
    if labels is None:
        return None
    if not isinstance(labels, list):
        raise InputError(f"data.labels: expected a list, got {type(labels).__name__}")
    return LabelMap.of(from_mapping(Label, label, f"data.labels[{n}]") for n, label in enumerate(labels))

"""What the commands share: options, exit codes, output with progress, and parsers of option values.

Every command exits with one of EXIT_CODES. Some codes have a more specific meaning:

| command | code | meaning |
|---|---|---|
| check | 1 | slower than allowed |
| check | 3 | the spread of the timings is too large to decide |
| doctor | 3 | a problem was found |
| generate | 3 | some volumes are missing; with --verify, the data set is not complete and intact |
| profile | 3 | a configuration could not be recorded, or the self-check failed |
| sample | 3 | some volumes were skipped (--on-error skip) |
| train | 130, 143 | stopped by Ctrl-C or SIGTERM after writing a checkpoint |
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import typer

from voxtune.cli.choices import one_of, warn_deprecated
from voxtune.errors import printable

if TYPE_CHECKING:
    from voxtune.data.labels import LabelMap
    from voxtune.runtime.sampling import SamplerOptions

EXIT_OK, EXIT_INTERNAL, EXIT_INPUT, EXIT_NEGATIVE, EXIT_INTERRUPTED = 0, 1, 2, 3, 130
EXIT_CODES = {
    EXIT_OK: "done",
    EXIT_INTERNAL: "internal error (check: slower than allowed)",
    EXIT_INPUT: "wrong input or usage (one line on standard error; a table if several files have errors)",
    EXIT_NEGATIVE: "negative result (doctor: a problem was found, profile: not everything was recorded, "
    "sample: volumes were skipped, generate: volumes are missing or damaged, check: undecided)",
    EXIT_INTERRUPTED: "interrupted by Ctrl-C (143: by SIGTERM)",
}

# Signals to stop that this command has received so far.
ARRIVED_SIGNALS: list[int] = []

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object to standard output.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings and errors.")]
DeviceOption = Annotated[str, typer.Option(help="Device: auto, cpu, cuda or cuda:N.")]
SamplerOption = Annotated[
    str | None, typer.Option(help="Sampler: {sampler}. Default: the model's.", **one_of("sampler"))
]
TimestepSpacingOption = Annotated[
    str | None,
    typer.Option(
        help="Spacing of the timesteps: {timestep_spacing}. Default: the model's.",
        **one_of("timestep_spacing", word="timestep spacing"),
    ),
]
ClipOption = Annotated[
    bool | None,
    typer.Option("--clip/--no-clip", help="Clamp each step's prediction to the image range. Default: --clip."),
]
PlanOption = Annotated[
    str, typer.Option(help="Plan: auto (the fastest known plan that passes the gate), baseline, or a plan file.")
]
ImageOption = Annotated[
    str | None,
    typer.Option(help="Image kind, such as T2w, or several: t1,t1ce,t2,flair. Default: the one in the file names."),
]
# Of the commands that measure a model on held-out subjects.
ModelArgument = Annotated[
    Path, typer.Argument(help="Model folder, published .pt checkpoint, or demo (the included model).")
]
SubjectsOption = Annotated[Path | None, typer.Option(help="A file of packed subjects, instead of simulated subjects.")]
RealOption = Annotated[Path | None, typer.Option(help="Folder of real volumes, instead of simulated subjects.")]
MasksOption = Annotated[Path | None, typer.Option(help="Folder of the masks of the real volumes.")]
LabelsOption = Annotated[
    str | None,
    typer.Option(
        help='What the values of the masks mean, such as "tumour=1,4; oedema=2; brain=image" (image: where the mask is 0 and any '
        "image of the subject is not; background=3: ignored); or a dseg.tsv, a model folder, or one of brats, brats2021, "
        "whole-head, model.",
        show_default=False,
    ),
]
OverlappingOption = Annotated[
    bool, typer.Option("--overlapping-labels", help="Allow one value of the masks in several --labels.")
]
ResamplesOption = Annotated[int, typer.Option(help="Bootstrap resamples of each confidence interval.")]

OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace existing files that Voxtune wrote; never other files.")
]
# Handled by `Command`: a command declares the option and does not read it.
RecordPathsOption = Annotated[
    bool,
    typer.Option(
        "--record-paths", help="Keep absolute paths and whole command lines in records; by default, file names only."
    ),
]

# Characters of a warning: names and values in files can have any length.
MAX_WARNING = 1000
# Seconds between two progress lines in a log file.
LOG_SECONDS = 10.0


class StepMode(StrEnum):
    train = "train"
    sample = "sample"


class StepModes(StrEnum):
    train = "train"
    sample = "sample"
    both = "both"

    def modes(self) -> tuple[str, ...]:
        return ("train", "sample") if self is StepModes.both else (self.value,)


class Update(Protocol):
    def __call__(self, done: int, note: str = "", total: int | None = None) -> None: ...


class Output:
    """Prints lines for people, or one JSON object for programs."""

    def __init__(self, *, json: bool = False, quiet: bool = False):
        self.json, self.quiet = json, quiet

    def say(self, text: str) -> None:
        """Prints a line; with --json to standard error, so that standard output stays one JSON object."""
        if not self.quiet:
            print(_visible(text), file=sys.stderr if self.json else sys.stdout, flush=True)

    def warn(self, text: str) -> None:
        print(f"warning: {printable(text, MAX_WARNING)}", file=sys.stderr)

    def result(self, data: dict[str, Any]) -> None:
        if self.json:
            print(json.dumps(data, indent=2, default=str))

    @contextmanager
    def progress(self, description: str, total: int) -> Iterator[Update]:
        """Yields `update(done, note)`, which shows the time left: a bar on a terminal, a line now and then in a log.

        `update(..., total=)` replaces a total that was not known before.
        """
        if self.quiet:
            yield lambda done, note="", total=None: None
            return
        if importlib.util.find_spec("rich") is None:
            yield _lines(description, total)
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
        )
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        with Progress(*columns, *times, console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task(description, total=total, note="")
            printed = [time.monotonic()]

            def update(done: int, note: str = "", total: int | None = None) -> None:
                bar.update(task, completed=done, note=note, total=total)
                final = int(bar.tasks[0].total or 0)
                if not console.is_terminal and (done >= final or time.monotonic() - printed[0] >= LOG_SECONDS):
                    printed[0] = time.monotonic()
                    _line(description, done, final, note, bar.tasks[0].time_remaining)

            yield update


class Silence(Output):
    """The output of a process that leaves printing to another one."""

    def __init__(self) -> None:
        super().__init__(quiet=True)

    def warn(self, text: str) -> None:
        pass


def _visible(text: str) -> str:
    """The text with control characters other than line breaks escaped, because names come from files."""
    return "\n".join(line if line.isprintable() else printable(line) for line in text.split("\n"))


def _lines(description: str, total: int) -> Update:
    """Progress without the rich library."""
    first_update: list[tuple[float, int]] = []
    printed = [time.monotonic()]

    expected = total

    def update(done: int, note: str = "", total: int | None = None) -> None:
        final, now = total or expected, time.monotonic()
        if not first_update:
            first_update.append((now, done))
        if done >= final or now - printed[0] >= LOG_SECONDS:
            printed[0] = now
            start, first = first_update[0]
            left = (now - start) / (done - first) * (final - done) if done > first else None
            _line(description, done, final, note, left)

    return update


def _line(description: str, done: int, total: int, note: str, left: float | None) -> None:
    parts = [f"{description} {done}/{total}", note, "" if left is None else f"{left:.0f} s left"]
    print(", ".join(p for p in parts if p), file=sys.stderr, flush=True)


def choose_device(name: str) -> str:
    """The torch device of `--device`, checked on this machine."""
    import torch

    from voxtune.errors import InputError

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not re.fullmatch("[0-9]{1,4}", index)) or (kind == "cpu" and index):
        raise InputError(f"--device {name[:40]}: choose auto, cpu, cuda or cuda:N")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices; use --device cpu"
        )
    if index:
        torch.cuda.set_device(int(index))  # Triton launches kernels on the current device
    return name


def parse_size(text: str, option: str = "--size") -> tuple[int, ...]:
    """The dimensions in "128,128,128" or "128x128x128", in tensor order (depth, height, width)."""
    from voxtune.errors import InputError

    parts = text.replace("x", ",").split(",")
    if not all(re.fullmatch("[0-9]{1,9}", p.strip()) and 0 < int(p) <= 4096 for p in parts):
        raise InputError(f"{option} {text[:40]}: dimensions must be whole numbers from 1 to 4096, such as 128,128,128")
    return tuple(int(p) for p in parts)


def parse_window_option(text: str | None) -> str | None:
    """The checked value of `--window`, as analysis functions take it; None for no window."""
    from voxtune.analysis.certificate import parse_window

    if text is None or text == "none":
        return None
    if text == "seed":
        warn_deprecated("--window seed", "--window paper")
        text = "paper"
    parse_window(text)
    return text


def parse_steps(text: str | None) -> int | Literal["auto"] | None:
    """The value of `--steps`: a number, "auto" or None."""
    from voxtune.errors import InputError

    if text is None or text == "auto":
        return text  # type: ignore[return-value]
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text) > 0):
        raise InputError(f"--steps {text[:40]}: must be a whole number >= 1, or auto")
    return int(text)


def parse_batch(text: str) -> int | Literal["auto"]:
    """The value of `--batch`: a number or "auto"."""
    from voxtune.errors import InputError

    if text == "auto":
        return "auto"
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and int(text) > 0):
        raise InputError(f"--batch {text[:40]}: must be a whole number >= 1, or auto")
    return int(text)


def sampler_options(
    *,
    sampler: str | None = None,
    steps: str | None = None,
    timestep_spacing: str | None = None,
    clip: bool | None = None,
    cache: str | None = None,
) -> SamplerOptions:
    """The sampling options of a command, for `Model.resolve`; empty where none was given."""
    options: SamplerOptions = {
        "sampler": sampler,
        "steps": parse_steps(steps),
        "timestep_spacing": timestep_spacing,
        "clip": clip,
        "cache": cache,
    }
    return {name: value for name, value in options.items() if value is not None}  # type: ignore[return-value]


def parse_labels(text: str | None) -> LabelMap | None:
    """The value of `--labels`; None where it was not given."""
    from voxtune.data.labels import parse_labels as parse

    return None if text is None else parse(text)

"""What every verb shares: the options for machines and for silence, and progress with the time left."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, for machines.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but warnings and errors.")]
DeviceOption = Annotated[str, typer.Option(help="Where to compute: auto, cpu, cuda or cuda:N.")]
SamplerOption = Annotated[
    str | None, typer.Option(help="ddpm, ddim, dpm++, sde-dpm++, unipc or ipndm; else the model's.")
]
SpacingOption = Annotated[
    str | None, typer.Option(help="Which steps are taken: trailing, linspace, leading or logsnr; else the model's.")
]
ClipOption = Annotated[
    bool | None,
    typer.Option("--clip/--no-clip", help="Clamp what each step predicts to the image's range; on by default."),
]
PlanOption = Annotated[
    str, typer.Option(help="auto (the fastest known that gives the same answer), baseline, or a plan's file.")
]
# Of the verbs that measure a model on held-out subjects.
ModelArgument = Annotated[Path, typer.Argument(help="A model folder, or a published .pt checkpoint.")]
SubjectsOption = Annotated[Path | None, typer.Option(help="A file of packed subjects, in place of the cohort.")]
RealOption = Annotated[Path | None, typer.Option(help="Folder of real volumes, in place of the cohort.")]
MasksOption = Annotated[Path | None, typer.Option(help="Folder of their masks.")]
ResamplesOption = Annotated[int, typer.Option(help="Bootstrap resamples behind every interval.")]

# Between two lines of progress in a log file.
LOG_SECONDS = 10.0


class Update(Protocol):
    def __call__(self, done: int, note: str = "") -> None: ...


class Output:
    """Talks to the person on standard error and standard output, or to the machine in one JSON object."""

    def __init__(self, *, json: bool = False, quiet: bool = False):
        self.json, self.quiet = json, quiet

    def say(self, text: str) -> None:
        """A line for a person. Under --json it goes to standard error, so that standard output stays one object."""
        if not self.quiet:
            print(text, file=sys.stderr if self.json else sys.stdout, flush=True)

    def warn(self, text: str) -> None:
        print(f"warning: {text}", file=sys.stderr)

    def result(self, data: dict[str, Any]) -> None:
        if self.json:
            print(json.dumps(data, indent=2, default=str))

    @contextmanager
    def progress(self, description: str, total: int) -> Iterator[Update]:
        """Gives `update(done, note)`: on a terminal a bar with the time left; elsewhere a line now and then, for a log."""
        if self.quiet:
            yield lambda done, note="": None
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
            told = [time.monotonic()]

            def update(done: int, note: str = "") -> None:
                bar.update(task, completed=done, note=note)
                if not console.is_terminal and (done >= total or time.monotonic() - told[0] >= LOG_SECONDS):
                    told[0] = time.monotonic()
                    _line(description, done, total, note, bar.tasks[0].time_remaining)

            yield update


def _lines(description: str, total: int) -> Update:
    """Progress where the library for bars is missing, as on many GPU machines."""
    begun: list[tuple[float, int]] = []
    told = [time.monotonic()]

    def update(done: int, note: str = "") -> None:
        now = time.monotonic()
        if not begun:
            begun.append((now, done))
        if done >= total or now - told[0] >= LOG_SECONDS:
            told[0] = now
            start, first = begun[0]
            left = (now - start) / (done - first) * (total - done) if done > first else None
            _line(description, done, total, note, left)

    return update


def _line(description: str, done: int, total: int, note: str, left: float | None) -> None:
    parts = [f"{description} {done}/{total}", note, "" if left is None else f"{left:.0f} s left"]
    print(", ".join(p for p in parts if p), file=sys.stderr, flush=True)


def choose_device(name: str) -> str:
    """The torch device that `--device` means on this machine."""
    import torch

    from voxtune.errors import InputError

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()) or (kind == "cpu" and index):
        raise InputError(f"--device {name}: choose auto, cpu, cuda or cuda:N")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices; use --device cpu"
        )
    if index:
        torch.cuda.set_device(int(index))  # kernels are launched on the current one
    return name


def parse_size(text: str, option: str = "--size") -> tuple[int, ...]:
    """ "128,128,128" or "128x128x128" as numbers, in tensor order (depth, height, width)."""
    from voxtune.errors import InputError

    parts = text.replace("x", ",").split(",")
    if not all(p.strip().isdigit() and 0 < int(p) <= 4096 for p in parts):
        raise InputError(f"{option} {text}: give sides as whole numbers from 1 to 4096, such as 128,128,128")
    return tuple(int(p) for p in parts)


def parse_steps(text: str | None) -> int | Literal["auto"] | None:
    """`--steps`: a number, auto, or nothing."""
    from voxtune.errors import InputError

    if text is None or text == "auto":
        return text  # type: ignore[return-value]
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text) > 0):
        raise InputError(f"--steps {text[:40]}: give a whole number from 1 up, or auto")
    return int(text)


def parse_labels(text: str | None) -> list[dict[str, Any]] | None:
    """`--labels`: name=value pairs, in channel order."""
    from voxtune.errors import InputError

    if text is None:
        return None
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name.strip() and value.strip().isdecimal() for name, _, value in pairs):
        raise InputError(f"--labels {text}: give names and values, such as brain=1,tumour=2")
    return [{"name": n.strip(), "value": int(v), "channel": i} for i, (n, _, v) in enumerate(pairs)]

"""voxtune study: a published study on the GPU at hand, in one go."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from voxtune.cli.common import DeviceOption, JsonOption, Output, QuietOption, choose_device, parse_size
from voxtune.cli.report import load, summary, write
from voxtune.errors import InputError

if TYPE_CHECKING:
    from voxtune.profile.session import Session

# The paper's four, then what a good engineer would do today, then this project's own plan (sampling).
CONFIGS = "baseline,tf32,channels_last,tf32+channels_last,bf16+channels_last,bf16+channels_last+compile,plan"


class Study(StrEnum):
    seed = "seed"


class Mode(StrEnum):
    train = "train"
    sample = "sample"
    both = "both"

    def modes(self) -> list[str]:
        return ["train", "sample"] if self is Mode.both else [self.value]


def command(
    study: Annotated[Study, typer.Argument(help="Which study.")] = Study.seed,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for sessions and report.")] = Path("study"),
    recorded: Annotated[bool, typer.Option("--recorded", help="Use the sessions that ship with voxtune.")] = False,
    mode: Annotated[Mode, typer.Option(help="Which steps to record.")] = Mode.train,
    workload: Annotated[str, typer.Option(help="Workload or model to record.")] = "med-ddpm",
    size: Annotated[str | None, typer.Option(help="Sides of the volume, such as 128,128,128.")] = None,
    config: Annotated[str, typer.Option(help="Configurations, by comma.")] = CONFIGS,
    budget: Annotated[
        float | None, typer.Option(min=30, help="Seconds for the sessions of one mode, shared fairly.")
    ] = None,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Record the paper's configurations, and set its figures beside this GPU's: in its window and over the whole step."""
    out = Output(json=as_json, quiet=quiet)
    if recorded:
        sessions = [s for s in load([], recorded=True) if s.meta["mode"] in mode.modes()]
        if not sessions:
            raise InputError(f"--mode {mode.value}: the recorded sessions hold none of it")
    else:
        sessions = _record(workload, config, mode, output, _options(size, budget), choose_device(device), out)
    from voxtune.report.build import build

    document = build(sessions)
    files = write(document, "html", output / "report.html", out)
    tables = _print_study(sessions, out)
    out.result({**summary(document, sessions, files), "study": tables})


def _options(size: str | None, budget: float | None) -> dict[str, Any]:
    return {"size": parse_size(size) if size else None, "budget_s": budget}


def _record(
    workload: str, config: str, mode: Mode, output: Path, asked: dict[str, Any], device: str, out: Output
) -> list[Session]:
    from voxtune.profile.record import RecordOptions, record

    sessions = []
    for name in mode.modes():
        options = RecordOptions(mode=name, **asked)
        wanted = [c for c in config.split(",") if c != "plan" or name == "sample"]
        for result in record(workload, wanted, output, options=options, device=device, say=out.say):
            if result.session is None:
                out.warn(f"{name} {result.config} was not recorded: {result.error}")
            else:
                sessions.append(result.session)
    if not sessions:
        raise InputError("no configuration could be recorded; the warnings above say why")
    return sessions


def _print_study(sessions: list[Session], out: Output) -> dict[str, Any]:
    """Figure by figure, for each mode that has its baseline."""
    from voxtune.analysis.study import study_table
    from voxtune.report.build import by_figure
    from voxtune.report.console import make_console, print_table
    from voxtune.report.sections.comparison import alike

    told: dict[str, Any] = {}
    for name, group in alike(sessions).items():
        try:
            table = study_table(group)
        except InputError as error:
            out.warn(f"{name}: {error}")
            continue
        told[name] = table.to_json()
        if out.quiet or out.json:
            continue
        out.say(f"\n{name}")
        for part in by_figure(table):
            print_table(part, make_console(), rows=100)
    return told

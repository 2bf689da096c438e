"""voxtune study: a published performance study, repeated on this machine's GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from voxtune.cli.choices import one_of
from voxtune.cli.common import (
    DeviceOption,
    JsonOption,
    Output,
    OverwriteOption,
    QuietOption,
    RecordPathsOption,
    StepModes,
    choose_device,
    parse_size,
)
from voxtune.cli.report import load, summary, write
from voxtune.errors import InputError
from voxtune.files import check_outputs, locked_folder

if TYPE_CHECKING:
    from voxtune.profile.record import RecordOptions
    from voxtune.profile.session import Session

# The paper's four configurations, the usual ones today, and Voxtune's plan (sampling only).
CONFIGS = "baseline,tf32,channels_last,tf32+channels_last,bf16+channels_last,bf16+channels_last+compile,plan"


def command(
    study: Annotated[
        str,
        typer.Argument(
            help="Study: {study} (Ryoo et al., Performance Analysis and Optimization of 3D Generative Diffusion Models "
            "across GPU Architectures, ICPE 2026).",
            **one_of("study", old={"seed": "paper"}),
        ),
    ] = "paper",
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the sessions and the report.")] = Path("study"),
    recorded: Annotated[
        bool, typer.Option("--recorded", help="Use the recorded sessions that ship with voxtune.")
    ] = False,
    add: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER",
            help="Also show sessions of other machines, such as those of voxtune profile --kit. May be repeated.",
        ),
    ] = None,
    across_gpus: Annotated[
        bool, typer.Option("--across-gpus", help="Also compute ratios between sessions of different GPUs.")
    ] = False,
    mode: Annotated[StepModes, typer.Option(help="Which steps to record.")] = StepModes.train,
    workload: Annotated[str, typer.Option(help="Workload ({workload}) or model to record.")] = "med-ddpm",
    size: Annotated[str | None, typer.Option(help="Size as D,H,W. Default: the workload's.")] = None,
    config: Annotated[
        str, typer.Option(help="Comma-separated configurations, each joined by + from: {configuration}.")
    ] = CONFIGS,
    budget: Annotated[
        float | None, typer.Option(min=30, help="Time limit in seconds for the sessions of one mode.")
    ] = None,
    overwrite: OverwriteOption = False,
    record_paths: RecordPathsOption = False,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Record the paper's configurations and compare its published values with this GPU, in its window and per step."""
    output = Output(json=as_json, quiet=quiet)
    page = out / "report.html"
    recordings = [] if recorded else _recordings(config, mode, {**_options(size, budget), "overwrite": overwrite})
    check_outputs([page, *_session_files(out, recordings)], overwrite=overwrite, folder=out)
    with locked_folder(out):
        if recorded:
            sessions = [s for s in load([], recorded=True) if s.meta["mode"] in mode.modes()]
            if not sessions:
                raise InputError(f"--mode {mode.value}: no recorded session has this mode")
        else:
            sessions = _record(workload, recordings, out, choose_device(device), output)
        if add:
            sessions += [s for s in load(add, recorded=False) if s.meta["mode"] in mode.modes()]
        from voxtune.report.build import build

        document = build(sessions, across_gpus=across_gpus)
        files = write(document, "html", page, output, overwrite=overwrite)
    tables = _print_study(sessions, output)
    output.result({**summary(document, sessions, files), "study": tables})


def _options(size: str | None, budget: float | None) -> dict[str, Any]:
    return {"size": parse_size(size) if size else None, "budget_s": budget}


def _recordings(config: str, mode: StepModes, settings: dict[str, Any]) -> list[tuple[RecordOptions, list[str]]]:
    """The options and configurations of each mode."""
    from voxtune.profile.record import RecordOptions

    return [
        (RecordOptions(mode=name, **settings), [c for c in config.split(",") if c != "plan" or name == "sample"])
        for name in mode.modes()
    ]


def _session_files(folder: Path, recordings: list[tuple[RecordOptions, list[str]]]) -> list[Path]:
    from voxtune.profile.record import recorded_files

    return [file for options, configs in recordings for file in recorded_files(folder, configs, options)]


def _record(
    workload: str,
    recordings: list[tuple[RecordOptions, list[str]]],
    folder: Path,
    device: str,
    output: Output,
) -> list[Session]:
    from voxtune.profile.record import record

    sessions = []
    for options, configs in recordings:
        for result in record(workload, configs, folder, options=options, device=device, say=output.say):
            if result.session is None:
                output.warn(f"{options.mode} {result.config} was not recorded: {result.error}")
            else:
                sessions.append(result.session)
    if not sessions:
        raise InputError("no configuration could be recorded; see the warnings above")
    return sessions


def _print_study(sessions: list[Session], output: Output) -> dict[str, Any]:
    """Prints the study's table figure by figure, for each mode with a baseline session; returns the tables."""
    from voxtune.analysis.study import study_table
    from voxtune.report.build import by_figure
    from voxtune.report.console import make_console, print_table
    from voxtune.report.sections.comparison import comparable

    tables: dict[str, Any] = {}
    for name, group in comparable(sessions, across_gpus=True).items():
        try:
            table = study_table(group)
        except InputError as error:
            output.warn(f"{name}: {error}")
            continue
        tables[name] = table.to_json()
        if output.quiet or output.json:
            continue
        output.say(f"\n{name}")
        for part in by_figure(table):
            print_table(part, make_console(), rows=100)
    return tables

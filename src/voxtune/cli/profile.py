"""voxtune profile: record whole steps of a workload or a model into sessions."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from voxtune.cli.common import (
    EXIT_NEGATIVE,
    DeviceOption,
    JsonOption,
    Output,
    OverwriteOption,
    QuietOption,
    RecordPathsOption,
    StepMode,
    choose_device,
    parse_size,
    parse_window_option,
)
from voxtune.errors import InputError

if TYPE_CHECKING:
    from voxtune.profile.record import RecordOptions
    from voxtune.profile.session import Session


class CacheControl(StrEnum):
    none = "none"
    all = "all"


class ClockControl(StrEnum):
    none = "none"
    base = "base"


def command(
    source: Annotated[
        str | None, typer.Argument(metavar="WORKLOAD|MODEL", help="A workload ({workload}) or a model's path.")
    ] = None,
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="Output folder; each session gets its own subfolder.")],
    mode: Annotated[
        StepMode, typer.Option(help="train: forward, loss, backward and Adam. sample: one DDPM step.")
    ] = StepMode.train,
    config: Annotated[
        str,
        typer.Option(help="Comma-separated configurations, each joined by + from: {configuration}."),
    ] = "baseline,tf32,channels_last,tf32+channels_last",
    size: Annotated[str | None, typer.Option(help="Size as D,H,W (or H,W). Default: the workload's.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Whole steps in the census.")] = 2,
    repeats: Annotated[int, typer.Option(min=5, help="Steps timed without a profiler.")] = 5,
    tiers: Annotated[str, typer.Option(help="Comma-separated tiers to record: {tier}.")] = "census,few,full,opcodes",
    limit: Annotated[float, typer.Option(min=1, help="Time limit in seconds for the counters of one session.")] = 600.0,
    budget: Annotated[
        float | None, typer.Option(min=30, help="Time limit in seconds for all sessions together.")
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(
            metavar="paper|SKIP:COUNT",
            help="Also report how much of the step a profiling window would have covered: COUNT kernels after the first "
            "SKIP, or paper for 10:100 (Ryoo et al., ICPE 2026). Whole steps are recorded in any case.",
        ),
    ] = None,
    cache_control: Annotated[
        CacheControl, typer.Option(help="Nsight Compute: none keeps the caches warm, all flushes them.")
    ] = CacheControl.none,
    clock_control: Annotated[
        ClockControl, typer.Option(help="Nsight Compute: base locks the clocks.")
    ] = ClockControl.none,
    ahead: Annotated[bool, typer.Option(help="Start the worker processes early to save time.")] = True,
    keep_raw: Annotated[
        bool, typer.Option("--keep-raw", help="Keep the trace and the counter pages in the session folder.")
    ] = False,
    nvtx: Annotated[
        bool,
        typer.Option(
            "--nvtx",
            help="Mark modules as NVTX ranges while counters are read, and keep Nsight Compute's reports (.ncu-rep) in the "
            "session folder. They contain this machine's paths.",
        ),
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--continue",
            help="Continue the sessions in the output folder: count what they lack, and merge it if the step is the same.",
        ),
    ] = False,
    kit: Annotated[
        bool,
        typer.Option(
            "--kit",
            help="Record the study's configurations, training and sampling, on another GPU, for voxtune study --add.",
        ),
    ] = False,
    self_check: Annotated[
        bool, typer.Option("--self-check", help="Record a small step and check that every tier works on this machine.")
    ] = False,
    overwrite: OverwriteOption = False,
    record_paths: RecordPathsOption = False,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Record whole steps: timeline, modules, memory, and GPU counters where available."""
    from voxtune.profile.configs import parse_configs
    from voxtune.profile.record import RecordOptions, failed_tiers, record, summary, summary_lines
    from voxtune.profile.steps import smallest_size

    window = parse_window_option(window)
    output = Output(json=json, quiet=quiet)
    if kit and (self_check or window is not None):
        raise InputError("--kit cannot be combined with --self-check or --window")
    if source is None:
        if not kit:
            raise InputError("missing WORKLOAD or MODEL: give a workload or a model's path, or --kit for the study")
        source = "med-ddpm"
    options = RecordOptions(
        mode=mode.value,
        size=parse_size(size) if size else smallest_size(source) if self_check else None,
        batch=batch,
        steps=steps,
        repeats=repeats,
        tiers=tuple(t.strip() for t in tiers.split(",") if t.strip()),
        limit_s=limit,
        budget_s=budget,
        cache_control=cache_control.value,
        clock_control=clock_control.value,
        ahead=ahead,
        keep_raw=keep_raw,
        nvtx=nvtx,
        overwrite=overwrite,
        resume=resume,
    )
    if kit:
        _record_kit(source, out, options, device, output)
        return
    configs = [c.name for c in parse_configs(config)]
    recorded = record(source, configs, out, options=options, device=choose_device(device), say=output.say)
    rows = []
    for result in recorded:
        row = summary(result)
        if window is not None and result.session is not None:
            row["window"] = _coverage(result.session, window)
        rows.append(row)
        for line in summary_lines(row):
            output.say(line)
        if "window" in row:
            output.say(_coverage_line(row["window"]))
    failed = failed_tiers(rows, options.tiers) if self_check else []
    if self_check:
        output.say(f"self-check: {'FAILED: ' + ', '.join(failed) if failed else 'passed, every tier works here'}")
    output.result({"out": str(out), "sessions": rows})
    if failed or any(r.error for r in recorded):
        raise typer.Exit(EXIT_NEGATIVE)


def _record_kit(source: str, out: Path, options: RecordOptions, device: str, output: Output) -> None:
    """The sessions of the study on this GPU, in both modes; a configuration that fails is named and left out."""
    from voxtune.profile.record import record, summary, summary_lines
    from voxtune.report.recordings import KIT_CONFIGS

    place = choose_device(device)
    if not place.startswith("cuda"):
        raise InputError("--kit requires a GPU: it records GPU sessions for the study")
    rows = []
    for mode in ("train", "sample"):
        for result in record(
            source, KIT_CONFIGS, out, options=replace(options, mode=mode), device=place, say=output.say
        ):
            row = {"mode": mode, **summary(result)}
            rows.append(row)
            for line in summary_lines(row):
                output.say(line)
    recorded = [r for r in rows if "error" not in r]
    output.result({"out": str(out), "sessions": rows})
    if not recorded:
        output.say("No session was recorded. If the GPU has too little memory, give a smaller --size such as 64,64,64.")
        raise typer.Exit(EXIT_NEGATIVE)
    output.say(
        f"{out}: {len(recorded)} of {len(rows)} sessions. To see them beside the recorded GPUs: "
        f"voxtune study --recorded --add {out}. To share them, send the folder; it contains no paths of this machine."
    )


def _coverage(session: Session, window: str) -> dict[str, Any]:
    """The window's place in the first step, and its share of that step's kernel time."""
    from voxtune.analysis.certificate import window as cut

    part = cut(session, window)
    rows = session.launches
    kernels = rows[(rows["step"] == rows["step"].min()) & rows["kind"].isin(["kernel", "cpu_op"])]
    total = float(kernels["duration_us"].sum())
    return {**part.meta["window"], "time_share": float(part.launches["duration_us"].sum()) / total if total else None}


def _coverage_line(window: dict[str, Any]) -> str:
    if not window["kept"]:
        return f"  window   nothing: the step has {window['of']} kernels, the window skips {window['skip']}"
    share = "" if window["time_share"] is None else f", {100 * window['time_share']:.2f} % of kernel time"
    first, last = window["skip"] + 1, window["skip"] + window["kept"]
    return f"  window   kernels {first} to {last} of {window['of']}{share}"

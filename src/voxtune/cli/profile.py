"""voxtune profile: record whole steps of a workload or a model into sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from voxtune.cli.common import DeviceOption, JsonOption, Output, QuietOption, choose_device, parse_size


def command(
    source: Annotated[str, typer.Argument(metavar="WORKLOAD|MODEL", help="A workload's name, or a model's path.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the sessions, one folder each.")],
    mode: Annotated[
        str, typer.Option(help="train (forward, loss, backward, Adam) or sample (one DDPM step).")
    ] = "train",
    config: Annotated[
        str,
        typer.Option(help="Configurations, by commas: baseline, or tf32, bf16, channels_last, compile joined by +."),
    ] = "baseline,tf32,channels_last,tf32+channels_last",
    size: Annotated[str | None, typer.Option(help="Another size than its own, as depth,height,width.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples in a step.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Whole steps in the census.")] = 2,
    repeats: Annotated[int, typer.Option(min=5, help="Bare steps, for the time and its spread.")] = 5,
    tiers: Annotated[
        str, typer.Option(help="What to record, of census, few, full, opcodes.")
    ] = "census,few,full,opcodes",
    limit: Annotated[float, typer.Option(min=1, help="Seconds for the counters of one session.")] = 600.0,
    budget: Annotated[
        float | None, typer.Option(min=30, help="Seconds for all sessions together, shared fairly.")
    ] = None,
    window: Annotated[str, typer.Option(help="none or seed: whole steps are recorded; the report cuts them.")] = "none",
    cache_control: Annotated[
        str, typer.Option(help="Nsight Compute: none keeps caches warm, all flushes them.")
    ] = "none",
    clock_control: Annotated[str, typer.Option(help="Nsight Compute: none, or base to lock the clocks.")] = "none",
    ahead: Annotated[bool, typer.Option(help="Start the workers before their turn, to save time.")] = True,
    keep_raw: Annotated[
        bool, typer.Option("--keep-raw", help="Keep the trace and the counters' pages, to read them again later.")
    ] = False,
    self_check: Annotated[
        bool, typer.Option("--self-check", help="A small step, and a verdict on whether every tier works here.")
    ] = False,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Record whole steps: timeline, modules, memory, and the GPU's counters where they can be read."""
    from voxtune.errors import InputError
    from voxtune.profile.configs import parse_configs
    from voxtune.profile.record import RecordOptions, lines, record, summary, verdict
    from voxtune.profile.steps import smallest_size

    if window not in ("none", "seed"):
        raise InputError(f"--window {window}: choose none or seed")
    output = Output(json=json, quiet=quiet)
    options = RecordOptions(
        mode=mode,
        size=parse_size(size) if size else smallest_size(source) if self_check else None,
        batch=batch,
        steps=steps,
        repeats=repeats,
        tiers=tuple(t.strip() for t in tiers.split(",") if t.strip()),
        limit_s=limit,
        budget_s=budget,
        cache_control=cache_control,
        clock_control=clock_control,
        ahead=ahead,
        keep_raw=keep_raw,
    )
    chosen = [c.name for c in parse_configs(config)]
    recorded = record(source, chosen, out, options=options, device=choose_device(device), say=output.say)
    rows = [summary(r) for r in recorded]
    for line in (line for row in rows for line in lines(row)):
        output.say(line)
    if self_check:
        output.say(verdict(rows, options.tiers))
    output.result({"out": str(out), "sessions": rows})
    if any(r.error for r in recorded):
        raise typer.Exit(1)

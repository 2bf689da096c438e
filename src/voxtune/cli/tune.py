"""voxtune tune: find the fastest plan that gives the same answer, on this machine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from voxtune.cli.common import DeviceOption, JsonOption, Output, QuietOption, choose_device, parse_size


def command(
    model: Annotated[str, typer.Argument(help="A model folder, a published .pt checkpoint, or a workload's name.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Plan file; it is kept in the cache for --plan auto in any case.")
    ] = None,
    size: Annotated[str | None, typer.Option(help="Size as D,H,W. Default: the model's.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Volumes at a time.")] = 1,
    minutes: Annotated[float | None, typer.Option(min=0.0, help="Begin nothing new after so many minutes.")] = None,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Measure passes on this machine, gate each against the network itself, keep what is faster and the same."""
    from voxtune.runtime.planned import example_inputs, tune_model, tuning_target

    output = Output(json=json, quiet=quiet)
    loaded = tuning_target(model, choose_device(device))
    sides = parse_size(size) if size else None
    args = example_inputs(loaded, sides, batch)
    output.say(f"tuning {model} at {'x'.join(map(str, args[0].shape[2:]))}, batch {batch}, on {loaded.device}")
    seconds = math.inf if minutes is None else 60 * minutes
    _, plan = tune_model(loaded, args, cache=loaded.resolve().cache, seconds=seconds, say=output.say)
    if out is not None:
        plan.save(out)
        output.say(f"wrote {out}")
    output.say("best: " + (" + ".join(plan.names) or "nothing rewritten"))
    output.result(plan.to_json())

"""voxtune tune: find the fastest plan that passes the gate on this machine."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from voxtune.cli.common import (
    DeviceOption,
    JsonOption,
    Output,
    OverwriteOption,
    QuietOption,
    choose_device,
    parse_size,
)
from voxtune.files import check_outputs, locked_file

if TYPE_CHECKING:
    from voxtune.plan.plan import Plan


def command(
    model: Annotated[str, typer.Argument(help="Model folder, published .pt checkpoint, or name of a workload.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Plan file to write. The plan is cached for --plan auto too.")
    ] = None,
    size: Annotated[str | None, typer.Option(help="Size as D,H,W. Default: the model's.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Volumes per step.")] = 1,
    minutes: Annotated[float | None, typer.Option(min=0.0, help="Tuning time limit in minutes. Default: none.")] = None,
    overwrite: OverwriteOption = False,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Measure plans on this machine and keep the fastest one whose output matches the original network's."""
    from voxtune.runtime.planned import example_inputs, tune_model, tuning_target

    output = Output(json=json, quiet=quiet)
    if out is not None:
        check_outputs([out], overwrite=overwrite)
    loaded = tuning_target(model, choose_device(device))
    args = example_inputs(loaded, parse_size(size) if size else None, batch)
    output.say(f"tuning {model} at {'x'.join(map(str, args[0].shape[2:]))}, batch {batch}, on {loaded.device}")
    seconds = math.inf if minutes is None else 60 * minutes
    with nullcontext() if out is None else locked_file(out), output.progress("tuning", 100) as update:
        _, plan = tune_model(
            loaded,
            args,
            cache=loaded.resolve().cache,
            seconds=seconds,
            say=output.say,
            progress=lambda fraction: update(round(100 * fraction)),
        )
        if out is not None:
            plan.save(out, overwrite=overwrite)
    if out is not None:
        output.say(f"wrote {out}")
    output.say(f"best plan: {' + '.join(plan.names) or 'nothing rewritten'}{_times(plan)}")
    output.result(plan.to_json())


def _times(plan: Plan) -> str:
    """The times of the row that made the plan the best one."""
    from voxtune.plan.tuner import format_ms

    row = [row for row in plan.evidence["waterfall"] if row["kept"] and row["passes"] == list(plan.names)][-1]
    before = (
        f"; the best before it, timed beside it: {format_ms(row['best_p50_ms'])} ms" if "best_p50_ms" in row else ""
    )
    return f" ({format_ms(row['p50_ms'])} ms{before})"

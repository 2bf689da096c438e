"""voxtune demo: tune, sample, measure and view one volume with the shipped model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from voxtune.cli.common import (
    DeviceOption,
    JsonOption,
    Output,
    OverwriteOption,
    QuietOption,
    RecordPathsOption,
    choose_device,
)
from voxtune.errors import check_installed


def command(
    out: Annotated[Path, typer.Option("--out", "-o", help="Output folder.")] = Path("out/demo"),
    model: Annotated[Path | None, typer.Option(help="Model folder. Default: the shipped demo model.")] = None,
    subject: Annotated[int, typer.Option(min=0, help="Number of the held-out simulated subject.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the generated volume.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Sampling steps. Default: the model's.")] = None,
    minutes: Annotated[
        float, typer.Option(min=0.0, help="Tuning time limit in minutes on a CPU (0 disables tuning).")
    ] = 1.0,
    overwrite: OverwriteOption = False,
    record_paths: RecordPathsOption = False,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Tune a plan, generate an MRI from a held-out simulated subject's mask, measure it and write pages to view."""
    from voxtune.evaluation.demo import demonstrate
    from voxtune.runtime.storage import demo_model

    check_installed("voxtune demo", "nilearn", "scipy", "pandas", "pyarrow")
    output = Output(json=json, quiet=quiet)
    started = time.perf_counter()
    result = demonstrate(
        demo_model() if model is None else model,
        choose_device(device),
        out,
        output,
        subject=subject,
        seed=seed,
        steps=steps,
        minutes=minutes,
        overwrite=overwrite,
    )
    seconds = time.perf_counter() - started
    for name, path in result.files.items():
        output.say(f"{name:9} {path}")
    output.say(f"done in {seconds:.0f} s. The generated volume is for research, not for clinical use.")
    output.result({**result.to_json(), "total_seconds": round(seconds, 2)})

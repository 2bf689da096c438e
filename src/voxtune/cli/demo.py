"""voxtune demo: the whole product on an embedded default."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from voxtune.cli.common import DeviceOption, JsonOption, Output, QuietOption, choose_device


def command(
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to write.")] = Path("out/demo"),
    model: Annotated[Path | None, typer.Option(help="Another model than the shipped one.")] = None,
    subject: Annotated[int, typer.Option(min=0, help="Which held-out subject of the cohort.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the synthetic volume.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Sampling steps; default: the model's.")] = None,
    minutes: Annotated[float, typer.Option(min=0.0, help="Begin no more tuning after these; 0: draw without.")] = 2.0,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Draw a held-out subject's MRI from its mask by a plan tuned here; measure it; write pages to look at."""
    from voxtune.evaluation.demo import demonstrate
    from voxtune.runtime.storage import demo_model

    output = Output(json=json, quiet=quiet)
    started = time.perf_counter()
    shown = demonstrate(
        demo_model() if model is None else model,
        choose_device(device),
        out,
        output,
        subject=subject,
        seed=seed,
        steps=steps,
        minutes=minutes,
    )
    seconds = time.perf_counter() - started
    for what, path in shown.files.items():
        output.say(f"{what:9} {path}")
    output.say(f"done in {seconds:.0f} s. A synthetic image for research: not for clinical use.")
    output.result({**shown.to_json(), "total_seconds": round(seconds, 2)})

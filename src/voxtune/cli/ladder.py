"""voxtune ladder: the 2D network from a naive program to one CUDA graph, rung by rung, measured and checked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from voxtune.cli.common import DeviceOption, JsonOption, Output, QuietOption, choose_device, parse_size

# Without a GPU Triton's interpreter runs the kernels: the same code, some thousand times slower.
TINY_WIDTH, TINY_MULTIPLIERS = 8, (1, 2)
TINY_SIZE, TINY_STEPS = "16x16", 1


def command(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for ladder.json, ladder.html and ladder.svg.")],
    rungs: Annotated[str | None, typer.Option(help="Rungs by number, such as 1,4,8-10; else all.")] = None,
    size: Annotated[str | None, typer.Option(help="Height and width, 64x64 unless told.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Sampling steps, 100 unless told.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images at a time.")] = 1,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Climb the ladder: each rung's time, launches, transfers and error, as tables and as one picture."""
    output = Output(json=json, quiet=quiet)
    place = choose_device(device)
    on_gpu = place.startswith("cuda")
    if not on_gpu:
        # Decided when a kernel is defined, so before the first import of one.
        os.environ["TRITON_INTERPRET"] = "1"
        output.say(
            "no GPU: Triton's interpreter runs every rung on a tiny network (width 8, 16x16, 1 step unless told); "
            "what is counted and checked holds, the times say nothing about a GPU"
        )
    import torch

    from voxtune.diffusion import DiffusionConfig, make_schedule, spaced_steps
    from voxtune.errors import InputError
    from voxtune.ladder.climb import climb
    from voxtune.ladder.published_figures import all_figures
    from voxtune.ladder.rungs import Setting, rungs_of
    from voxtune.workloads.convnext import ConvNeXtConfig, ConvNeXtUNet

    chosen = rungs_of(rungs)
    sides = parse_size(size or ("64x64" if on_gpu else TINY_SIZE))
    if len(sides) != 2:
        raise InputError(f"--size {size}: this network draws images: give two sides, such as 64x64")
    torch.manual_seed(0)
    config = ConvNeXtConfig() if on_gpu else ConvNeXtConfig(width=TINY_WIDTH, multipliers=TINY_MULTIPLIERS)
    network = ConvNeXtUNet(config).eval().to(place)
    count = steps or (100 if on_gpu else TINY_STEPS)
    setting = Setting(
        network=network,
        size=(sides[0], sides[1]),
        schedule=make_schedule(DiffusionConfig(schedule="linear", steps=max(100, count))),
        timesteps=spaced_steps(max(100, count), count),
        batch=batch,
        dtype=torch.bfloat16 if on_gpu else torch.float32,
    )
    seeds = {"seeds": all_figures()}

    def keep(rows: dict[str, Any]) -> None:
        """After every rung, so that a climb cut short leaves those it did."""
        write(seeds | rows, out)

    found = seeds | climb(setting, chosen, runs=20 if on_gpu else 1, say=output.say, keep=keep)
    failed = "; ".join(f"rung {one['number']}: {one['reason']}" for one in found["failed"])
    if not found["rows"]:
        raise InputError(f"no rung ran on {place}: {failed}")
    for path in write(found, out):
        output.say(f"wrote {path}")
    if not quiet and not json:
        from voxtune.report.console import make_console, print_document
        from voxtune.report.ladder import ladder_document

        print_document(ladder_document(found), make_console())
    output.result(found)
    if failed:
        raise InputError(f"{failed}; the others are in {out}: leave these out with --rungs")


def write(found: dict[str, Any], folder: Path) -> list[Path]:
    """The tables, the page and the picture."""
    import json

    from voxtune.files import reporting_os_errors, write_atomic
    from voxtune.report.html import render_html
    from voxtune.report.ladder import ladder_document, ladder_picture
    from voxtune.report.svg import render_svg

    files = {
        "ladder.json": json.dumps(found, indent=1) + "\n",
        "ladder.html": render_html(ladder_document(found)),
        "ladder.svg": render_svg(ladder_picture(found)),
    }
    with reporting_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_atomic(folder / name, text.encode())
    return [folder / name for name in files]

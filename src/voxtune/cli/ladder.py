"""voxtune ladder: the 2D network from a naive program to one CUDA graph, measured and checked rung by rung."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

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
from voxtune.errors import InputError
from voxtune.files import check_outputs, locked_folder, write_output

FORMAT = "voxtune-ladder/1"
FILES = ("ladder.json", "ladder.html", "ladder.svg")
# Without a GPU the kernels run in Triton's interpreter: the same code, about a thousand times slower.
TINY_WIDTH, TINY_MULTIPLIERS = 8, (1, 2)
TINY_SIZE, TINY_STEPS = "16x16", 1


def command(
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", help="Folder for ladder.json, ladder.html and ladder.svg; with --recorded also a page.html."
        ),
    ],
    rungs: Annotated[str | None, typer.Option(help="Numbers of the rungs, such as 1,4,8-10 (default: all).")] = None,
    size: Annotated[str | None, typer.Option(help="Height and width in pixels (default: 64x64).")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Number of sampling steps (default: 100).")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 1,
    recorded: Annotated[
        bool, typer.Option("--recorded", help="Show the rungs as they were measured on an H200. No GPU needed.")
    ] = False,
    overwrite: OverwriteOption = False,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Run the 2D network in eleven stages of optimisation; write time, launches, transfers and error of each."""
    output = Output(json=json, quiet=quiet)
    if recorded:
        if rungs or size or steps or batch != 1:
            raise InputError("--recorded cannot be combined with --rungs, --size, --steps or --batch")
        _show_recorded(out, output, overwrite=overwrite)
        return
    check_outputs([out / name for name in FILES], overwrite=overwrite, folder=out)
    target = choose_device(device)
    on_gpu = target.startswith("cuda")
    if not on_gpu:
        # Triton reads this when a kernel is defined, so it must be set before kernels are imported.
        os.environ["TRITON_INTERPRET"] = "1"
        output.say(
            "no GPU: running every rung in Triton's interpreter on a tiny network (default: width 8, 16x16, 1 step); "
            "counts and checks are valid, times are meaningless"
        )
    import torch

    from voxtune.diffusion import DiffusionConfig, make_schedule, spaced_steps
    from voxtune.ladder.climb import climb
    from voxtune.ladder.published_results import published_results
    from voxtune.ladder.rungs import Setting, rungs_of
    from voxtune.workloads.convnext import ConvNeXtConfig, ConvNeXtUNet

    selected = rungs_of(rungs)
    dimensions = parse_size(size or ("64x64" if on_gpu else TINY_SIZE))
    if len(dimensions) != 2:
        raise InputError(f"--size {size}: expected height and width, such as 64x64")
    torch.manual_seed(0)
    config = ConvNeXtConfig() if on_gpu else ConvNeXtConfig(width=TINY_WIDTH, multipliers=TINY_MULTIPLIERS)
    network = ConvNeXtUNet(config).eval().to(target)
    count = steps or (100 if on_gpu else TINY_STEPS)
    setting = Setting(
        network=network,
        size=(dimensions[0], dimensions[1]),
        schedule=make_schedule(DiffusionConfig(schedule="linear", steps=max(100, count))),
        timesteps=spaced_steps(max(100, count), count),
        batch=batch,
        dtype=torch.bfloat16 if on_gpu else torch.float32,
    )
    reports = {"format": FORMAT, "seeds": published_results()}

    def save(rows: dict[str, Any]) -> None:
        """Called after every rung, so that an interrupted run keeps its results; after the first, the files are its own."""
        write(reports | rows, out, overwrite=overwrite or len(rows["rows"]) > 1)

    with locked_folder(out):
        tables = reports | climb(
            setting, selected, runs=20 if on_gpu else 1, cpu=rungs is None, report=output.say, save=save
        )
        files = write(tables, out, overwrite=True) if tables["rows"] else []
    failed = "; ".join(f"rung {one['number']}: {one['reason']}" for one in tables["failed"])
    if not tables["rows"]:
        raise InputError(f"no rung ran on {target}: {failed}")
    for path in files:
        output.say(f"wrote {path}")
    if not quiet and not json:
        from voxtune.report.console import make_console, print_document
        from voxtune.report.ladder import ladder_document

        print_document(ladder_document(tables), make_console())
    output.result(tables)
    if failed:
        raise InputError(f"{failed}; the results of the other rungs are in {out}; select rungs with --rungs")


def _show_recorded(out: Path, output: Output, *, overwrite: bool) -> None:
    """The shipped measurements as one page if the output is a page, otherwise as the three files of a run."""
    from voxtune.ladder.published_results import recorded_results
    from voxtune.report.ladder import ladder_document

    tables = recorded_results()
    if out.suffix == ".html":
        from voxtune.report.html import render_html

        check_outputs([out], overwrite=overwrite)
        files = [write_output(out, render_html(ladder_document(tables)), overwrite=overwrite)]
    else:
        check_outputs([out / name for name in FILES], overwrite=overwrite, folder=out)
        with locked_folder(out):
            files = write(tables, out, overwrite=overwrite)
    for path in files:
        output.say(f"wrote {path}")
    if not output.quiet and not output.json:
        from voxtune.report.console import make_console, print_document

        print_document(ladder_document(tables), make_console())
    output.result(tables)


def write(tables: dict[str, Any], folder: Path, *, overwrite: bool) -> list[Path]:
    """Writes the tables, the page and the chart."""
    import json

    from voxtune.files import recorded_text, write_file
    from voxtune.report.html import render_html
    from voxtune.report.ladder import ladder_document, ladder_picture
    from voxtune.report.svg import render_svg

    # Reasons of failures may name files.
    tables = tables | {"failed": [row | {"reason": recorded_text(row["reason"])} for row in tables["failed"]]}
    texts = (
        json.dumps(tables, indent=1) + "\n",
        render_html(ladder_document(tables)),
        render_svg(ladder_picture(tables)),
    )
    return [write_file(folder / name, text, overwrite=overwrite) for name, text in zip(FILES, texts, strict=True)]

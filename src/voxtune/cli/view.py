"""voxtune view: volumes, masks and metrics as one page to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from voxtune.cli.common import JsonOption, Output, QuietOption
from voxtune.errors import InputError
from voxtune.files import check_output_path


def command(
    folder: Annotated[Path, typer.Argument(help="Volumes, as voxtune sample writes them or a plain folder.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("view.html"),
    real: Annotated[Path | None, typer.Option(help="Folder of the real volumes, paired by name.")] = None,
    masks: Annotated[
        Path | None, typer.Option(help="Folder of the masks; else those found beside or recorded.")
    ] = None,
    metrics: Annotated[Path | None, typer.Option(help="A metrics.json; else the one in the folder.")] = None,
    labels: Annotated[Path | None, typer.Option(help="Names of labels: a dseg.tsv, or a model's folder.")] = None,
    sheet: Annotated[Path | None, typer.Option(help="Also a contact sheet of the first cases, as this PNG.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Show at most so many cases.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a page or sheet that is there.")] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write one page, complete in itself, to look at volumes: slices, 3D, masks, real beside synthetic, metrics."""
    from voxtune.report.view import view_page

    _check_place(out, ".html", overwrite)
    if sheet is not None:
        _check_place(sheet, ".png", overwrite)
    output = Output(json=json, quiet=quiet)
    made = view_page(folder, out, real=real, masks=masks, metrics=metrics, labels=labels, limit=limit)
    for warning in made.warnings:
        output.warn(warning)
    output.say(f"{made.path}: {len(made.cases)} case(s), {made.size / 1e6:.1f} MB; open it in a browser")
    news: list[str] = []
    if sheet is not None:
        from voxtune.report.contact_sheet import case_sheet

        drawn = case_sheet(folder, sheet, real=real, masks=masks, limit=limit)
        # What the page could not show in full has been told.
        news = [warning for warning in drawn.warnings if warning not in made.warnings]
        for warning in news:
            output.warn(warning)
        output.say(f"{drawn.path}: contact sheet of {len(drawn.cases)} case(s)")
    output.result(
        {
            "page": str(made.path),
            "sheet": None if sheet is None else str(sheet),
            "bytes": made.size,
            "cases": list(made.cases),
            "metrics": made.metrics,
            "warnings": [*made.warnings, *news],
        }
    )


def _check_place(path: Path, ending: str, overwrite: bool) -> None:
    """Refuses a file that must not be written, before any work."""
    if not path.name.lower().endswith(ending):
        raise InputError(f"{path}: the name does not end in {ending}; give one that does, such as view{ending}")
    check_output_path(path, overwrite)

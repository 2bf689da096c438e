"""voxtune view: a page with volumes, masks and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from voxtune.cli.common import JsonOption, Output, OverwriteOption, QuietOption
from voxtune.errors import InputError
from voxtune.files import check_outputs, counted


def command(
    folder: Annotated[Path, typer.Argument(help="Folder of volumes, written by voxtune sample or any other.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Output page.")] = Path("view.html"),
    real: Annotated[
        Path | None,
        typer.Option(help="Folder of volumes for comparison (real scans or simulated subjects), matched by name."),
    ] = None,
    masks: Annotated[
        Path | None,
        typer.Option(help="Folder of masks; by default those beside the volumes or named in their sidecars."),
    ] = None,
    metrics: Annotated[Path | None, typer.Option(help="A metrics.json; by default the one in the folder.")] = None,
    labels: Annotated[
        str | None,
        typer.Option(
            help="Label names: a dseg.tsv, a model folder, one of brats, brats2021, whole-head, or names and values such as "
            '"tumour=1,4; brain=2".'
        ),
    ] = None,
    sheet: Annotated[
        Path | None, typer.Option(help="Also write a contact sheet of the first cases to this PNG.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of cases.")] = None,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write a self-contained HTML page to view volumes: slices, 3D, masks, synthetic beside reference, metrics."""
    from voxtune.report.view import view_page

    _check_ending(out, ".html")
    if sheet is not None:
        _check_ending(sheet, ".png")
    check_outputs([out] if sheet is None else [out, sheet], overwrite=overwrite)
    output = Output(json=json, quiet=quiet)
    page = view_page(
        folder, out, real=real, masks=masks, metrics=metrics, labels=labels, limit=limit, overwrite=overwrite
    )
    for warning in page.warnings:
        output.warn(warning)
    output.say(f"{page.path}: {counted(len(page.cases), 'case')}, {page.size / 1e6:.1f} MB; open it in a browser")
    sheet_warnings: list[str] = []
    if sheet is not None:
        from voxtune.report.contact_sheet import case_sheet

        contact_sheet = case_sheet(
            folder, sheet, real=real, masks=masks, labels=labels, limit=limit, overwrite=overwrite
        )
        sheet_warnings = [warning for warning in contact_sheet.warnings if warning not in page.warnings]
        for warning in sheet_warnings:
            output.warn(warning)
        output.say(f"{contact_sheet.path}: contact sheet of {counted(len(contact_sheet.cases), 'case')}")
    output.result(
        {
            "page": str(page.path),
            "sheet": None if sheet is None else str(sheet),
            "bytes": page.size,
            "cases": list(page.cases),
            "metrics": page.metrics,
            "warnings": [*page.warnings, *sheet_warnings],
        }
    )


def _check_ending(path: Path, ending: str) -> None:
    if not path.name.lower().endswith(ending):
        raise InputError(f"{path}: the name must end in {ending}, such as view{ending}")

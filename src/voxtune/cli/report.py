"""voxtune report: recorded sessions as an HTML page, console tables or SVG files."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from voxtune.cli.common import JsonOption, Output, OverwriteOption, QuietOption, RecordPathsOption, parse_window_option
from voxtune.errors import InputError
from voxtune.files import check_outputs, write_output

if TYPE_CHECKING:
    from voxtune.profile.session import Session
    from voxtune.report.document import Document


DEFAULT_PAGE, DEFAULT_FOLDER = Path("report.html"), Path("report-svg")


class Form(StrEnum):
    html = "html"
    console = "console"
    svg = "svg"


def command(
    folders: Annotated[list[Path] | None, typer.Argument(help="Sessions, or folders of sessions.")] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File (html) or folder (svg) to write. Default: report.html, report-svg."),
    ] = None,
    form: Annotated[
        Form, typer.Option("--format", help="One HTML page, tables on the console, or SVG files.")
    ] = Form.html,
    window: Annotated[
        str | None,
        typer.Option(
            metavar="paper|SKIP:COUNT",
            help="Also show what a profiling window would have covered: COUNT kernels after the first SKIP, or paper "
            "for 10:100 (Ryoo et al., ICPE 2026).",
        ),
    ] = None,
    recorded: Annotated[
        bool, typer.Option("--recorded", help="Include the recorded sessions that ship with voxtune.")
    ] = False,
    across_gpus: Annotated[
        bool, typer.Option("--across-gpus", help="Also compute ratios between sessions of different GPUs.")
    ] = False,
    waterfall: Annotated[
        Path | None,
        typer.Option(
            metavar="RESULTS.json",
            help="Instead of sessions: draw a benchmark results file as a waterfall of one denoising step (SVG).",
        ),
    ] = None,
    overwrite: OverwriteOption = False,
    record_paths: RecordPathsOption = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show where the time of a step goes, from recorded sessions. No GPU needed."""
    output = Output(json=as_json, quiet=quiet)
    if waterfall is not None:
        if folders or recorded or window:
            raise InputError("--waterfall cannot be combined with sessions, --recorded or --window")
        _write_waterfall(waterfall, out or Path("waterfall.svg"), output, overwrite=overwrite)
        return
    window = parse_window_option(window)
    if form is Form.html:
        check_outputs([out or DEFAULT_PAGE], overwrite=overwrite)
    sessions = load(folders or [], recorded=recorded)
    from voxtune.report.build import build

    document = build(sessions, window=window, across_gpus=across_gpus)
    files = write(document, form.value, out, output, overwrite=overwrite)
    tables = [b.table.to_json() for b in document.tables()] if form is Form.console else []
    output.result({**summary(document, sessions, files), **({"tables": tables} if tables else {})})


def _write_waterfall(results: Path, target: Path, output: Output, *, overwrite: bool) -> None:
    from voxtune.report.waterfall import write_waterfall

    check_outputs([target], overwrite=overwrite)
    write_waterfall(results, target, overwrite=overwrite)
    output.say(f"{target}: waterfall of {results}")
    output.result({"files": [str(target)]})


def load(folders: list[Path], *, recorded: bool) -> list[Session]:
    from voxtune.profile.session import find_sessions, load_session
    from voxtune.report.recordings import in_order, recorded_root

    if recorded:
        folders = [*folders, recorded_root()]
    if not folders:
        raise InputError("missing sessions: give a folder, or --recorded for the sessions that ship with voxtune")
    return [s for folder in folders for s in in_order([load_session(path) for path in find_sessions(folder)])]


def write(document: Document, form: str, path: Path | None, output: Output, *, overwrite: bool = False) -> list[Path]:
    """Writes the document in the given form and returns the files."""
    if form == "console":
        if not output.quiet and not output.json:
            from voxtune.report.console import make_console, print_document

            print_document(document, make_console())
        return []
    if form == "svg":
        from voxtune.report.svg import write_svgs

        target = path or DEFAULT_FOLDER
        files = write_svgs(document, target, overwrite=overwrite)
    else:
        from voxtune.report.html import render_html

        target = path or DEFAULT_PAGE
        files = [write_output(target, render_html(document), overwrite=overwrite)]
    size = sum(f.stat().st_size for f in files) / 1e6
    output.say(f"{target}: {f'{len(files)} figures' if form == 'svg' else 'report'}, {size:.1f} MB")
    return files


def summary(document: Document, sessions: list[Session], files: list[Path]) -> dict[str, Any]:
    rows = [{"name": s.name, "mode": s.meta["mode"], "config": s.meta["config"]} for s in sessions]
    coverage = [{"label": b.label, "covered": b.good, "reasons": b.reasons} for b in document.badges]
    counters = [{"label": b.label, "covered": b.good, "reasons": b.reasons} for b in document.coverage]
    return {
        "title": document.title,
        "sessions": rows,
        "coverage": coverage,
        "counters": counters,
        "files": [str(f) for f in files],
    }

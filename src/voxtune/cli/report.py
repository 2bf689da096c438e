"""voxtune report: recorded sessions as a page, as console tables or as SVG files."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from voxtune.cli.common import JsonOption, Output, QuietOption
from voxtune.errors import InputError

if TYPE_CHECKING:
    from voxtune.profile.session import Session
    from voxtune.report.document import Document


class Form(StrEnum):
    html = "html"
    console = "console"
    svg = "svg"


class Window(StrEnum):
    seed = "seed"


def command(
    folders: Annotated[list[Path] | None, typer.Argument(help="Sessions, or folders of sessions.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File (html) or folder (svg) to write.")] = None,
    form: Annotated[
        Form, typer.Option("--format", help="A page, console tables, or SVG files for documents.")
    ] = Form.html,
    window: Annotated[Window | None, typer.Option(help="Also show what a profiling window would have seen.")] = None,
    recorded: Annotated[
        bool, typer.Option("--recorded", help="Report on the sessions that ship with voxtune.")
    ] = False,
    waterfall: Annotated[
        Path | None,
        typer.Option(
            metavar="RESULTS.json",
            help="Instead of sessions: draw a benchmark results file as a waterfall of one denoising step (SVG).",
        ),
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show where a step's time goes, from recorded sessions, with no GPU at hand."""
    out = Output(json=as_json, quiet=quiet)
    if waterfall is not None:
        if folders or recorded or window:
            raise InputError("--waterfall cannot be combined with sessions, --recorded or --window")
        _write_waterfall(waterfall, output or Path("waterfall.svg"), out)
        return
    sessions = load(folders or [], recorded=recorded)
    from voxtune.report.build import build

    document = build(sessions, window=window.value if window else None)
    files = write(document, form.value, output, out)
    tables = [b.table.to_json() for b in document.tables()] if form is Form.console else []
    out.result({**summary(document, sessions, files), **({"tables": tables} if tables else {})})


def _write_waterfall(results: Path, target: Path, out: Output) -> None:
    from voxtune.report.waterfall import write_waterfall

    write_waterfall(results, target)
    out.say(f"{target}: waterfall of {results}")
    out.result({"files": [str(target)]})


def load(folders: list[Path], *, recorded: bool) -> list[Session]:
    from voxtune.profile.session import find_sessions, load_session
    from voxtune.report.recordings import in_order, recorded_root

    if recorded:
        folders = [*folders, recorded_root()]
    if not folders:
        raise InputError("give a folder of sessions, or --recorded for those that ship with voxtune")
    return [s for folder in folders for s in in_order([load_session(path) for path in find_sessions(folder)])]


def write(document: Document, form: str, output: Path | None, out: Output) -> list[Path]:
    """Writes the document in its form; gives the files."""
    if form == "console":
        if not out.quiet and not out.json:
            from voxtune.report.console import make_console, print_document

            print_document(document, make_console())
        return []
    from voxtune.report.html import render_html

    page = render_html(document) if form == "html" else ""
    target = output or Path("report.html" if form == "html" else "report-svg")
    try:
        if form == "svg":
            from voxtune.report.svg import write_svgs

            files = write_svgs(document, target)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(page, encoding="utf-8")
            files = [target]
    except OSError as error:
        raise InputError(f"{target}: cannot write here ({error.strerror}); choose another place with -o") from None
    size = sum(f.stat().st_size for f in files) / 1e6
    out.say(f"{target}: {f'{len(files)} figures' if form == 'svg' else 'report'}, {size:.1f} MB")
    return files


def summary(document: Document, sessions: list[Session], files: list[Path]) -> dict[str, Any]:
    told = [{"name": s.name, "mode": s.meta["mode"], "config": s.meta["config"]} for s in sessions]
    covered = [{"label": b.label, "covered": b.good, "reasons": b.reasons} for b in document.badges]
    return {"title": document.title, "sessions": told, "coverage": covered, "files": [str(f) for f in files]}

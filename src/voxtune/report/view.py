"""Volumes to look at, as one HTML file that needs nothing else: NiiVue, the volumes and the metrics are inside it.

    from voxtune.report.view import view_page
    view_page("out", "view.html", real="cohort", masks="cohort/derivatives/masks")

Names come from files and may hold anything: they enter as escaped text, or as JSON whose angle brackets are escaped and
from there as text nodes. The page's own policy forbids every request and any script but its own, by digest.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from voxtune.data.cases import Case, Cases, find_cases, read_legend
from voxtune.errors import InputError
from voxtune.files import write_atomic
from voxtune.report.embedding import Embedding, TooLargeError
from voxtune.report.html import asset, embed, policy
from voxtune.report.metrics import MetricRow, Metrics, read_metrics
from voxtune.versions import __version__

MEGABYTE = 1_000_000
# Above the first a browser takes many seconds to open a page; the second is about as far as it was tried.
LARGE, LARGEST = 200 * MEGABYTE, 500 * MEGABYTE
# What a sidecar says that a reader of the volume wants to know.
TOLD = (("sampler", "sampler"), ("steps", "steps"), ("seed", "seed"), ("index", "sample"), ("placement", "placement"))
LIBRARY = "niivue/niivue.umd.js"


@dataclass(frozen=True, kw_only=True)
class Viewed:
    """What was written: the cases by name, and what its reader should know."""

    path: Path
    cases: tuple[str, ...]
    size: int
    metrics: int
    warnings: tuple[str, ...]


def view_page(
    folder: str | Path,
    output: str | Path,
    *,
    real: str | Path | None = None,
    masks: str | Path | None = None,
    metrics: str | Path | None = None,
    labels: str | Path | None = None,
    limit: int | None = None,
) -> Viewed:
    """Writes the page of every volume below `folder`, beside its real one and under its mask.

    `metrics`: a metrics.json; else the one in `folder`. `labels`: a dseg.tsv or a model's folder that names the labels;
    else the sidecars and the data set are asked. `limit`: how many cases at most.
    """
    found = find_cases(folder, real=real, masks=masks, limit=limit)
    legend = found.legend if labels is None else {**found.legend, **read_legend(labels)}
    measured, warnings = _metrics(Path(folder), None if metrics is None else Path(metrics))
    volumes = Embedding(limit=LARGEST)
    cases = _embed_cases(found, volumes, measured)
    data = {"cases": cases, "volumes": volumes.facts, "labels": volumes.labels(legend)}
    page = _render(_title(found), _subtitle(Path(folder), found), data, measured, volumes).encode()
    if len(page) > LARGE:
        warnings.append(
            f"the page has {len(page) / MEGABYTE:.0f} MB: browsers open it slowly; --limit N shows fewer cases"
        )
    write_atomic(Path(output), page)
    return Viewed(
        path=Path(output),
        cases=tuple(case_name(c) for c in found.cases),
        size=len(page),
        metrics=len(measured.figures),
        warnings=(*found.warnings, *volumes.warnings, *warnings),
    )


def _embed_cases(found: Cases, volumes: Embedding, measured: Metrics) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = []
    for case in found.cases:
        try:
            cases.append({**_embed_case(case, volumes), "measured": measured.volumes.get(case.volume.name, [])})
        except TooLargeError as error:
            fix = f"--limit {len(cases)} fits" if cases else "give smaller volumes"
            raise InputError(
                f"{error}: with it the page passes {LARGEST // MEGABYTE} MB, the most it may have; {fix}"
            ) from None
    return cases


def _embed_case(case: Case, volumes: Embedding) -> dict[str, Any]:
    mask = None if case.mask is None else volumes.mask(case.mask)
    return {
        "subject": case.subject,
        "note": case.note,
        "volume": volumes.image(case.volume),
        "real": None if case.real is None else volumes.image(case.real),
        "mask": mask,
        "focus": None if mask is None else volumes.facts[mask]["focus"],
        "told": [[label, str(case.record[key])] for key, label in TOLD if case.record.get(key) is not None],
    }


def _metrics(folder: Path, given: Path | None) -> tuple[Metrics, list[str]]:
    if given is not None:
        return read_metrics(given), []
    beside = folder / "metrics.json"
    if not beside.is_file():
        return Metrics(), []
    try:
        return read_metrics(beside), []
    except InputError as error:
        return Metrics(), [f"{error}; the page shows no metrics"]


def case_name(case: Case) -> str:
    """What tells a case from all others: the subject, the volume's number and modality."""
    return f"{case.subject} {case.note}".strip()


def _title(found: Cases) -> str:
    return "Synthetic volumes" if found.drawn else "Volumes"


def _subtitle(folder: Path, found: Cases) -> str:
    number, paired = len(found.cases), sum(case.real is not None for case in found.cases)
    beside = f", {paired} beside the real one" if paired else ""
    return f"{folder.resolve().name}: {number} {'case' if number == 1 else 'cases'}{beside}"


def _render(title: str, subtitle: str, data: dict[str, Any], measured: Metrics, volumes: Embedding) -> str:
    early, library = asset("early.js"), asset(LIBRARY)
    script = "\n".join(asset(name) for name in ("tables.js", "view.js"))
    return Template(asset("view.html")).substitute(
        policy=escape(policy([early, library, script])),
        version=escape(__version__),
        title=escape(title),
        subtitle=escape(subtitle),
        style=asset("page.css") + asset("view.css"),
        early=early,
        first="Synthetic" if title.startswith("Synthetic") else "Volume",
        cases="\n".join(_choice(i, case) for i, case in enumerate(data["cases"])),
        metrics=_table(measured.figures),
        licences=escape(_licences()),
        volumes="\n".join(volumes.elements()),
        data=embed(data),
        library=library,
        script=script,
    )


def _choice(place: int, case: dict[str, Any]) -> str:
    note = f"<small>{escape(case['note'])}</small>" if case["note"] else ""
    return f'<li><button type="button" data-case="{place}">{escape(case["subject"])}{note}</button></li>'


def _table(figures: tuple[MetricRow, ...]) -> str:
    if not figures:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{escape(f.name)}</th><td class="n">{escape(f.value)}'
        f'{f"<small>{escape(f.interval)}</small>" if f.interval else ""}</td><td class="n">{escape(f.count)}</td></tr>'
        for f in figures
    )
    value = '<th scope="col" class="n">value<small>interval</small></th>'
    head = f'<tr><th scope="col">figure</th>{value}<th scope="col" class="n">n</th></tr>'
    return (
        '<section id="metrics" aria-label="Metrics"><h2>Metrics</h2><p class="caption">Over all volumes that were evaluated.</p>'
        f'<div class="scroll"><table class="grid"><thead>{head}</thead><tbody>{rows}</tbody></table></div></section>'
    )


def _licences() -> str:
    """NiiVue's licence asks that it travels with the code, and the code travels with the page."""
    folder = resources.files("voxtune.report") / "assets" / "niivue"
    return "\n\n".join((folder / name).read_text(encoding="utf-8").strip() for name in ("LICENSE", "LICENSES-bundled"))

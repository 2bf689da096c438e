"""A viewer for volumes: one self-contained HTML file with NiiVue, the volumes, the masks and the metrics.

    from voxtune.report.view import view_page
    view_page("out", "view.html", real="cohort", masks="cohort/derivatives/masks")

File names are untrusted: they enter the page as escaped text, or as JSON with escaped angle brackets that the script
inserts as text nodes. The page's Content-Security-Policy forbids all requests and allows only its own scripts, by hash.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from voxtune.data.cases import Case, Cases, Origin, find_cases
from voxtune.errors import InputError
from voxtune.files import counted, utf8, write_output
from voxtune.report.embedding import Embedding, TooLargeError
from voxtune.report.html import asset, embed, policy
from voxtune.report.metrics import MetricRow, Metrics, read_metrics
from voxtune.versions import __version__

MEGABYTE = 1_000_000
# Browsers take many seconds to open a page above LARGE; larger pages than LARGEST were not tried.
LARGE, LARGEST = 200 * MEGABYTE, 500 * MEGABYTE
# Keys of a sidecar that the page shows, and their captions.
DETAILS = (
    ("sampler", "sampler"),
    ("steps", "steps"),
    ("seed", "seed"),
    ("placement", "placement"),
)
LIBRARY = "niivue/niivue.umd.js"
# Title of the page and caption of a volume by origin.
TITLES: dict[Origin, str] = {"synthetic": "Synthetic volumes", "simulated": "Simulated subjects"}
CAPTIONS: dict[Origin, str] = {
    "synthetic": "Synthetic",
    "simulated": "Simulated subject",
    "real": "Real",
    "reference": "Reference",
    "volume": "Volume",
}
NOUNS: dict[Origin, str] = {"simulated": "simulated subject", "real": "real volume"}


@dataclass(frozen=True, kw_only=True)
class WrittenPage:
    """The page that was written: names of its cases, size in bytes, number of metrics, and warnings."""

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
    overwrite: bool = False,
) -> WrittenPage:
    """Writes a page with every volume below `folder`, its reference volume and its mask.

    `metrics` is a metrics.json (default: the one in `folder`). `labels` is a dseg.tsv, a model folder or a text with the
    label names (default: those of the sidecars or the dataset). `limit` is the maximum number of cases.
    """
    cases = find_cases(folder, real=real, masks=masks, labels=labels, limit=limit)
    measured, warnings = _metrics(Path(folder), None if metrics is None else Path(metrics))
    volumes = Embedding(limit=LARGEST, legend=cases.legend)
    data = {"cases": _embed_cases(cases, volumes, measured), "volumes": volumes.facts, "labels": volumes.labels()}
    warnings += [] if labels is None else volumes.unnamed(str(labels))
    page = utf8(_render(_title(cases), _subtitle(Path(folder), cases), data, measured, volumes))
    if len(page) > LARGE:
        warnings.append(
            f"the page has {len(page) / MEGABYTE:.0f} MB; browsers open it slowly; pass --limit N to show fewer cases"
        )
    write_output(Path(output), page, overwrite=overwrite)
    return WrittenPage(
        path=Path(output),
        cases=tuple(case.name for case in cases.cases),
        size=len(page),
        metrics=len(measured.figures),
        warnings=(*cases.warnings, *volumes.warnings, *warnings),
    )


def _embed_cases(cases: Cases, volumes: Embedding, measured: Metrics) -> list[dict[str, Any]]:
    embedded: list[dict[str, Any]] = []
    for case in cases.cases:
        try:
            embedded.append(_embed_case(case, volumes, measured))
        except TooLargeError as error:
            fix = f"pass --limit {len(embedded)}" if embedded else "give smaller volumes"
            raise InputError(
                f"{error}: this volume makes the page larger than the limit of {LARGEST // MEGABYTE} MB; {fix}"
            ) from None
    return embedded


def _embed_case(case: Case, volumes: Embedding, measured: Metrics) -> dict[str, Any]:
    mask = None if case.mask is None else volumes.mask(case.mask, case.from_image)
    note = volumes.facts[mask]["note"] if mask else ""
    images = [
        {
            "kind": image.kind,
            "volume": volumes.image(image.volume),
            "reference": None if image.reference is None else volumes.image(image.reference),
            "measured": measured.volumes.get(image.volume.name, []),
        }
        for image in case.images
    ]
    return {
        "subject": case.subject,
        # The names of several kinds are on their buttons.
        "note": case.note
        if len(case.images) == 1
        else ", ".join(part for part in (case.number, f"{len(case.images)} images") if part),
        "images": images,
        "caption": CAPTIONS[case.origin],
        "reference_caption": CAPTIONS[case.reference_origin],
        "mask": mask,
        "details": [*_details(case.record), *([["note", note]] if note else [])],
    }


def _details(record: dict[str, Any]) -> list[list[str]]:
    """Captions and values of what the sidecar records."""
    rows = [[caption, str(record[key])] for key, caption in DETAILS if record.get(key) is not None]
    noise = record.get("noise")
    # In version 0.1 the noise was that of a number, without a rule.
    by_number = not isinstance(noise, dict) or noise.get("rule") == "position"
    if by_number and record.get("index") is not None:
        rows.append(["sample", str(record["index"])])
    return rows


def _metrics(folder: Path, given: Path | None) -> tuple[Metrics, list[str]]:
    if given is not None:
        return read_metrics(given), []
    beside = folder / "metrics.json"
    if not beside.is_file():
        return Metrics(), []
    if beside.is_symlink():
        return Metrics(), [f"{beside}: is a symbolic link; the page shows no metrics; pass the file with --metrics"]
    try:
        return read_metrics(beside), []
    except InputError as error:
        return Metrics(), [f"{error}; the page shows no metrics"]


def _title(cases: Cases) -> str:
    return TITLES.get(cases.origin, "Volumes")


def _subtitle(folder: Path, cases: Cases) -> str:
    number, paired = len(cases.cases), [c for c in cases.cases if any(i.reference for i in c.images)]
    origins = {case.reference_origin for case in paired}
    noun = NOUNS.get(origins.pop(), "reference") if len(origins) == 1 else "reference"
    beside = f", {len(paired)} with a {noun} for comparison" if paired else ""
    return f"{folder.resolve().name}: {counted(number, 'case')}{beside}"


def _render(title: str, subtitle: str, data: dict[str, Any], measured: Metrics, volumes: Embedding) -> str:
    early, library = asset("early.js"), asset(LIBRARY)
    script = "\n".join(asset(name) for name in ("tables.js", "surface.js", "view.js"))
    return Template(asset("view.html")).substitute(
        policy=escape(policy([early, library, script])),
        version=escape(__version__),
        title=escape(title),
        subtitle=escape(subtitle),
        style=asset("page.css") + asset("view.css"),
        early=early,
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
    head = f'<tr><th scope="col">metric</th>{value}<th scope="col" class="n">n</th></tr>'
    return (
        '<section id="metrics" aria-label="Metrics"><h2>Metrics</h2><p class="caption">Over all evaluated volumes.</p>'
        f'<div class="scroll"><table class="grid"><thead>{head}</thead><tbody>{rows}</tbody></table></div></section>'
    )


def _licences() -> str:
    """NiiVue's licences, which must accompany its code."""
    folder = resources.files("voxtune.report") / "assets" / "niivue"
    return "\n\n".join((folder / name).read_text(encoding="utf-8").strip() for name in ("LICENSE", "LICENSES-bundled"))

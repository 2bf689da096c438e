"""Output without a browser: escaping, content security policy, SVG, console, colours, number formats."""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import json
import re
from importlib import resources
from xml.etree import ElementTree

import pytest
from rich.console import Console

from tests.factories.report_sessions import HOSTILE, make
from voxtune.analysis.memory import memory_peak
from voxtune.analysis.table import Column, Table
from voxtune.report import palette
from voxtune.report.build import build
from voxtune.report.console import print_document, print_table
from voxtune.report.figure import Bars, Series
from voxtune.report.html import embed, render_html
from voxtune.report.numbers import clip, cudnn_version, heading, number
from voxtune.report.svg import render_svg, write_svgs

LIBRARY = "58936d6237391e167ec5dcd64858518d051df29c768245da46076f69b493a500"


@pytest.mark.parametrize("name", HOSTILE)
def test_embedded_json_cannot_leave_its_script(name):
    text = embed({"name": name})
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == {"name": name}


def test_policy_names_every_script(document):
    page = render_html(document)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page).group(1)
    assert policy.startswith("default-src &#x27;none&#x27;")
    scripts = re.findall(r"<script>(.*?)</script>", page, re.S)
    assert len(scripts) == 3
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"sha256-{digest}" in policy


def test_page_has_no_external_links(document):
    page = render_html(document)
    links = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert links
    assert all(link.startswith("#") or link == "data:," for link in links)


def test_library_is_the_one_reviewed():
    """Fails if the vendored file changes: see assets/vendor/README.md."""
    vendor = resources.files("voxtune.report") / "assets" / "vendor"
    assert hashlib.sha256((vendor / "echarts.js").read_bytes()).hexdigest() == LIBRARY
    assert all((vendor / f).is_file() for f in ("LICENSE-echarts", "NOTICE-echarts", "LICENSE-zrender", "LICENSE-d3"))


def test_every_figure_is_valid_svg(document, tmp_path):
    files = write_svgs(document, tmp_path / "figures")
    assert len(files) == len(document.figures()) == len(set(files))
    for file in files:
        assert ElementTree.parse(file).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_svg_escapes_names_and_shows_missing_values():
    names = [*HOSTILE, "control \x00\x1b[31m"]
    values = [None, *([1.0] * (len(names) - 1))]
    figure = Bars(id="f", title=HOSTILE[0], labels=names, series=[Series(name=HOSTILE[1], values=values)], unit="ms")
    root = ElementTree.fromstring(render_svg(figure))
    tags = {e.tag.rpartition("}")[2] for e in root.iter()}
    assert tags <= {"svg", "style", "title", "rect", "line", "text"}
    assert [e.text.count("{") for e in root.iter() if e.tag.endswith("style")] == [12]
    assert "not measured" in "".join(root.itertext())
    assert figure.unmeasured() == HOSTILE[0]


def test_console_prints_names_as_plain_text(document):
    table = Table("[bold]x[/]", [Column("kernel", kind="text"), Column("ms", "ms")])
    table.rows = [{"kernel": "[red]k\x1b]0;owned\x07[/red]", "ms": None}, {"kernel": "b", "ms": 1.5}]
    stream = io.StringIO()
    print_table(table, Console(file=stream, width=100))
    assert "[red]k" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()
    assert "–" in stream.getvalue()
    stream = io.StringIO()
    print_document(document, Console(file=stream, width=160))
    assert all(section.title in stream.getvalue() for section in document.sections)


def test_missing_counters_are_explained_and_not_drawn():
    document = build([make(launches=60, counters=False), make("tf32", launches=60, counters=False)])
    sections = {s.id: s for s in document.sections}
    for name in ("roofline", "instructions", "ipc", "pipes", "caches", "warps", "stalls", "priority"):
        blocks = list(sections[name].all_blocks())
        assert all("ERR_NVGPUCTRPERM" in b.text and b.tone == "missing" for b in blocks), name
    assert not any(b.good for b in document.badges)
    assert next(f for f in document.facts if f.label == "Counter coverage").value == "none"
    ratios = next(b.table for b in document.tables() if b.id == "compare-ratios-0")
    assert "does not cover its step" in ratios.refused
    assert "Refused: " in render_html(document)


def test_window_is_shown_after_its_session(two_sessions):
    document = build(two_sessions, window="paper")
    mix = next(f for f in document.figures() if f.id == "mix-ms")
    assert mix.labels == [f"{c}{w}" for c in ("baseline", "tf32") for w in ("", ", paper window")]
    assert [b.good for b in document.badges] == [True, False, True, False]
    compared = next(f for f in document.figures() if f.id == "compare-0")
    assert [s.name for s in compared.series] == ["baseline", "tf32"]


def test_modes_are_compared_separately():
    sessions = [make(c, launches=60, mode=m) for m in ("train", "sample") for c in ("tf32", "baseline")]
    compare = next(s for s in build(sessions).sections if s.id == "compare")
    assert [p.label for p in compare.tabs] == ["training", "sampling"]
    first = next(b for b in compare.tabs[0].blocks if isinstance(b, Bars))
    assert [s.name for s in first.series] == ["baseline", "tf32"]


def test_many_passed_badges_are_merged_and_modes_are_drawn_separately():
    sessions = [
        make(c, launches=40, mode=m) for m in ("train", "sample") for c in ("baseline", "tf32", "channels_last")
    ]
    document = build([*sessions, make("bf16", launches=40, counters=False)])
    assert [b.label for b in document.headline()] == [
        "6 of 7 sessions cover the whole step",
        "train bf16: whole step timed, counters incomplete",
    ]
    assert len(document.badges) == 7
    figures = {f.id: f for f in document.figures()}
    assert figures["mix-ms-train"].labels == ["baseline", "tf32", "channels_last", "bf16"]
    assert figures["mix-ms-sample"].labels == ["baseline", "tf32", "channels_last"]
    assert figures["mix-ms-sample"].title.endswith(": sampling")
    assert [f.label for f in document.facts][:2] == ["Training step", "Sampling step"]


def test_partial_counters_are_noted():
    session = make(launches=60)
    session.meta["tiers"]["full"] = {"done": False, "why": "its time ran out", "time_share": 0.17}
    figures = {f.id: f for f in build([session]).figures()}
    assert figures["caches-overall"].title == "Caches and DRAM, launches with counters"
    assert "17 %" in figures["caches-overall"].caption
    assert figures["mix-ms"].caption == ""


def test_memory_at_the_peak_is_shown_side_by_side():
    before, after = make(launches=60), make(launches=60)
    before.meta["name"], after.meta["name"] = "baseline", "plan"
    after.memory["bytes"] *= 0.5
    figures = {f.id: f for f in build([before, after]).figures()}
    figure = figures["memory-peak"]
    assert len(figure.labels) == 2 and figure.unit == "GiB"
    totals = [sum(series.values[i] for series in figure.series) for i in (0, 1)]
    assert totals[1] == pytest.approx(0.5 * totals[0]) and totals[0] == pytest.approx(
        memory_peak(before).extra["peak_bytes"] / 2**30
    )
    after.memory = after.memory.iloc[:0]
    figure = {f.id: f for f in build([before, after]).figures()}["memory-peak"]
    assert all(series.values[1] is None for series in figure.series)


def test_memory_chart_ends_before_the_final_wait_of_the_host():
    from voxtune.report.sections.step import _before_final_wait

    assert _before_final_wait([0.0, 1.0, 2.0, 3.0, 100.0]) == 4
    assert _before_final_wait([0.0, 1.0, 2.0, 3.0]) == 4 and _before_final_wait([]) == 0


def test_number_formats():
    assert [number(v, 2) for v in (None, 0.0, 1234.5, 0.004, 3.9e9, 1263)] == [
        "–",
        "0.00",
        "1,234.50",
        "0.004",
        "3.90e9",
        "1,263",
    ]
    assert heading(Column("wall_ms", "ms", better="low")) == ("wall", "ms ↓")
    assert heading(Column("ms", "ms")) == ("time", "ms")
    assert heading(Column("few_a_launch", "ms")) == ("few per launch", "ms")
    assert clip("abcdefghijkl", 7) == "abcd…kl"
    assert [cudnn_version(v) for v in (91900, "91002", 8902, None)] == ["9.19.0", "9.10.2", "8902", "None"]


# Machado, Oliveira and Fernandes 2009, severity 1.
VISIONS = {
    "full": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
}


def _lab(colour: str, vision: tuple) -> list[float]:
    rgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    seen = [min(1, max(0, sum(m * v for m, v in zip(row, linear, strict=True)))) for row in vision]
    matrix = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    xyz = [sum(m * v for m, v in zip(row, seen, strict=True)) for row in matrix]
    x, y, z = (
        v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (xyz[0] / 0.9505, xyz[1], xyz[2] / 1.089)
    )
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)]


@pytest.mark.parametrize("vision", VISIONS)
def test_class_colours_differ_without_full_colour_vision(vision):
    # Left out: rare and short classes (random, memset, host), and backward convolutions of unknown kind.
    families = [
        c for c in palette.CLASSES if c not in ("random", "memset", "host", "unknown", "conv_backward", "memcpy")
    ]
    for a, b in itertools.combinations(families, 2):
        if palette.CLASSES[a] == palette.CLASSES[b]:
            continue
        one, other = (_lab(palette.CLASSES[n], VISIONS[vision]) for n in (a, b))
        distance = sum((p - q) ** 2 for p, q in zip(one, other, strict=True)) ** 0.5
        assert distance > 10, (a, b, distance)


def test_labels_on_colours_are_legible():
    def luminance(colour: str) -> float:
        return palette._luminance(colour)

    for colour in {*palette.NAMED.values(), *palette.SEQUENCE}:
        for shade in (colour, palette.on_dark(colour)):
            high, low = sorted((luminance(shade), luminance(palette.ink(shade))), reverse=True)
            assert (high + 0.05) / (low + 0.05) > 3, shade

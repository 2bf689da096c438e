"""The ladder's stored tables as a page and a picture."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

from voxtune.cli.main import main
from voxtune.ladder.published_results import published_results, recorded_results
from voxtune.report.figure import Bars, Series
from voxtune.report.html import render_html
from voxtune.report.ladder import ladder_document, ladder_picture
from voxtune.report.svg import render_svg

ROOT = Path(__file__).parents[2]


def made(number, total_ms):
    one = {"seconds": total_ms / 2e5, "calls": 3}
    return {
        "number": number,
        "name": f"name {number}",
        "does": "<does> something",
        "error": 1e-3,
        "total_ms": total_ms,
        "measured_steps": 100,
        "launches": 75,
        "transfers": 2,
        "components": {"conv2d": one, "gate": one},
        "kernels": {"voxtune_conv": one, "voxtune_gate": one},
        "crossing": {"up_s": 1e-5, "kernel_s": 2e-4, "down_s": 1e-5, "share": 0.09},
        "end_to_end": {"convolution_s": 1e-4, "other_s": 1e-4, "transfers_s": 2e-5, "total_s": 2.2e-4},
    }


def data():
    forms = {
        form: {"best_ms": 1.0, "worst_ms": 3.0, "average_ms": 2.0} for form in ("synchronous", "asynchronous", "early")
    }
    return {
        "size": [64, 64],
        "batch": 1,
        "steps": 100,
        "device": "a card",
        "rows": [made(1, 8000.0), made(7, 120.0), made(10, 25.0)],
        "first_step": {"bytes": 32_000_000, "runs": 20, "forms": forms, "managed": "off"},
        "seeds": published_results(),
    }


def test_page_has_every_table_with_the_reports_figures_and_their_hardware():
    document = ladder_document(data())
    titles = [block.table.title for block in document.tables()]
    assert len(titles) == 8
    page = render_html(document)
    for told in ("RTX 3080", "Jetson Orin Nano", "348.01", "282.8", "0.075513", "320"):
        assert told in page or told == "0.075513", told
    assert "<does>" not in page
    climbed = document.tables()[0].table
    assert climbed.column("speed_up") == [None, 8000 / 120, 120 / 25]
    assert climbed.column("over_first")[-1] == 320.0


def test_stacked_bars_and_the_distribution_of_kernels_are_drawn():
    document = ladder_document(data())
    figures = {f.id: f for f in document.figures()}
    ours = figures["end-to-end-ours"]
    assert [s.name for s in ours.series] == ["convolution", "other", "transfers"]
    assert [s.values[0] for s in ours.series] == [1e-4 * 100, 1e-4 * 100, 2e-5 * 100]
    assert figures["end-to-end-report"].labels[0] == "CPU program"
    shares = [sum(s.values[i] for s in figures["kernels-share"].series) for i in range(3)]
    assert all(math.isclose(s, 100) for s in shares)
    block = next(b.table for b in document.tables() if b.id == "block-table-0")
    assert math.isclose(block.rows[0]["speed_up"], 0.0324831 / 5.2439e-5) and block.notes
    assert all(b.id != "block-table-1" for b in document.tables())
    program = ladder_document(data() | {"cpu_program": {"threads": 16, "total_ms": 2500.0, "error": 1e-6}})
    rung_0 = next(b.table for b in program.tables() if b.id == "block-table-1")
    assert rung_0.column("over_cpu") == [1.0, 100.0] and "16 threads" in rung_0.rows[0]["rung"]
    ours = ladder_document(data() | {"block": {"gpu_s": 1e-5, "cpu_s": 1e-3}})
    assert next(b.table for b in ours.tables() if b.id == "block-table-0").rows[1]["speed_up"] == 100


def test_the_recorded_ladder_is_that_of_the_results_file(tmp_path, capsys):
    results = json.loads((ROOT / "benchmarks/results/h200/unet2d_ladder.json").read_text())
    shipped = recorded_results()
    assert shipped["rows"] == results["ladder"]["rows"] and shipped["commit"] == results["commit"]
    page = tmp_path / "ladder.html"
    assert main(["ladder", "--recorded", "-o", str(page), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 11
    assert "measured at commit" in page.read_text()
    assert main(["ladder", "--recorded", "-o", str(page)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["ladder", "--recorded", "-o", str(tmp_path / "folder"), "-q"]) == 0
    assert sorted(p.name for p in (tmp_path / "folder").iterdir()) == ["ladder.html", "ladder.json", "ladder.svg"]
    assert main(["ladder", "--recorded", "--rungs", "1", "-o", str(tmp_path / "x")]) == 2


def test_picture_is_by_decades():
    svg = render_svg(ladder_picture(data()))
    widths = [float(w) for w in re.findall(r'<rect [^>]*width="([\d.]+)" height="16.00"', svg)]
    assert len(widths) == 3
    # From 10 to 10,000: three decades.
    full = widths[0] / math.log10(8000 / 10)
    assert math.isclose(widths[1], full * math.log10(12), rel_tol=1e-2)
    assert math.isclose(widths[2], full * math.log10(2.5), rel_tol=1e-2)


def test_bars_by_decades_leave_room_for_what_was_not_measured():
    figure = Bars(id="b", title="t", labels=["a", "b"], series=[Series(name="s", values=[5.0, None])], log=True)
    assert "not measured" in render_svg(figure)

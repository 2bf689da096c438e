"""The waterfall of one denoising step: from a benchmark results file to an SVG."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from voxtune.cli.main import main
from voxtune.errors import InputError
from voxtune.report.svg import render_svg
from voxtune.report.waterfall import CHAIN, read_results, waterfall, write_waterfall

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "h200" / "unet3d_sample.json"
COMMITTED = ROOT / "docs" / "images" / "waterfall.svg"


def results(**ms: float) -> dict:
    return {"gpu": "G", "commit": "c0ffee", "rows": [{"name": name, "p50_ms": value} for name, value in ms.items()]}


def test_the_committed_chart_is_drawn_from_the_committed_results(tmp_path):
    assert main(["report", "--waterfall", str(RESULTS), "-o", str(tmp_path / "w.svg")]) == 0
    fix = f"run voxtune report --waterfall {RESULTS.relative_to(ROOT)} -o {COMMITTED.relative_to(ROOT)}"
    assert (tmp_path / "w.svg").read_text() == COMMITTED.read_text(), fix


def test_the_committed_chart_states_what_was_measured():
    data = json.loads(RESULTS.read_text())
    figure = waterfall(data)
    assert [r.label for r in figure.rows] == [label for _, label, _ in CHAIN]
    for part in (
        data["gpu"],
        data["commit"],
        "med-ddpm",
        "128 × 128 × 128",
        "random weights",
        data["versions"]["torch"],
    ):
        assert part in figure.caption
    text = "".join(ElementTree.fromstring(COMMITTED.read_text()).itertext())
    for row in data["rows"]:
        if row["name"] in {name for name, _, _ in CHAIN}:
            assert f"{row['p50_ms']:.1f}" in text
            assert f"{data['rows'][0]['p50_ms'] / row['p50_ms']:.1f} ×" in text


def test_each_row_changes_the_one_above():
    figure = waterfall(results(baseline_fp32=100.0, voxtune=10.0, tf32=40.0, bf16_autocast=30.0, other=1.0))
    assert [(r.ms, r.previous_ms, r.factor) for r in figure.rows] == [(100, None, 1), (40, 100, 2.5), (10, 40, 10)]
    assert [(r.label, r.previous_ms) for r in figure.compared] == [("BF16 autocast", None)]


def test_every_mode_of_torch_compile_is_compared():
    figure = waterfall(results(baseline_fp32=2.0, torch_compile_bf16=1.0, torch_compile_max_autotune_bf16=0.5))
    assert [(r.label, r.note, r.factor) for r in figure.compared][1] == ("torch.compile", "max autotune bf16", 4)


def test_a_name_is_text_whatever_it_holds():
    data = results(baseline_fp32=1.0) | {"gpu": "<script>&\x1b"}
    ElementTree.fromstring(render_svg(waterfall(data)))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"rows": [{"name": "tf32"}]}', '{"rows": [{"name": "a", "p50_ms": 0}]}']
)
def test_a_file_that_is_no_results_file_is_an_input_error(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(InputError, match=r"r\.json"):
        read_results(tmp_path / "r.json")


@pytest.mark.parametrize(
    "change",
    [{"p20_ms": "x", "p80_ms": 1.0}, {"error": []}, {"shape": 5}, {"versions": "2.8"}],
)
def test_values_of_other_types_are_an_input_error(tmp_path, change):
    data = results(baseline_fp32=1.0, tf32=0.5)
    changed = data | change if "versions" in change else data | {"rows": [row | change for row in data["rows"]]}
    (tmp_path / "r.json").write_text(json.dumps(changed))
    with pytest.raises(InputError, match=r"r\.json: damaged"):
        write_waterfall(tmp_path / "r.json", tmp_path / "w.svg")
    assert not (tmp_path / "w.svg").exists()


@pytest.mark.parametrize("version", ["9" * 5000, "²", "", None, [], 91002, "91002"])
def test_any_version_of_cudnn_is_text(version):
    data = results(baseline_fp32=1.0) | {"versions": {"cudnn": version}}
    assert render_svg(waterfall(data))


def test_input_errors(tmp_path, capsys):
    with pytest.raises(InputError, match="baseline_fp32"):
        waterfall(results(tf32=1.0))
    assert main(["report", "--waterfall", str(tmp_path / "absent.json")]) == 2
    assert "absent.json: no such file" in capsys.readouterr().err
    assert main(["report", "--waterfall", str(RESULTS), "--recorded"]) == 2
    assert "--waterfall cannot be combined with" in capsys.readouterr().err

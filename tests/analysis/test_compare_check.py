from __future__ import annotations

import json

import numpy as np
import pytest

from tests.factories.sessions import counted, kernel, session
from voxtune.analysis.check import change, check, parse_percent
from voxtune.analysis.compare import compare_classes, compare_modules, normalised
from voxtune.analysis.study import CONFIGS, measure, paper, study_table
from voxtune.cli.check import command
from voxtune.errors import InputError


def test_modules_are_compared_although_kernels_differ():
    a = session(
        [kernel(0, 100, module="net.0.conv", name="x"), kernel(100, 20, module="net.1")], name="a", bare=[1.0, 1.0, 1.0]
    )
    b = session(
        [kernel(0, 30, module="net.0.norm", name="y"), kernel(30, 20, module="net.0", name="z")],
        name="b",
        bare=[1.0, 1.1, 0.9],
    )
    result = compare_modules([a, b])
    row = result.row(module="net.0")
    assert (row["a (H200) ms"], row["b (H200) ms"], row["b (H200) difference"], row["b (H200) ratio"]) == pytest.approx(
        (0.1, 0.05, -0.05, 0.5)
    )
    assert (
        row["a (H200) ±"] == 0
        and row["b (H200) ±"] == pytest.approx(0.05 * 0.06)
        and row["b (H200) beyond spread"] is True
    )
    gone = result.row(module="net.1")
    assert gone["b (H200) ms"] == 0 and gone["b (H200) ratio"] == 0
    assert result.row(module="all")["a (H200) ms"] == pytest.approx(0.12)
    assert compare_classes([a, b]).row(**{"class": "elementwise"})["a (H200) ms"] == pytest.approx(0.12)


def test_the_larger_of_both_spreads_is_used():
    a = session([kernel(0, 100, module="m", step=0), kernel(0, 140, module="m", step=1)], name="a", bare=[1.0] * 3)
    b = session([kernel(0, 130, module="m")], name="b", bare=[1.0] * 3)
    row = compare_modules([a, b]).row(module="m")
    assert row["a (H200) ms"] == pytest.approx(0.12) and row["a (H200) ±"] == pytest.approx(0.02)
    assert row["b (H200) beyond spread"] is False


def test_sessions_with_the_same_name_get_distinct_labels():
    example = [session([kernel(0, 10)], name="a"), session([kernel(0, 20)], name="a")]
    assert [c.name for c in compare_classes(example).columns if c.name.endswith(" ms")] == [
        "a (H200) ms",
        "a (H200, 2) ms",
    ]


def test_ratios_are_relative_to_the_first_session():
    a, b = session([counted(0, 10, ipc=2.0)], name="a"), session([counted(0, 5, ipc=1.0)], name="b")
    row = normalised([a, b]).rows[1]
    assert (row["cycles_ratio"], row["ipc_ratio"], row["device_ms_ratio"], row["instructions_ratio"]) == (
        0.5,
        0.5,
        0.5,
        1.0,
    )


STEADY = [100.0, 100.1, 99.9, 100.05, 99.95]


@pytest.mark.parametrize(
    ("new", "verdict", "code"),
    [
        ([x * 1.02 for x in STEADY], "ok", 0),
        ([x * 0.5 for x in STEADY], "ok", 0),
        ([x * 1.10 for x in STEADY], "slower", 1),
        ([80.0, 100.0, 120.0, 90.0, 115.0], "inconclusive", 3),
        ([110.0, 110.0], "inconclusive", 3),
        ([100.0, 100.0, 100.1, 99.9, 900.0], "ok", 0),
    ],
)
def test_verdict_accounts_for_the_spread(new, verdict, code):
    base = session([kernel(0, 10)], name="base", bare=STEADY)
    result = check(base, session([kernel(0, 10)], name="new", bare=new), 5.0)
    assert (result.extra["verdict"], result.extra["exit_code"]) == (verdict, code)


def test_change_compares_medians():
    result = change(np.array([1.0, 1.0, 9.0]), np.array([2.0, 2.0, 2.0]))
    assert (result.change_pct, result.low_pct, result.high_pct) == pytest.approx((100, 100, 100))


def test_check_requires_the_same_workload_and_gpu():
    base = session([kernel(0, 10)], bare=STEADY, workload="a")
    with pytest.raises(InputError, match="differ in workload"):
        check(base, session([kernel(0, 10)], bare=STEADY, workload="b"))
    with pytest.raises(InputError, match="same GPU"):
        check(base, session([kernel(0, 10)], bare=STEADY, environment={"gpu": "NVIDIA A100"}))
    unlike = check(base, session([kernel(0, 10)]))
    assert unlike.refused and unlike.extra["exit_code"] == 3
    partial = session([kernel(0, 10)], bare=STEADY, mode="train")
    assert "does not cover" in check(partial, partial).refused


@pytest.mark.parametrize(("text", "value"), [("5%", 5.0), (" 2.5 % ", 2.5), ("0", 0.0)])
def test_percent(text, value):
    assert parse_percent(text) == value


@pytest.mark.parametrize("text", ["", "x", "-1%", "nan", "inf", "5%%"])
def test_wrong_percent(text):
    with pytest.raises(InputError, match="--max-slowdown"):
        parse_percent(text)


def test_check_verb_exit_code_and_json(tmp_path, capsys):
    import typer

    for name, factor in (("base", 1.0), ("new", 1.2)):
        session([kernel(0, 10)], name=name, bare=[x * factor for x in STEADY]).save(tmp_path / name)
    with pytest.raises(typer.Exit) as left:
        command(tmp_path / "base", tmp_path / "new", as_json=True)
    assert left.value.exit_code == 1
    assert json.loads(capsys.readouterr().out)["extra"]["verdict"] == "slower"


def _study_sessions():
    def make(config: str, duration: float):
        rows = [
            counted(i, duration, "conv_fprop", tensor_pct=2.0, tensor_pipe_pct=3.0, warps_active=4.0)
            for i in range(200)
        ]
        return session(rows, name=config, config=config)

    return [make("baseline", 10.0), make("tf32", 5.0)]


def test_study_shows_paper_window_and_step():
    result = study_table(_study_sessions())
    row = result.row(figure=8, quantity="cycles_ratio", config="tf32")
    assert (row["A100"], row["H100"], row["V100"]) == ("0.18", "0.39", None)
    assert (row["window"], row["step"]) == (0.5, 0.5)
    assert result.row(figure=10, quantity="tensor_pct", config="baseline")["step"] == 2.0
    assert result.row(figure=10, quantity="tensor_pipe_pct", config="baseline")["step"] == 3.0
    absent = result.row(figure=10, quantity="tensor_pipe_pct", config="channels_last")
    assert absent["H100"] == "1.47" and absent["window"] is None
    assert result.row(figure=6, quantity="dominant_share", config="baseline")["window"] == 100
    assert any("not recorded: " in n for n in result.notes)
    with pytest.raises(InputError, match="baseline"):
        study_table(_study_sessions()[1:])


def test_the_papers_values_are_valid_and_every_quantity_can_be_measured():
    example = _study_sessions()[0]
    facts = paper()["facts"]
    assert {f["figure"] for f in facts} == set(range(4, 14))
    for fact in facts:
        assert fact["config"] in CONFIGS and fact["gpu"] in ("V100", "A100", "H100", "all")
        assert ("value" in fact) != ("low" in fact and "high" in fact)
        measure(example, fact["quantity"].removesuffix("_ratio"), plain=True)
    # The V100 has no such counters.
    assert not [f for f in facts if f["figure"] == 13 and f["gpu"] == "V100"]

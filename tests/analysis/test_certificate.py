from __future__ import annotations

import pytest

from tests.factories.sessions import counted, kernel, session, train
from voxtune.analysis.certificate import certificate, certify, readings, refusal, window
from voxtune.analysis.compare import compare_classes, normalised, side_by_side
from voxtune.analysis.study import study_table
from voxtune.errors import InputError


def test_a_complete_training_step_with_counters_is_covered():
    result = certificate(train([counted(0, 98)]))
    assert result.extra["covers"] and result.extra["covers_time"] and result.extra["covers_full"]
    assert result.extra["reasons"] == []


def test_the_threshold_applies_to_time_not_to_launches():
    # 1 us of 200 without counters: 0.5 % of time, a quarter of the launches.
    assert certify(train([counted(0, 197), kernel(197, 1)])).covers("few")
    missing = certify(train([counted(0, 90), kernel(90, 8)]))
    assert not missing.covers("few") and missing.covers("time")
    assert missing.few_time_pct == pytest.approx(92)
    assert "92.0 % of step time" in missing.reasons("few")[0]


def test_the_few_tier_does_not_cover_the_full_set():
    result = certify(train([counted(0, 98, counter_tier="few")]))
    assert result.covers("few") and not result.covers("full")


@pytest.mark.parametrize("phase", ["backward", "optimizer"])
def test_a_training_step_without_a_phase_is_not_covered(phase):
    example = train([counted(0, 98)])
    example.launches = example.launches[example.launches["phase"] != phase].reset_index(drop=True)
    example.launches["index"] = range(len(example.launches))
    assert any(phase in r for r in certify(example).reasons("time"))


def test_set_up_missing_launches_and_incomplete_steps_are_reported():
    assert any("set-up" in r for r in certify(session([counted(0, 1, step=-1), counted(0, 1)])).reasons("time"))
    gapped = session([counted(0, 1), counted(1, 1), counted(2, 1)])
    gapped.launches = gapped.launches.drop(index=1)
    assert any("missing" in r for r in certify(gapped).reasons("time"))
    half = session([counted(i, 1, step=0) for i in range(10)] + [counted(0, 1, step=1)])
    assert any("incomplete" in r for r in certify(half).reasons("time"))


def test_copies_do_not_count_in_the_shares():
    copy = {"kind": "memcpy", "class": "memcpy", "start_us": 98.0, "duration_us": 500.0}
    assert certify(session([counted(0, 98), copy])).few_time_pct == 100


def test_the_papers_window_is_kernels_11_to_110_of_one_step():
    copy = {"kind": "memcpy", "class": "memcpy", "start_us": 0.0, "duration_us": 1.0}
    rows = [copy, *(counted(i, 1, name=f"k{i}") for i in range(1, 201)), *(counted(i, 1, step=1) for i in range(200))]
    cut = window(session(rows))
    assert list(cut.launches["name"]) == [f"k{i}" for i in range(11, 111)]
    assert cut.meta["window"] == {"name": "paper", "skip": 10, "count": 100, "kept": 100, "of": 200}
    assert "launches 11 to 110" in refusal([cut], "time")
    with pytest.raises(InputError, match="unknown window"):
        window(session(rows), "other")
    assert list(window(session(rows), "0:2").launches["name"]) == ["k1", "k2"]
    for wrong in ("1", "1:", ":1", "1:0", "-1:5", "1:2:3", "a:b"):
        with pytest.raises(InputError, match="unknown window"):
            window(session(rows), wrong)


def test_ratios_are_refused_without_coverage():
    good = train([counted(0, 98, warps_active=4.0, stall_long_scoreboard=1.0)], name="good")
    partial = [counted(0, 50, warps_active=4.0, stall_long_scoreboard=1.0), kernel(50, 48)]
    bad = train(partial, name="bad", config="tf32")
    table = normalised([good, bad])
    assert table.rows == [] and "bad does not cover its step" in table.refused
    study = study_table([good, bad])
    for quantity in ("cycles_ratio", "warps_active_ratio", "stall_long_scoreboard_ratio"):
        row = study.row(quantity=quantity, config="tf32")
        assert row["step"] is None and row["step_plain"] is None
    assert any("bad does not cover its step" in note for note in study.notes)
    # A share of kernel time is not a ratio between sessions.
    assert study.row(quantity="elementwise_share", config="tf32")["step"] > 0
    # Times come from the timeline, which is complete in both.
    assert compare_classes([good, bad]).refused is None
    assert compare_classes([good, window(bad)]).refused


def test_ratios_in_the_window_and_over_the_step():
    # In the second session the launches of the window take a tenth of the cycles; the rest is unchanged.
    def make(name: str, cycles: float):
        rows = [counted(i, 1, cycles=cycles if 10 <= i < 110 else 1000.0) for i in range(1000)]
        return session(rows, name=name)

    result = side_by_side([make("base", 1000.0), make("other", 100.0)]).rows[1]
    assert result["cycles_window"] == pytest.approx(0.1)
    assert result["cycles_step"] == pytest.approx((900 * 1000 + 100 * 100) / 1e6)
    assert result["window_time_pct"] == pytest.approx(10)


def test_readings_tell_own_from_weighted_launches():
    same = {"name": "k", "grid": "1,1,1", "module_type": "Conv3d", "op_shapes": "[[1]]"}
    rows = [
        counted(0, 30, sm_pct=50.0, **same),
        counted(30, 30, sm_pct=50.0, **same),
        counted(60, 20, sm_pct=40.0, **(same | {"op_shapes": "[[2]]"})),
        kernel(80, 20, **(same | {"module_type": "Linear"})),
    ]
    table = readings(session(rows))
    assert [(r["launches"], r["read"], r["counted"]) for r in table.rows] == [
        (2, 1, "weighted: 1 of 2"),
        (1, 1, "each launch"),
        (1, 0, "not counted"),
    ]
    assert (table.extra["weighted_pct"], table.extra["each_pct"]) == pytest.approx((60.0, 20.0))

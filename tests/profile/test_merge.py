"""Recordings in parts: merged if they are the same step, refused if anything differs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.factories.sessions import counted, kernel, session
from voxtune.analysis.certificate import certify
from voxtune.errors import InputError
from voxtune.profile import schema
from voxtune.profile.merge import COUNTERS, differences, merge_sessions
from voxtune.profile.session import check_session, load_session
from voxtune.report.recordings import root


@pytest.fixture(scope="module")
def whole():
    return load_session(root() / "sample-tf32")


def part(whole, keep):
    """The session with the full counters of some kernels only; the others keep those of the few tier."""
    rows = whole.launches.copy()
    lost = ~rows["name"].map(keep) & (rows["counter_tier"] == "full").fillna(False)
    few = {c.name for c in schema.FEW}
    for column in COUNTERS:
        if column not in few:
            rows.loc[lost, column] = None
    rows.loc[lost, "counter_tier"] = "few"
    kept = whole.opcodes["name"].map(keep)
    tiers = {t: {**s} for t, s in whole.meta["tiers"].items()}
    tiers["full"] |= {"done": False, "why": "its time ran out", "read": 7}
    return replace(
        whole, meta={**whole.meta, "tiers": tiers}, launches=rows, opcodes=whole.opcodes[kept].reset_index(drop=True)
    )


def test_parts_of_a_recording_add_up_to_the_whole(whole, tmp_path):
    left, right = part(whole, lambda n: "gemm" in n), part(whole, lambda n: "gemm" not in n)
    assert certify(left).full_time_pct < certify(whole).full_time_pct - 5
    merged = merge_sessions([left, right])
    assert certify(merged).full_time_pct >= certify(whole).full_time_pct
    for column in COUNTERS:
        measured = whole.launches[column].notna()
        assert merged.launches.loc[measured, column].tolist() == whole.launches.loc[measured, column].tolist(), column
    assert len(merged.opcodes) == len(whole.opcodes)
    full = merged.meta["tiers"]["full"]
    assert full["read"] == 14 and full["time_share"] == pytest.approx(certify(merged).full_time_pct / 100, abs=1e-4)
    assert [p["command"] for p in merged.meta["parts"]] == [whole.meta["command"]] * 2
    check_session(merged)
    merged.save(tmp_path / "merged")
    again = merge_sessions([load_session(tmp_path / "merged"), right])
    assert len(again.meta["parts"]) == 3 and certify(again).full_time_pct == certify(merged).full_time_pct


def test_merging_a_session_with_itself_changes_no_measured_value(whole):
    merged = merge_sessions([whole, whole])
    for column in COUNTERS:
        known = whole.launches[column].notna()
        assert merged.launches.loc[known, column].tolist() == whole.launches.loc[known, column].tolist()
    assert len(merged.opcodes) == len(whole.opcodes) and len(merged.timings) == len(whole.timings)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"config": "baseline"}, "config"),
        ({"size": [64, 64, 64]}, "size"),
        ({"flags": {"cudnn.allow_tf32": False}}, "flags"),
        ({"cache_control": "all"}, "cache_control"),
    ],
)
def test_other_settings_are_refused(whole, change, words):
    other = replace(whole, meta={**whole.meta, **change})
    with pytest.raises(InputError, match=f"not a part of the same recording: .*{words}"):
        merge_sessions([whole, other])


@pytest.mark.parametrize("key", ["gpu", "driver", "torch", "cudnn"])
def test_other_machines_are_refused(whole, key):
    environment = {**whole.meta["environment"], key: "another"}
    other = replace(whole, meta={**whole.meta, "environment": environment})
    assert any(key in reason for reason in differences(whole, other))


def test_other_launches_are_refused(whole):
    rows = whole.launches.copy()
    rows.loc[rows.index[5], "grid"] = "9,9,9"
    assert "launch 5" in differences(whole, replace(whole, launches=rows))[0]
    assert "launches" in differences(whole, replace(whole, launches=whole.launches.iloc[3:]))[0]


def test_launches_alike_are_weighted_by_one_reading():
    alike = {"grid": "1,1,1", "block": "8,1,1", "module_type": "Conv3d", "op_shapes": "[[1]]", "name": "k"}
    rows = [
        counted(0, 100, sm_pct=50.0, **alike),
        kernel(100, 110, counter_tier="few", cycles=7.0, **alike),
        kernel(300, 400, counter_tier="few", **alike),
        kernel(800, 100, counter_tier="few", **(alike | {"op_shapes": "[[2]]"})),
        kernel(900, 100, counter_tier="few", **(alike | {"module_type": "Linear"})),
    ]
    merged = merge_sessions([session(rows)])
    values = merged.launches["sm_pct"].astype(float).to_numpy()
    assert values[:2].tolist() == [50.0, 50.0] and np.isnan(values[2:]).all()
    # Its own cycles stay.
    assert merged.launches["cycles"].tolist()[1] == 7.0

from __future__ import annotations

import pytest

from tests.factories.sessions import kernel, session
from voxtune.analysis.compare import compare_modules, normalised, side_by_side
from voxtune.analysis.frame import MODULE_UNKNOWN, labels
from voxtune.analysis.step import overhead
from voxtune.profile.session import frame

COUNTED = {"cycles": 1e3, "cycles_active": 1e3, "instructions": 1e3, "ipc": 1.0, "counter_tier": "few"}


def test_profiling_overhead_is_relative_to_a_bare_step():
    example = session([kernel(0, 100, "norm", **COUNTED)], name="one")
    times = [("bare", 10.0), ("bare", 11.0), ("bare", 12.0), ("census", 12.1), ("few", 5000.0)]
    example.timings = frame([{"tier": t, "repeat": i, "step_ms": ms} for i, (t, ms) in enumerate(times)], "timings")
    example.meta["tiers"] = {
        "few": {"done": True, "why": None, "counting_s": 5.0, "read": 200, "seconds": 9.0},
        "full": {"done": False, "why": "its time ran out", "counting_s": 6.0, "read": 12, "seconds": 14.0},
        "opcodes": {"done": False, "why": "not asked for"},
    }
    (row,) = overhead([example]).rows
    assert row["census_pct"] == pytest.approx(10.0)
    assert (row["few"], row["few_a_launch"], row["full_a_launch"]) == (5.0, 25.0, 0.5)
    assert row["few_ratio"] == pytest.approx(5000 / 11) and row["turns"] == 23.0
    assert row["opcodes_a_launch"] is None


def test_modules_of_a_compiled_step_are_empty_not_zero():
    plain = session([kernel(0, 100, "norm", module="a"), kernel(100, 50, "norm", module="")], name="work plain")
    fused = session([kernel(0, 60, "triton", module=None)], name="work compiled")
    result = compare_modules([plain, fused])
    assert result.row(module="a")["compiled (H200) ms"] is None
    assert result.row(module=MODULE_UNKNOWN)["plain (H200) ms"] is None
    assert result.row(module=MODULE_UNKNOWN)["compiled (H200) ms"] == pytest.approx(0.06)
    assert result.row(module="all")["compiled (H200) difference"] == pytest.approx(-0.09)
    assert any(MODULE_UNKNOWN in note for note in result.notes)


def test_a_session_without_counters_loses_only_its_own_ratios():
    rows = [kernel(0, 100, "norm", **COUNTED)]
    whole, again = session(rows, name="a"), session(rows, name="b")
    bare = session([kernel(0, 50, "norm")], name="c")
    table = normalised([whole, again, bare])
    assert [r["cycles_ratio"] for r in table.rows] == [1.0, 1.0, None]
    assert "c does not cover its step" in table.notes[0]
    assert normalised([bare, whole]).refused and normalised([whole, bare]).refused
    both = side_by_side([whole, again, bare])
    assert [r["cycles_step"] for r in both.rows] == [1.0, 1.0, None]
    assert [r["device_ms_step"] for r in both.rows] == [1.0, 1.0, 0.5]


def test_labels_contain_only_the_words_that_differ():
    rows = [kernel(0, 1, "norm")]
    names = ["net train a", "net train b+c", "net train a"]
    assert labels([session(rows, name=n) for n in names]) == ["a (H200)", "b+c (H200)", "a (H200, 2)"]
    assert labels([session(rows, name="net train a")]) == ["net train a (H200)"]

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.factories.sessions import kernel, session
from voxtune.analysis.step import busy_us, gaps, step_totals, transfers


def test_busy_is_the_union_of_streams_not_the_sum():
    # 0-10 and 5-15 overlap; 20-30 follows a gap of 5.
    found = step_totals([session([kernel(0, 10), kernel(5, 10, stream=7), kernel(20, 10)])]).rows[0]
    assert found["device_ms"] == pytest.approx(0.030)
    assert found["busy_ms"] == pytest.approx(0.025)
    assert found["idle_ms"] == pytest.approx(0.005)
    assert found["idle_pct"] == pytest.approx(100 * 5 / 30)


def test_idle_before_the_request_is_the_hosts_the_rest_is_latency():
    found = step_totals([session([kernel(0, 10), kernel(18, 2, launch_us=14.0)])]).rows[0]
    assert found["idle_ms"] == pytest.approx(0.008)
    assert found["host_bound_ms"] == pytest.approx(0.004)
    assert found["latency_us"] == pytest.approx(4)


def test_gaps_that_only_the_profiler_made_are_not_idle_time():
    made = session([kernel(0, 10), kernel(18, 2, launch_us=14.0)], bare=[0.014, 0.014, 0.014])
    found = step_totals([made]).rows[0]  # 12 busy, 8 idle on the timeline, of which a bare step has room for 2
    assert found["idle_ms"] == pytest.approx(0.002) and found["host_bound_ms"] == pytest.approx(0.001)
    assert found["idle_pct"] == pytest.approx(100 * 2 / 14)


def test_totals_are_of_a_mean_step_and_wall_is_the_bare_median():
    rows = [kernel(0, 10, step=0), kernel(0, 30, step=1)]
    found = step_totals([session(rows, bare=[5.0, 1.0, 2.0, 3.0, 4.0])]).rows[0]
    assert found["launches"] == 1
    assert found["device_ms"] == pytest.approx(0.020)
    assert (found["wall_ms"], found["wall_from"]) == (3.0, "bare")
    assert found["spread_pct"] == pytest.approx(100 * (4.2 - 1.8) / 2 / 3)


def test_a_cpu_session_has_no_gaps_to_speak_of():
    made = session([kernel(0, 10, kind="cpu_op"), kernel(20, 5, kind="cpu_op")])
    assert step_totals([made]).rows[0]["idle_ms"] is None
    assert "CPU" in gaps(made).refused


def test_gaps_name_what_ended_them():
    made = session([kernel(0, 10), kernel(16, 2, name="void at::f<int>(int)", module="m", launch_us=12.0)])
    assert gaps(made).rows == [{"before": "f", "module": "m", "count": 1, "idle_ms": 0.006, "host_bound_ms": 0.002}]


def test_transfers_by_direction():
    copy = {"kind": "memcpy", "class": "memcpy", "name": "Memcpy", "direction": "HtoD", "bytes": 2**20}
    found = transfers(session([kernel(0, 5), {"start_us": 5.0, "duration_us": 2.0, **copy}]))
    row = found.row(direction="HtoD")
    assert (row["copies"], row["mib"], row["ms"]) == (1, 1.0, 0.002)
    assert row["gbs"] == pytest.approx(2**20 / 2000)
    assert found.row(direction="DtoH") == {"direction": "DtoH", "copies": 0, "mib": 0.0, "ms": 0.0, "gbs": None}


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12))
def test_union_agrees_with_counting_ticks(intervals):
    start = np.array([s for s, _ in intervals], dtype=float)
    duration = np.array([d for _, d in intervals], dtype=float)
    ticks = {t for s, d in intervals for t in range(s, s + d)}
    assert busy_us(start, duration) == len(ticks)

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.factories.sessions import kernel, session
from voxtune.analysis.step import busy_us, device_times, gaps, step_totals, transfers


def test_busy_time_is_the_union_of_streams():
    # 0-10 and 5-15 overlap; 20-30 follows a gap of 5.
    result = step_totals([session([kernel(0, 10), kernel(5, 10, stream=7), kernel(20, 10)])]).rows[0]
    assert result["device_ms"] == pytest.approx(0.030)
    assert result["busy_ms"] == pytest.approx(0.025)
    assert result["idle_ms"] == pytest.approx(0.005)
    assert result["idle_pct"] == pytest.approx(100 * 5 / 30)


def test_idle_before_the_launch_call_is_host_bound_the_rest_is_latency():
    result = step_totals([session([kernel(0, 10), kernel(18, 2, launch_us=14.0)])]).rows[0]
    assert result["idle_ms"] == pytest.approx(0.008)
    assert result["host_bound_ms"] == pytest.approx(0.004)
    assert result["latency_us"] == pytest.approx(4)


def test_gaps_caused_by_the_profiler_are_not_idle_time():
    example = session([kernel(0, 10), kernel(18, 2, launch_us=14.0)], bare=[0.014, 0.014, 0.014])
    result = step_totals([example]).rows[0]  # timeline: 12 busy, 8 idle; wall - busy is 2
    assert result["idle_ms"] == pytest.approx(0.002) and result["host_bound_ms"] == pytest.approx(0.001)
    assert result["idle_pct"] == pytest.approx(100 * 2 / 14)


def test_totals_are_those_of_a_mean_step_and_wall_is_the_bare_median():
    rows = [kernel(0, 10, step=0), kernel(0, 30, step=1)]
    result = step_totals([session(rows, bare=[5.0, 1.0, 2.0, 3.0, 4.0])]).rows[0]
    assert result["launches"] == 1
    assert result["device_ms"] == pytest.approx(0.020)
    assert (result["wall_ms"], result["wall_from"]) == (3.0, "bare")
    assert result["spread_pct"] == pytest.approx(100 * (4.2 - 1.8) / 2 / 3)


def test_a_cpu_session_has_no_gaps():
    example = session([kernel(0, 10, kind="cpu_op"), kernel(20, 5, kind="cpu_op")])
    assert step_totals([example]).rows[0]["idle_ms"] is None
    assert "CPU" in gaps(example).refused


def test_gaps_are_named_by_the_launch_that_ended_them():
    example = session([kernel(0, 10), kernel(16, 2, name="void at::f<int>(int)", module="m", launch_us=12.0)])
    assert gaps(example).rows == [{"before": "f", "module": "m", "count": 1, "idle_ms": 0.006, "host_bound_ms": 0.002}]


def test_transfers_by_direction():
    copy = {"kind": "memcpy", "class": "memcpy", "name": "Memcpy", "direction": "HtoD", "bytes": 2**20}
    result = transfers(session([kernel(0, 5), {"start_us": 5.0, "duration_us": 2.0, **copy}]))
    row = result.row(direction="HtoD")
    assert (row["copies"], row["mib"], row["ms"]) == (1, 1.0, 0.002)
    assert row["gbs"] == pytest.approx(2**20 / 2000)
    assert result.row(direction="DtoH") == {"direction": "DtoH", "copies": 0, "mib": 0.0, "ms": 0.0, "gbs": None}


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12))
def test_busy_time_agrees_with_counting_ticks(intervals):
    start = np.array([s for s, _ in intervals], dtype=float)
    duration = np.array([d for _, d in intervals], dtype=float)
    ticks = {t for s, d in intervals for t in range(s, s + d)}
    assert busy_us(start, duration) == len(ticks)


def test_moments_on_the_host_become_times_on_the_device():
    rows = [kernel(0, 100), kernel(100, 300, launch_us=20.0), kernel(400, 50, launch_us=30.0)]
    # Before the second launch was issued, before the third, and after the last.
    assert device_times(session(rows), [0.0, 0.01, 0.025, 1.0]) == pytest.approx([0.0, 0.1, 0.4, 0.45])
    assert device_times(session([kernel(0, 10, kind="cpu_op")]), [0.0]) is None

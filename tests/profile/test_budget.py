from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from voxtune.profile import budget as module
from voxtune.profile.budget import Budget, stop_on_signals


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_what_a_session_leaves_is_the_next_ones(clock: list[float]) -> None:
    budget = Budget(315, 600, 3)  # 300 without the reserve
    first = budget.session()
    assert first is not None and first.until - clock[0] == pytest.approx(100)
    clock[0] += 20
    first.start_counting()
    few = first.tier_s("few")
    assert few is not None and few >= 80
    clock[0] += 20
    assert first.tier_s("full") == pytest.approx(0.65 * 60)
    clock[0] += 10
    assert first.tier_s("opcodes") == pytest.approx(50)
    second = budget.session()  # 250 left for two
    assert second is not None and second.until - clock[0] == pytest.approx(125)


def test_counters_of_every_launch_may_take_from_the_slow_tiers_of_others(clock: list[float]) -> None:
    budget = Budget(315, 600, 2)
    first = budget.session()
    assert first is not None
    clock[0] += 145  # a census that took nearly its session's part
    first.start_counting()
    few = first.tier_s("few")
    assert few is not None and few > 50
    assert first.tier_s("full") is None and "budget of 315 s" in first.why()


def test_too_little_time_begins_nothing(clock: list[float]) -> None:
    budget = Budget(40, 600, 2)
    assert budget.session() is not None
    clock[0] += 15
    assert budget.session() is None
    limited = Budget(None, 5, 1).session()
    assert limited is not None
    limited.start_counting()
    assert limited.tier_s("few") is None and "limit of 5 s" in limited.why()


def test_a_signal_asks_once_and_then_ends() -> None:
    stop = threading.Event()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), stop_on_signals(stop):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        assert stop.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    assert signal.getsignal(signal.SIGTERM) == before

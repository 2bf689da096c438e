from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from voxtune.profile import budget as module
from voxtune.profile.budget import Budget, SessionBudget, stop_on_signals


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def first_round(budget: Budget, clock: list[float], *, census: float, few: float) -> SessionBudget:
    """Runs the census and the few counters of one session, within their time limits."""
    session = budget.session()
    assert session is not None
    clock[0] += census
    session.spend("census", census)
    limit = session.tier_s("few")
    assert limit is not None
    clock[0] += min(few, limit)
    session.spend("few", min(few, limit), setup_s=5)
    return session


def test_every_session_has_its_census_and_few_before_any_slow_tier(clock: list[float]) -> None:
    """The case of six training sessions in 545 s, of which the last one is compiled."""
    budget = Budget(545, 600, [False] * 5 + [True])
    sessions = [first_round(budget, clock, census=20, few=45) for _ in range(5)]
    last = first_round(budget, clock, census=60, few=60)
    assert last.limit_left_s == 600 - 60  # it got all the time it needed
    left = budget.left_s
    assert left == pytest.approx(530 - 5 * 65 - 120)
    limits = [s.tier_s("full") for s in [*sessions, last]]
    assert limits[0] == pytest.approx(5 + module.RECORD_CALLS_S + module.OPERATORS_S)  # more than an equal share
    assert all(limit is None or limit >= 16 for limit in limits)


def test_the_few_counters_reserve_time_for_the_remaining_sessions(clock: list[float]) -> None:
    budget = Budget(315, 600, [False, False, True])
    first = budget.session()
    assert first is not None
    assert budget.reserve_s() == pytest.approx(60 + 3 * 20 + 1.5 * 40)  # nothing recorded yet
    clock[0] += 10
    first.spend("census", 10)
    assert first.tier_s("few") == pytest.approx(290 - (12 + 40) - (3 * 12 + 60))
    first.spend("few", 20, setup_s=5)
    assert budget.reserve_s() == pytest.approx(1.2 * (10 + 20) + 1.2 * (30 + 30))
    second = Budget(100, 600, [False] * 6).session()  # too little for all: an equal share
    assert second is not None and second.tier_s("few") == pytest.approx(85 / 6)


def test_slow_tiers_share_equally_and_unused_time_goes_to_the_next(clock: list[float]) -> None:
    budget = Budget(215, 600, [False, False])
    first, second = (first_round(budget, clock, census=10, few=20) for _ in range(2))
    assert first.tier_s("full") == pytest.approx(0.65 * 70)  # 140 left for two
    clock[0] += 20
    first.spend("full", 20, setup_s=11)
    assert first.tier_s("opcodes") == pytest.approx(50)
    clock[0] += 10
    first.spend("opcodes", 10)
    assert second.tier_s("full") == pytest.approx(0.65 * 110)


def test_a_slow_tier_does_not_start_without_time_for_set_up_and_some_operators(clock: list[float]) -> None:
    budget = Budget(115, 600, [False])
    session = first_round(budget, clock, census=60, few=25)
    assert session.tier_s("full") is None
    assert session.refusal("full") == (
        "15 s left of the budget of 115 s, too few for its set-up (about 10 s) and some operators"
    )
    clock[0] += 15
    assert session.refusal("opcodes") == "the budget of 115 s was used up before it started"


def test_too_little_time_starts_nothing(clock: list[float]) -> None:
    budget = Budget(40, 600, [False, False])
    assert budget.session() is not None
    clock[0] += 15
    assert budget.session() is None
    limited = Budget(None, 5, [False]).session()
    assert limited is not None
    assert limited.tier_s("few") is None and "limit of 5 s" in limited.refusal("few")


def test_the_first_signal_requests_a_stop_and_the_second_interrupts() -> None:
    stop = threading.Event()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), stop_on_signals(stop):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        assert stop.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    assert signal.getsignal(signal.SIGTERM) == before

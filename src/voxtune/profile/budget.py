"""Divides a time budget among the sessions of a command and their tiers. Time that one does not use goes to the others.

The census and the few counters of all sessions come before the slow tiers of any: a session without counters cannot be
compared, while a slow tier that is cut short only covers less.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

# Seconds for reading the last reports.
RESERVE_S = 15.0
# Minimum seconds for starting a session, and for starting the few counters.
SESSION_S = 20.0
TIER_S = 8.0
# Expected seconds of a session, until one is recorded. Then the longest so far counts, times MARGIN.
EXPECTED_S = {"census": 20.0, "few": 40.0}
MARGIN = 1.2
# Factors for a compiled step: it is compiled in the census and then loaded from the cache.
COMPILED = {"census": 3.0, "few": 1.5}
# Shares of the session's time for slow tiers: opcodes gets what full leaves.
SHARE = {"full": 0.65, "opcodes": 1.0}
# Seconds before a slow tier counts its first operator (set-up and recording of calls), and for counting some.
SETUP_S = 10.0
RECORD_CALLS_S = 5.0
OPERATORS_S = 6.0


class Budget:
    """`total_s` limits the whole command (None: no limit), `limit_s` the counters of one session. `compiled` has one
    entry per session: whether its step is compiled.
    """

    def __init__(self, total_s: float | None, limit_s: float, compiled: Sequence[bool]):
        self.total_s, self.limit_s = total_s, limit_s
        self.until = float("inf") if total_s is None else time.monotonic() + total_s - RESERVE_S
        self.coming = list(compiled)
        self.slow_coming = len(compiled)
        self.durations: dict[str, list[float]] = {"census": [], "few": []}

    @property
    def left_s(self) -> float:
        return self.until - time.monotonic()

    def session(self) -> SessionBudget | None:
        """The budget of the next session; None if too little time is left to start it."""
        compiled = self.coming.pop(0)
        if self.left_s < SESSION_S:
            self.slow_coming -= 1
            return None
        return SessionBudget(self, compiled)

    def learn(self, tier: str, seconds: float, *, compiled: bool) -> None:
        self.durations[tier].append(seconds / (COMPILED[tier] if compiled else 1.0))

    def reserve_s(self) -> float:
        """Expected seconds of the census and the few counters of all remaining sessions."""
        each = {t: MARGIN * max(past) if past else EXPECTED_S[t] for t, past in self.durations.items()}
        return sum(s * (COMPILED[t] if compiled else 1.0) for compiled in self.coming for t, s in each.items())


class SessionBudget:
    def __init__(self, total: Budget, compiled: bool):
        self.total, self.compiled = total, compiled
        self.limit_left_s = total.limit_s
        self.slow_until: float | None = None
        self.setup_s = SETUP_S

    @property
    def census_s(self) -> float:
        """The census may use all of the remaining time: without it there is no session."""
        return self.total.left_s

    def spend(self, tier: str, seconds: float, setup_s: float = 0.0) -> None:
        """Accounts for a tier that took `seconds`, `setup_s` of them before counting."""
        if tier in self.total.durations:
            self.total.learn(tier, seconds, compiled=self.compiled)
        if tier != "census":
            self.limit_left_s -= seconds
        if setup_s:
            self.setup_s = setup_s + (RECORD_CALLS_S if tier == "few" else 0.0)

    def tier_s(self, tier: str) -> float | None:
        """Seconds for this tier; None if too little is left to count anything."""
        left = self.total.left_s
        if tier == "few":
            share = max(left - self.total.reserve_s(), left / (1 + len(self.total.coming)))
            needed = TIER_S
        else:
            share, needed = self._slow_s(tier), self.setup_s + OPERATORS_S
        seconds = min(share, left, self.limit_left_s)
        return seconds if seconds >= needed else None

    def _slow_s(self, tier: str) -> float:
        """An equal share per remaining session; a session's first slow tier gets at least enough to count something."""
        now, least = time.monotonic(), 0.0
        if self.slow_until is None:
            self.slow_until = now + self.total.left_s / max(1, self.total.slow_coming)
            self.total.slow_coming -= 1
            least = self.setup_s + OPERATORS_S
        return max(least, min(self.slow_until - now, self.limit_left_s) * SHARE[tier])

    def refusal(self, tier: str) -> str:
        """Why `tier_s` returned None."""
        left = max(0.0, min(self.total.left_s, self.limit_left_s))
        if self.limit_left_s < self.total.left_s:
            limit = f"the limit of {self.total.limit_s:.0f} s for counters"
        else:
            limit = f"the budget of {self.total.total_s or 0:.0f} s"
        if tier == "few" or left < 1:
            return f"{limit} was used up before it started"
        return f"{left:.0f} s left of {limit}, too few for its set-up (about {self.setup_s:.0f} s) and some operators"


@contextmanager
def stop_on_signals(stop: threading.Event) -> Iterator[None]:
    """SIGINT and SIGTERM stop the recording and keep what was recorded. A second signal stops at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def request_stop(_number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {s: signal.signal(s, request_stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""Divides a command's seconds over its sessions and their tiers; time that one leaves is the next one's."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# For the last reports to be printed and carried.
RESERVE_S = 15.0
# A census and the counters of every launch are worth starting with no less; a slow tier likewise.
SESSION_S = 20.0
TIER_S = 8.0
# Of what a session has left: the counters on every launch come first; the opcodes take what the full set leaves.
SHARE = {"few": 1.0, "full": 0.65, "opcodes": 1.0}


class Budget:
    """`total_s` is for the whole command (None: no end), `limit_s` for the counters of one session."""

    def __init__(self, total_s: float | None, limit_s: float, sessions: int):
        self.total_s, self.limit_s, self.sessions = total_s, limit_s, sessions
        self.until = float("inf") if total_s is None else time.monotonic() + total_s - RESERVE_S

    @property
    def left_s(self) -> float:
        return self.until - time.monotonic()

    def session(self) -> SessionBudget | None:
        """A fair part of what is left for the next session; None when too little is left to begin it."""
        share = self.left_s / max(1, self.sessions)
        self.sessions -= 1
        return SessionBudget(self, share) if self.left_s >= SESSION_S else None


class SessionBudget:
    def __init__(self, whole: Budget, share_s: float):
        self.whole, self.until = whole, time.monotonic() + share_s
        self.counting_until = float("inf")

    @property
    def census_s(self) -> float:
        """The census may take what others would have: without it there is nothing."""
        return self.whole.left_s

    def start_counting(self) -> None:
        self.counting_until = time.monotonic() + self.whole.limit_s

    def tier_s(self, tier: str) -> float | None:
        """Seconds for this tier; None when too little is left."""
        now = time.monotonic()
        own = min(self.until, self.counting_until) - now
        if tier == "few" and self.counting_until - now >= TIER_S:
            # Before any other session's slow tiers: leaves them their census and their own few.
            own = max(own, min(self.counting_until - now, self.whole.left_s - 3 * SESSION_S * self.whole.sessions))
        seconds = min(own, self.whole.left_s) * SHARE[tier]
        return seconds if seconds >= TIER_S else None

    def why(self) -> str:
        if self.counting_until < min(self.until, self.whole.until):
            return f"the limit of {self.whole.limit_s:.0f} s for counters was used up before it"
        return f"the budget of {self.whole.total_s:.0f} s was used up before it"


@contextmanager
def stop_on_signals(stop: threading.Event) -> Iterator[None]:
    """SIGINT and SIGTERM ask to stop: what was read is kept. A second one ends at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def asked(_number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {s: signal.signal(s, asked) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

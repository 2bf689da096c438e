"""Divides a command's seconds over its sessions and their tiers; time that one leaves is the others'.

Every session's census and counters on every launch come before any session's slow tiers: a step without its counters
is a hole in the study, a slow tier cut short is a smaller share of the same.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

# For the last reports to be printed and carried.
RESERVE_S = 15.0
# A census is worth starting with no less, counters on every launch likewise.
SESSION_S = 20.0
TIER_S = 8.0
# What a session to come will take, until one was recorded; then the longest seen, with a margin.
EXPECTED_S = {"census": 20.0, "few": 40.0}
MARGIN = 1.2
# A compiled step is compiled in its census, and loaded from the cache after it.
COMPILED = {"census": 3.0, "few": 1.5}
# Of what a session has for its slow tiers: the opcodes take what the full set leaves.
SHARE = {"full": 0.65, "opcodes": 1.0}
# A slow tier sets up the step and notes its operators before it counts any; it is not begun without time for some.
SETUP_S = 10.0
NOTING_S = 5.0
OPERATORS_S = 6.0


class Budget:
    """`total_s` is for the whole command (None: no end), `limit_s` for the counters of one session; `compiled` says of
    each session whether its step is compiled.
    """

    def __init__(self, total_s: float | None, limit_s: float, compiled: Sequence[bool]):
        self.total_s, self.limit_s = total_s, limit_s
        self.until = float("inf") if total_s is None else time.monotonic() + total_s - RESERVE_S
        self.coming = list(compiled)
        self.slow_coming = len(compiled)
        self.seen: dict[str, list[float]] = {"census": [], "few": []}

    @property
    def left_s(self) -> float:
        return self.until - time.monotonic()

    def session(self) -> SessionBudget | None:
        """For the next session; None when too little is left to begin it."""
        compiled = self.coming.pop(0)
        if self.left_s < SESSION_S:
            self.slow_coming -= 1
            return None
        return SessionBudget(self, compiled)

    def learn(self, tier: str, seconds: float, *, compiled: bool) -> None:
        self.seen[tier].append(seconds / (COMPILED[tier] if compiled else 1.0))

    def reserve_s(self) -> float:
        """What the census and the few counters of all sessions still to come are expected to take."""
        each = {t: MARGIN * max(seen) if seen else EXPECTED_S[t] for t, seen in self.seen.items()}
        return sum(s * (COMPILED[t] if compiled else 1.0) for compiled in self.coming for t, s in each.items())


class SessionBudget:
    def __init__(self, whole: Budget, compiled: bool):
        self.whole, self.compiled = whole, compiled
        self.limit_left_s = whole.limit_s
        self.slow_until: float | None = None
        self.setup_s = SETUP_S

    @property
    def census_s(self) -> float:
        """The census may take what others would have: without it there is nothing."""
        return self.whole.left_s

    def took(self, tier: str, seconds: float, setup_s: float = 0.0) -> None:
        """Learns from a turn: its seconds, and how many of them were no counting."""
        if tier in self.whole.seen:
            self.whole.learn(tier, seconds, compiled=self.compiled)
        if tier != "census":
            self.limit_left_s -= seconds
        if setup_s:
            self.setup_s = setup_s + (NOTING_S if tier == "few" else 0.0)

    def tier_s(self, tier: str) -> float | None:
        """Seconds for this tier; None when too little is left for it to count anything."""
        left = self.whole.left_s
        if tier == "few":
            own = max(left - self.whole.reserve_s(), left / (1 + len(self.whole.coming)))
            needed = TIER_S
        else:
            own, needed = self._slow_s(tier), self.setup_s + OPERATORS_S
        seconds = min(own, left, self.limit_left_s)
        return seconds if seconds >= needed else None

    def _slow_s(self, tier: str) -> float:
        """An even part for each session left, but to its first slow tier never so even that none can count."""
        now, least = time.monotonic(), 0.0
        if self.slow_until is None:
            self.slow_until = now + self.whole.left_s / max(1, self.whole.slow_coming)
            self.whole.slow_coming -= 1
            least = self.setup_s + OPERATORS_S
        return max(least, min(self.slow_until - now, self.limit_left_s) * SHARE[tier])

    def why(self, tier: str) -> str:
        """Why `tier_s` gave nothing."""
        left = max(0.0, min(self.whole.left_s, self.limit_left_s))
        what = "limit" if self.limit_left_s < self.whole.left_s else "budget"
        given = f"the limit of {self.whole.limit_s:.0f} s for counters"
        if what == "budget":
            given = f"the budget of {self.whole.total_s or 0:.0f} s"
        if tier == "few" or left < 1:
            return f"{given} was used up before it"
        return (
            f"{left:.0f} s were left of {given}, too few for its set-up (about {self.setup_s:.0f} s) and some operators"
        )


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

"""Is the new one slower? A gate for CI that knows how much the clock itself wanders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from voxtune.analysis.certificate import refusal
from voxtune.analysis.frame import Array
from voxtune.analysis.step import wall_samples
from voxtune.analysis.table import Column, Table
from voxtune.errors import InputError

if TYPE_CHECKING:
    from voxtune.profile.session import Session

Verdict = Literal["ok", "slower", "inconclusive"]
# 0 and 2 are the house's (done; wrong input). A gate adds two of its own.
EXIT = {"ok": 0, "slower": 1, "inconclusive": 3}
SAMPLES = 3


@dataclass(frozen=True, kw_only=True)
class Change:
    """Percent by which the new median is above the old, and the interval that holds the truth 19 times in 20."""

    change_pct: float
    low_pct: float
    high_pct: float

    def verdict(self, allowed_pct: float) -> Verdict:
        if self.low_pct > allowed_pct:
            return "slower"
        return "ok" if self.high_pct <= allowed_pct else "inconclusive"


def change(base: Array, new: Array) -> Change:
    """Of medians, with errors from the median absolute deviation: one step that hiccuped changes nothing."""
    before, after = float(np.median(base)), float(np.median(new))
    error = 100 * after / before * float(np.hypot(_error(base) / before, _error(new) / after))
    moved = 100 * (after / before - 1)
    return Change(change_pct=moved, low_pct=moved - 1.96 * error, high_pct=moved + 1.96 * error)


def _error(samples: Array) -> float:
    """Standard error of a median: 1.4826 MAD estimates the deviation, 1.2533 / sqrt(n) carries it to the median."""
    deviation = 1.4826 * float(np.median(np.abs(samples - np.median(samples))))
    return 1.2533 * deviation / float(np.sqrt(len(samples)))


def check(base: Session, new: Session, max_slowdown_pct: float = 5.0) -> Table:
    """`extra` has verdict, exit_code and reason. Sessions of different work are the user's error."""
    _comparable(base, new)
    columns = [
        Column("what", kind="text"),
        Column("base_ms", "ms", better="low"),
        Column("new_ms", "ms", better="low"),
        Column("change_pct", "%", "percent", "low"),
        Column("low_pct", "%", "percent"),
        Column("high_pct", "%", "percent"),
        Column("allowed_pct", "%", "percent"),
        Column("verdict", kind="text"),
    ]
    title = f"Check: {new.name} against {base.name}"
    reason = refusal([base, new], "time")
    if reason:
        return Table(title, columns, refused=reason, extra=_outcome("inconclusive", reason))
    (old_tier, old), (new_tier, samples) = wall_samples(base), wall_samples(new)
    row: dict[str, Any] = {"what": f"step ({new_tier})", "allowed_pct": max_slowdown_pct}
    if old_tier != new_tier:
        reason = f"base was timed {old_tier}, new {new_tier}: profiling slows a step, so these do not compare"
        return Table(title, columns, refused=reason, extra=_outcome("inconclusive", reason))
    row |= {"base_ms": float(np.median(old)), "new_ms": float(np.median(samples))}
    if min(len(old), len(samples)) < SAMPLES:
        why = f"{min(len(old), len(samples))} timed steps: at least {SAMPLES} are needed to know the spread"
        return Table(title, columns, [row | {"verdict": "inconclusive"}], [why], extra=_outcome("inconclusive", why))
    found = change(old, samples)
    verdict = found.verdict(max_slowdown_pct)
    why = {
        "ok": f"at most {found.high_pct:+.1f} %, allowed {max_slowdown_pct:g} %",
        "slower": f"at least {found.low_pct:+.1f} %, allowed {max_slowdown_pct:g} %",
        "inconclusive": f"between {found.low_pct:+.1f} and {found.high_pct:+.1f} %: the spread hides an allowed change of "
        f"{max_slowdown_pct:g} %; time more steps",
    }[verdict]
    row |= {"change_pct": found.change_pct, "low_pct": found.low_pct, "high_pct": found.high_pct, "verdict": verdict}
    return Table(title, columns, [row], [why], extra=_outcome(verdict, why))


def _outcome(verdict: Verdict, why: str) -> dict[str, Any]:
    return {"verdict": verdict, "exit_code": EXIT[verdict], "reason": why}


def _comparable(base: Session, new: Session) -> None:
    for key in ("workload", "mode", "size", "batch"):
        old, now = base.meta.get(key), new.meta.get(key)
        if old is not None and now is not None and old != now:
            raise InputError(
                f"{base.name} and {new.name} differ in {key} ({old} and {now}): no comparison of like with like"
            )
    old, now = (s.meta["environment"].get("gpu") for s in (base, new))
    if old and now and old != now:
        raise InputError(f"{base.name} ran on {old}, {new.name} on {now}: a gate compares runs on one GPU")


def parse_percent(text: str) -> float:
    """ "5%", "5 %" or "5"."""
    body = text.strip().removesuffix("%").strip()
    try:
        value = float(body)
    except ValueError:
        value = float("nan")
    if not 0 <= value <= 1000:
        raise InputError(f"--max-slowdown {text}: give a percentage from 0 to 1000, such as 5%")
    return value

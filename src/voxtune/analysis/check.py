"""Regression check for CI: is a session slower than its baseline, beyond the spread of the measurements?"""

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
# As everywhere, 0 is success and 2 is wrong input; the check adds two exit codes.
EXIT = {"ok": 0, "slower": 1, "inconclusive": 3}
SAMPLES = 3


@dataclass(frozen=True, kw_only=True)
class Change:
    """Change of the median in percent, with its 95 % confidence interval."""

    change_pct: float
    low_pct: float
    high_pct: float

    def verdict(self, allowed_pct: float) -> Verdict:
        if self.low_pct > allowed_pct:
            return "slower"
        return "ok" if self.high_pct <= allowed_pct else "inconclusive"


def change(base: Array, new: Array) -> Change:
    """Change of medians, with errors from the median absolute deviation, which ignores single slow steps."""
    before, after = float(np.median(base)), float(np.median(new))
    error = 100 * after / before * float(np.hypot(_error(base) / before, _error(new) / after))
    change_pct = 100 * (after / before - 1)
    return Change(change_pct=change_pct, low_pct=change_pct - 1.96 * error, high_pct=change_pct + 1.96 * error)


def _error(samples: Array) -> float:
    """Standard error of a median: 1.4826 MAD estimates the standard deviation, 1.2533 / sqrt(n) scales it to the median."""
    deviation = 1.4826 * float(np.median(np.abs(samples - np.median(samples))))
    return 1.2533 * deviation / float(np.sqrt(len(samples)))


def check(base: Session, new: Session, max_slowdown_pct: float = 5.0) -> Table:
    """`extra` has verdict, exit_code and reason. Sessions of different workloads or GPUs raise InputError."""
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
    title = f"Check: {new.name} vs {base.name}"
    reason = refusal([base, new], "time", across_gpus=True)
    if reason:
        return Table(title, columns, refused=reason, extra=_outcome("inconclusive", reason))
    (old_tier, old), (new_tier, samples) = wall_samples(base), wall_samples(new)
    row: dict[str, Any] = {"what": f"step ({new_tier})", "allowed_pct": max_slowdown_pct}
    if old_tier != new_tier:
        reason = f"step times come from {old_tier} steps (base) and {new_tier} steps (new) and cannot be compared"
        return Table(title, columns, refused=reason, extra=_outcome("inconclusive", reason))
    row |= {"base_ms": float(np.median(old)), "new_ms": float(np.median(samples))}
    if min(len(old), len(samples)) < SAMPLES:
        reason = f"{min(len(old), len(samples))} timed steps; at least {SAMPLES} are required to estimate the spread"
        extra = _outcome("inconclusive", reason)
        return Table(title, columns, [row | {"verdict": "inconclusive"}], [reason], extra=extra)
    result = change(old, samples)
    verdict = result.verdict(max_slowdown_pct)
    interval = f"change {result.change_pct:+.1f} % (95 % confidence interval {result.low_pct:+.1f} to {result.high_pct:+.1f} %)"
    reason = {
        "ok": f"{interval}: within the allowed {max_slowdown_pct:g} %",
        "slower": f"{interval}: more than the allowed {max_slowdown_pct:g} %",
        "inconclusive": f"{interval}: contains the allowed {max_slowdown_pct:g} %; time more steps",
    }[verdict]
    row |= {"change_pct": result.change_pct, "low_pct": result.low_pct, "high_pct": result.high_pct, "verdict": verdict}
    return Table(title, columns, [row], [reason], extra=_outcome(verdict, reason))


def _outcome(verdict: Verdict, reason: str) -> dict[str, Any]:
    return {"verdict": verdict, "exit_code": EXIT[verdict], "reason": reason}


def _comparable(base: Session, new: Session) -> None:
    for key in ("workload", "mode", "size", "batch"):
        old, now = base.meta.get(key), new.meta.get(key)
        if old is not None and now is not None and old != now:
            raise InputError(
                f"{base.name} and {new.name} differ in {key} ({old} and {now}); compare sessions of the same {key}"
            )
    old, now = (s.meta["environment"].get("gpu") for s in (base, new))
    if old and now and old != now:
        raise InputError(f"{base.name} ran on {old}, {new.name} on {now}; compare sessions of the same GPU")


def parse_percent(text: str) -> float:
    """ "5%", "5 %" or "5"."""
    body = text.strip().removesuffix("%").strip()
    try:
        value = float(body)
    except ValueError:
        value = float("nan")
    if not 0 <= value <= 1000:
        raise InputError(f"--max-slowdown {text}: expected a percentage from 0 to 1000, such as 5%")
    return value

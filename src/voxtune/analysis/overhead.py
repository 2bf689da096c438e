"""What profiling costs: a bare step beside one under the census and one under the counters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from voxtune.analysis.frame import labels, numbers, ratio
from voxtune.analysis.table import Column, Table

if TYPE_CHECKING:
    from voxtune.profile.session import Session


def overhead(sessions: Sequence[Session]) -> Table:
    """One row a session; what a tier costs is empty where it was not recorded."""
    columns = [
        Column("session", kind="text"),
        Column("bare_ms", "ms", doc="median of steps without a profiler"),
        Column("census_ms", "ms", doc="median of steps under torch.profiler"),
        Column("census_pct", "%", "percent", "low", 1, "what the census adds to a bare step"),
        Column("few", "s", better="low", digits=1, doc="one step with the few counters on every launch"),
        Column("few_ratio", "x bare", better="low", digits=0),
        Column("few_a_launch", "ms", better="low", digits=1),
        Column("full_a_launch", "s", better="low", doc="the full set, operators run alone"),
        Column("opcodes_a_launch", "s", better="low", doc="opcodes, operators run alone"),
        Column("turns", "s", better="low", digits=1, doc="turns on the GPU of all counters, set-up included"),
    ]
    rows = [_row(s, label) for s, label in zip(sessions, labels(sessions), strict=True)]
    notes = [
        "Counters are read in a process of their own: no time of the step, of a kernel or of a class comes from it.",
        "A launch under the full set or the opcodes is replayed in several passes, with its memory put back before each.",
    ]
    return Table("What profiling costs", columns, rows, notes)


def _row(session: Session, label: str) -> dict[str, Any]:
    bare, census = (_median(session, tier) for tier in ("bare", "census"))
    row: dict[str, Any] = {"session": label, "bare_ms": bare, "census_ms": census}
    slower = ratio(census, bare)
    row["census_pct"] = None if slower is None else 100 * (slower - 1)
    turns = {t: told for t, told in session.meta["tiers"].items() if isinstance(told, dict) and told.get("counting_s")}
    each = {t: ratio(told["counting_s"], told.get("read")) for t, told in turns.items()}
    if "few" in turns:
        row["few"] = turns["few"]["counting_s"]
        row["few_ratio"] = ratio(1e3 * row["few"], bare)
        row["few_a_launch"] = None if each["few"] is None else 1e3 * each["few"]
    row |= {f"{t}_a_launch": each[t] for t in ("full", "opcodes") if t in each}
    spent = [told["seconds"] for told in turns.values() if told.get("seconds") is not None]
    return row | {"turns": sum(spent) if spent else None}


def _median(session: Session, tier: str) -> float | None:
    found = numbers(session.timings[session.timings["tier"] == tier], "step_ms")
    found = found[~np.isnan(found)]
    return float(np.median(found)) if len(found) else None

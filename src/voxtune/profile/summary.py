"""What was recorded, in a few lines for a person and one dictionary for a machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from voxtune.profile.record import Recorded


def summary(recorded: Recorded) -> dict[str, Any]:
    row: dict[str, Any] = {"config": recorded.config, "folder": str(recorded.folder), "seconds": recorded.seconds}
    if recorded.session is None:
        return row | {"error": recorded.error}
    session = recorded.session
    bare = session.timings.loc[session.timings["tier"] == "bare", "step_ms"]
    first = session.launches[session.launches["step"] == 0]
    unknown = float(first.loc[first["class"] == "unknown", "duration_us"].sum())
    return row | {
        "step_ms": float(bare.median()),
        "step_ms_p20": float(bare.quantile(0.2)),
        "step_ms_p80": float(bare.quantile(0.8)),
        "launches": len(first),
        "unknown_time_share": unknown / max(float(first["duration_us"].sum()), 1e-9),
        "peak_bytes": session.meta.get("peak_bytes"),
        "tiers": session.meta["tiers"],
        "proof": session.meta.get("proof"),
    }


def lines(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [f"{row['config']}: FAILED: {row['error']}"]
    peak = f", peak {row['peak_bytes'] / 2**30:.2f} GiB" if row["peak_bytes"] else ""
    told = [
        f"{row['config']}: step {row['step_ms']:.2f} ms bare (p20 {row['step_ms_p20']:.2f}, p80 {row['step_ms_p80']:.2f}), "
        f"{row['launches']} launches{peak}, unknown {100 * row['unknown_time_share']:.2f} % of time; {row['folder']}"
    ]
    for tier, state in row["tiers"].items():
        share = f"{100 * state['time_share']:.2f} % of kernel time" if "time_share" in state else ""
        why = f"missing: {state['why']}" if state.get("why") else ""
        told.append(f"  {tier:8} {'; '.join(filter(None, [share, why])) or 'done'}")
    proof = row["proof"] or {}
    if proof.get("claim") == "fp32":
        said = {True: "proved by counters", False: "BROKEN: tensor cores were used", None: "not proved"}
        told.append(f"  fp32     {said[proof.get('holds')]}")
    return told


def verdict(rows: Sequence[dict[str, Any]], tiers: Sequence[str]) -> str:
    """Whether every tier asked for works on this machine."""
    failed = []
    for row in rows:
        told = row.get("tiers", {})
        failed += [f"{row['config']} {t}" for t in tiers if not told.get(t, {}).get("done")]
        if (row.get("proof") or {}).get("holds") is False:
            failed.append(f"{row['config']} fp32")
    return f"self-check: {'FAILED: ' + ', '.join(failed) if failed else 'passed, every tier works here'}"

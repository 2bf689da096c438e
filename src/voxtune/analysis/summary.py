"""The main figures of recorded steps, for readers who do not know GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from voxtune.analysis.advice import advice
from voxtune.analysis.frame import gpu_name, labels
from voxtune.analysis.mix import kernel_mix
from voxtune.analysis.step import step_totals

if TYPE_CHECKING:
    from voxtune.profile.session import Session

# Kernel classes in plain words; other classes count as "other work".
WORK = {
    "conv": "convolutions",
    "norm": "normalisation",
    "elementwise": "elementwise operations",
    "triton": "fused kernels",
    "matmul": "matrix products",
    "attention": "attention",
    "optimizer": "the update of the weights",
    "layout": "conversions of memory layout",
    "copy": "copies",
    "cast": "conversions of precision",
    "upsample": "interpolation",
}


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One workload, mode and GPU. Times in ms, shares in percent; None where not measured."""

    workload: str
    mode: str
    gpu: str
    # The session that others are compared with (the baseline if recorded) and the fastest one.
    first: str
    first_ms: float | None
    fastest: str
    fastest_ms: float | None
    slowest: str
    slowest_ms: float | None
    first_gib: float | None
    fastest_gib: float | None
    # Of the first and of the fastest: the largest kinds of work by share of device time.
    first_work: list[tuple[str, float]]
    fastest_work: list[tuple[str, float]]
    fastest_idle_pct: float | None
    advice: str
    advice_ms: float | None

    @property
    def speedup(self) -> float | None:
        return self.first_ms / self.fastest_ms if self.first_ms and self.fastest_ms else None


def summaries(sessions: Sequence[Session]) -> list[Summary]:
    """One per workload, mode and GPU, in the order of the sessions."""
    groups: dict[tuple[str, str, str], list[tuple[str, Session]]] = {}
    for label, session in zip(labels(sessions), sessions, strict=True):
        key = (str(session.meta.get("workload")), str(session.meta["mode"]), gpu_name(session))
        groups.setdefault(key, []).append((label, session))
    return [_summary(*key, group) for key, group in groups.items()]


def _summary(workload: str, mode: str, gpu: str, group: list[tuple[str, Session]]) -> Summary:
    rows = step_totals([s for _, s in group]).rows
    timed = [i for i, r in enumerate(rows) if r["wall_ms"] is not None] or [0]
    first = next((i for i, (_, s) in enumerate(group) if s.meta["config"] == "baseline"), 0)
    fastest = min(timed, key=lambda i: rows[i]["wall_ms"] or 0.0)
    slowest = max(timed, key=lambda i: rows[i]["wall_ms"] or 0.0)
    best = advice(group[fastest][1]).rows[:1]

    def name(i: int) -> str:
        return str(group[i][1].meta["config"])

    return Summary(
        workload=workload,
        mode=mode,
        gpu=gpu,
        first=name(first),
        first_ms=rows[first]["wall_ms"],
        fastest=name(fastest),
        fastest_ms=rows[fastest]["wall_ms"],
        slowest=name(slowest),
        slowest_ms=rows[slowest]["wall_ms"],
        first_gib=rows[first]["peak_gib"],
        fastest_gib=rows[fastest]["peak_gib"],
        first_work=_work(group[first][1]),
        fastest_work=_work(group[fastest][1]),
        fastest_idle_pct=rows[fastest]["idle_pct"],
        advice=best[0]["advice"] if best else "",
        advice_ms=best[0]["gain_ms"] if best else None,
    )


def _work(session: Session, top: int = 3) -> list[tuple[str, float]]:
    shares: dict[str, float] = {}
    for row in kernel_mix(session, by=("class",)).rows:
        name = WORK.get(str(row["class"]).split("_")[0], "other work")
        shares[name] = shares.get(name, 0.0) + (row["share"] or 0.0)
    ranked = sorted(((n, s) for n, s in shares.items() if n != "other work"), key=lambda item: -item[1])
    return [(n, s) for n, s in ranked[:top] if s >= 1]

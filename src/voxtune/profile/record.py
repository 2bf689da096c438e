"""Records sessions of a workload: the census, then the counters, one configuration after the other.

On a GPU each part runs in a process of its own, since torch.profiler and Nsight Compute cannot share one. A part that
fails or runs out of time costs that part alone; the session is saved after each.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from voxtune.errors import InputError
from voxtune.profile.configs import StepConfig, parse_config
from voxtune.profile.ncu import Ncu, find_ncu
from voxtune.profile.session import Session, load_session
from voxtune.profile.steps import MODES, Target, find_target

TIERS = ("census", "few", "full", "opcodes")


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """`limit_s` is for the counters of one session, `budget_s` for all sessions together (None: no end); `ahead` starts
    workers early; `keep_raw` keeps the trace and Nsight Compute's pages in the session's folder, for
    `voxtune.profile.replay`.
    """

    mode: str = "train"
    size: tuple[int, ...] | None = None
    batch: int = 1
    steps: int = 2
    warmup: int = 3
    repeats: int = 5
    tiers: tuple[str, ...] = ("census", "few", "full", "opcodes")
    limit_s: float = 600.0
    budget_s: float | None = None
    cache_control: str = "none"
    clock_control: str = "none"
    ahead: bool = True
    keep_raw: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InputError(f"mode {self.mode!r}: choose train or sample")
        wrong = [t for t in self.tiers if t not in TIERS]
        if wrong:
            raise InputError(f"tier {wrong[0]!r}: choose from {', '.join(TIERS)}")
        if "census" not in self.tiers:
            raise InputError("the census is always needed: counters are carried to its launches")
        if min(self.batch, self.steps, self.repeats) < 1 or self.warmup < 0:
            raise InputError("batch, steps and repeats must be at least 1, warmup at least 0")
        if not self.limit_s > 0:
            raise InputError(f"limit {self.limit_s}: give seconds above 0")
        if self.budget_s is not None and not self.budget_s >= 30:
            raise InputError(f"budget {self.budget_s}: give at least 30 seconds, which one session needs")
        if self.cache_control not in ("none", "all") or self.clock_control not in ("none", "base"):
            raise InputError("cache control is none or all, clock control none or base")


@dataclass(kw_only=True)
class Recorded:
    """One configuration's outcome; `error` in place of a session when not even the census came about."""

    config: str
    folder: Path
    session: Session | None = None
    error: str | None = None
    seconds: float = 0.0


@dataclass(kw_only=True)
class Plan:
    """All that the recording of one session is made of."""

    target: Target
    source: str
    config: StepConfig
    options: RecordOptions
    device: torch.device
    folder: Path
    scratch: Path
    ncu: Ncu | None
    say: Callable[[str], None]
    missing: dict[str, str] = field(default_factory=dict)

    def spec(self, **more: Any) -> dict[str, Any]:
        o = self.options
        return {
            "target": self.source,
            "mode": o.mode,
            "config": self.config.name,
            "size": list(self.target.size),
            "batch": o.batch,
            "device": str(self.device),
            **more,
        }

    def census_spec(self) -> dict[str, Any]:
        o = self.options
        return self.spec(
            action="census",
            steps=o.steps,
            warmup=o.warmup,
            repeats=o.repeats,
            out=str(self.folder),
            number=self.ncu is not None and "full" in o.tiers,
            ncu_version=self.ncu.version if self.ncu else None,
            keep_raw=o.keep_raw,
            meta=self.meta(),
        )

    def meta(self) -> dict[str, Any]:
        from voxtune.profile.environment import provenance

        o = self.options
        counting = self.ncu is not None
        why = {t: self.missing.get(t, "not recorded yet") for t in TIERS if t != "census"}
        return {
            "name": f"{self.target.name} {o.mode} {self.config.name}",
            "workload": self.target.name,
            "mode": o.mode,
            "config": self.config.name,
            "size": list(self.target.size),
            "batch": o.batch,
            "cache_control": o.cache_control if counting else None,
            "clock_control": o.clock_control if counting else None,
            "tiers": {t: {"done": False, "why": reason} for t, reason in why.items()},
            **provenance(),
        }


def record(
    source: str,
    configs: Sequence[str],
    out: str | Path,
    *,
    options: RecordOptions | None = None,
    device: str | torch.device | None = None,
    say: Callable[[str], None] = lambda _line: None,
) -> list[Recorded]:
    """Records `source` (a workload's name or a model's path) in each configuration into `out`/<mode>-<config>."""
    options = options or RecordOptions()
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    target = find_target(source, options.size)
    parsed = list(dict.fromkeys(parse_config(c) for c in configs))
    ncu, missing = _counters(options, where, say)
    scratch = Path(tempfile.mkdtemp(prefix="voxtune-profile-"))
    plans = [
        Plan(
            target=target,
            source=source,
            config=config,
            options=options,
            device=where,
            folder=Path(out) / f"{options.mode}-{config.name}",
            scratch=scratch / config.name,
            ncu=ncu,
            say=say,
            missing=missing,
        )
        for config in parsed
    ]
    try:
        if where.type == "cuda":
            from voxtune.profile.recording import record_on_gpu

            return record_on_gpu(plans)
        return [_record_here(plan) for plan in plans]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _record_here(plan: Plan) -> Recorded:
    """The census in this process: on a CPU there is nothing else to record."""
    from voxtune.profile.worker import census

    started = time.monotonic()
    census(plan.census_spec())
    session = load_session(plan.folder)
    session.meta["proof"] = {"claim": "fp32" if plan.config.fp32 else None, "holds": None, "by": None, "why": "no GPU"}
    session.save(plan.folder)
    seconds = time.monotonic() - started
    plan.say(f"{plan.folder.name}: census done in {seconds:.1f} s")
    return Recorded(config=plan.config.name, folder=plan.folder, session=session, seconds=seconds)


def _counters(
    options: RecordOptions, device: torch.device, say: Callable[[str], None]
) -> tuple[Ncu | None, dict[str, str]]:
    """Nsight Compute if counters are wanted and can be had, and for each tier that cannot, why."""
    missing = {t: "not asked for" for t in TIERS if t != "census" and t not in options.tiers}
    wanted = [t for t in TIERS if t != "census" and t in options.tiers]
    if not wanted:
        return None, missing
    path = find_ncu()
    why = None
    if device.type != "cuda":
        why = "no GPU: counters are the GPU's own"
    elif path is None:
        why = (
            "Nsight Compute (ncu) was not found on the PATH, in /opt/nvidia/nsight-compute or in /usr/local/cuda*/bin: "
            "install it, or name it in VOXTUNE_NCU"
        )
    if why is not None or path is None:
        say(f"no counters: {why}")
        return None, missing | dict.fromkeys(wanted, str(why))
    ncu = Ncu(path=path, cache_control=options.cache_control, clock_control=options.clock_control)
    return ncu, missing


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


def summary_lines(row: dict[str, Any]) -> list[str]:
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


def failed_tiers(rows: Sequence[dict[str, Any]], tiers: Sequence[str]) -> list[str]:
    """The requested tiers that were not recorded, and FP32 claims that counters disproved, as "CONFIG TIER"."""
    failed = []
    for row in rows:
        recorded = row.get("tiers", {})
        failed += [f"{row['config']} {t}" for t in tiers if not recorded.get(t, {}).get("done")]
        if (row.get("proof") or {}).get("holds") is False:
            failed.append(f"{row['config']} fp32")
    return failed

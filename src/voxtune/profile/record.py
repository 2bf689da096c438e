"""Records sessions of a workload: the census, then the counters, one configuration after the other.

On a GPU each part runs in its own process, because torch.profiler and Nsight Compute cannot share one. The session is
saved after each part; a part that fails or runs out of time does not affect the others.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from voxtune.errors import InputError
from voxtune.files import check_outputs, locked_folder, paths_are_recorded, slug
from voxtune.profile.census import CENSUS, RAW, TRACE
from voxtune.profile.configs import StepConfig, parse_config
from voxtune.profile.ncu import Ncu, find_ncu, raw_files, report_file
from voxtune.profile.session import Session, load_session, session_files
from voxtune.profile.steps import MODES, Target, find_target

TIERS = ("census", "few", "full", "opcodes")


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """`limit_s` limits the counters of one session, `budget_s` all sessions together (None: no limit). `ahead` starts
    workers early. `keep_raw` keeps the trace and Nsight Compute's pages in the session's folder, for
    `voxtune.profile.replay`. `nvtx` marks modules as NVTX ranges and keeps Nsight Compute's reports as well. `overwrite`
    replaces existing sessions; `resume` continues them: it counts what they lack and merges it into them.
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
    nvtx: bool = False
    overwrite: bool = False
    resume: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InputError(f"unknown mode {self.mode!r}; choose from {', '.join(MODES)}")
        unknown = [t for t in self.tiers if t not in TIERS]
        if unknown:
            raise InputError(f"unknown tier {unknown[0]!r}; choose from {', '.join(TIERS)}")
        if "census" not in self.tiers:
            raise InputError("tiers must include census: the counters are assigned to its launches")
        if min(self.batch, self.steps, self.repeats) < 1 or self.warmup < 0:
            raise InputError("batch, steps and repeats must be >= 1, warmup >= 0")
        if self.resume and (self.overwrite or self.keep_raw):
            raise InputError("--continue cannot be combined with --overwrite or --keep-raw")
        if not self.limit_s > 0:
            raise InputError(f"limit {self.limit_s}: must be > 0 seconds")
        if self.budget_s is not None and not self.budget_s >= 30:
            raise InputError(f"budget {self.budget_s}: must be >= 30 seconds, the minimum for one session")
        if self.cache_control not in ("none", "all") or self.clock_control not in ("none", "base"):
            raise InputError("cache control must be none or all, clock control none or base")


@dataclass(kw_only=True)
class RecordResult:
    """The result of one configuration; `error` instead of a session if the census failed."""

    config: str
    folder: Path
    session: Session | None = None
    error: str | None = None
    seconds: float = 0.0


@dataclass(kw_only=True)
class SessionJob:
    """What is needed to record one session."""

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
    # The session to continue, and its folder; `folder` is then that of the new part.
    earlier: Session | None = None
    continues: Path | None = None

    def spec(self, **more: Any) -> dict[str, Any]:
        o = self.options
        return {
            "target": self.source,
            "mode": o.mode,
            "config": self.config.name,
            "size": list(self.target.size),
            "batch": o.batch,
            "device": str(self.device),
            "record_paths": paths_are_recorded(),
            "nvtx": o.nvtx,
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
            overwrite=o.overwrite,
            meta=self.meta(),
        )

    def meta(self) -> dict[str, Any]:
        from voxtune.profile.environment import provenance

        o = self.options
        counting = self.ncu is not None
        reasons = {t: self.missing.get(t, "not recorded yet") for t in TIERS if t != "census"}
        return {
            "name": f"{self.target.name} {o.mode} {self.config.name}",
            "workload": self.target.name,
            "mode": o.mode,
            "config": self.config.name,
            "size": list(self.target.size),
            "batch": o.batch,
            "cache_control": o.cache_control if counting else None,
            "clock_control": o.clock_control if counting else None,
            "tiers": {t: {"done": False, "why": reason} for t, reason in reasons.items()},
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
) -> list[RecordResult]:
    """Records `source` (a workload's name or a model's path) in each configuration to `out`/<mode>-<config>."""
    options = options or RecordOptions()
    torch_device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    target = find_target(source, options.size)
    parsed = list(dict.fromkeys(parse_config(c) for c in configs))
    if options.resume and torch_device.type != "cuda":
        raise InputError("--continue requires a GPU: it adds counters, which a recording on a CPU does not have")
    if not options.resume:
        check_outputs(recorded_files(out, configs, options), overwrite=options.overwrite, folder=Path(out))
    ncu, missing = _counters(options, torch_device, say)
    with ExitStack() as stack:
        scratch = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="voxtune-profile-", ignore_cleanup_errors=True)
        )
        jobs = []
        for config in parsed:
            folder = session_folder(out, options.mode, config)
            job = SessionJob(
                target=target,
                source=source,
                config=config,
                options=options,
                device=torch_device,
                folder=folder,
                scratch=Path(scratch, config.name),
                ncu=ncu,
                say=say,
                missing=missing,
            )
            if options.resume and (folder / "session.json").is_file():
                job.earlier, job.continues = load_session(folder), folder
                job.folder = Path(scratch, "parts", folder.name)
            jobs.append(job)
            stack.enter_context(locked_folder(folder))
        if torch_device.type == "cuda":
            from voxtune.profile.gpu_recording import record_on_gpu

            return record_on_gpu(jobs)
        return [_record_here(job) for job in jobs]


def session_folder(out: str | Path, mode: str, config: StepConfig) -> Path:
    return Path(out) / slug(f"{mode}-{config.name}")


def recorded_files(out: str | Path, configs: Sequence[str], options: RecordOptions) -> list[Path]:
    """The files that `record` writes."""
    files: list[Path] = []
    for config in dict.fromkeys(parse_config(c) for c in configs):
        folder = session_folder(out, options.mode, config)
        files += session_files(folder)
        if options.nvtx:
            files += [report_file(folder / RAW, tier) for tier in options.tiers if tier != "census"]
        if options.keep_raw:
            files += [folder / RAW / TRACE, folder / RAW / CENSUS]
            files += [file for tier in options.tiers if tier != "census" for file in raw_files(folder / RAW, tier)]
    return files


def _record_here(job: SessionJob) -> RecordResult:
    """Records the census in this process: on a CPU there are no counters."""
    from voxtune.profile.worker import census

    started = time.monotonic()
    census(job.census_spec())
    session = load_session(job.folder)
    session.meta["proof"] = {"claim": "fp32" if job.config.fp32 else None, "holds": None, "by": None, "why": "no GPU"}
    session.save(job.folder, overwrite=True)  # of its own
    seconds = time.monotonic() - started
    job.say(f"{job.folder.name}: census done in {seconds:.1f} s")
    return RecordResult(config=job.config.name, folder=job.folder, session=session, seconds=seconds)


def _counters(
    options: RecordOptions, device: torch.device, say: Callable[[str], None]
) -> tuple[Ncu | None, dict[str, str]]:
    """Nsight Compute, if counters are requested and available; and the reason for each tier that cannot be recorded."""
    missing = {t: "not requested" for t in TIERS if t != "census" and t not in options.tiers}
    requested = [t for t in TIERS if t != "census" and t in options.tiers]
    if not requested:
        return None, missing
    path = find_ncu()
    reason = None
    if device.type != "cuda":
        reason = "no GPU: the counters are hardware counters of the GPU"
    elif path is None:
        reason = (
            "Nsight Compute (ncu) was not found on the PATH, in /opt/nvidia/nsight-compute or in /usr/local/cuda*/bin: "
            "install it, or set VOXTUNE_NCU to its path"
        )
    if reason is not None or path is None:
        say(f"no counters: {reason}")
        return None, missing | dict.fromkeys(requested, str(reason))
    ncu = Ncu(path=path, cache_control=options.cache_control, clock_control=options.clock_control, nvtx=options.nvtx)
    return ncu, missing


def summary(recorded: RecordResult) -> dict[str, Any]:
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
    lines = [
        f"{row['config']}: step {row['step_ms']:.2f} ms unprofiled (p20 {row['step_ms_p20']:.2f}, p80 {row['step_ms_p80']:.2f}), "
        f"{row['launches']} launches{peak}, {100 * row['unknown_time_share']:.2f} % of time unclassified; {row['folder']}"
    ]
    for tier, state in row["tiers"].items():
        share = f"{100 * state['time_share']:.2f} % of kernel time" if "time_share" in state else ""
        missing = f"missing: {state['why']}" if state.get("why") else ""
        lines.append(f"  {tier:8} {'; '.join(filter(None, [share, missing])) or 'done'}")
    proof = row["proof"] or {}
    if proof.get("claim") == "fp32":
        verdicts = {True: "confirmed by counters", False: "FAILED: tensor cores were used", None: "not checked"}
        lines.append(f"  fp32     {verdicts[proof.get('holds')]}")
    return lines


def failed_tiers(rows: Sequence[dict[str, Any]], tiers: Sequence[str]) -> list[str]:
    """The requested tiers that were not recorded, and FP32 claims that counters disproved, as "CONFIG TIER"."""
    failed = []
    for row in rows:
        recorded = row.get("tiers", {})
        failed += [f"{row['config']} {t}" for t in tiers if not recorded.get(t, {}).get("done")]
        if (row.get("proof") or {}).get("holds") is False:
            failed.append(f"{row['config']} fp32")
    return failed

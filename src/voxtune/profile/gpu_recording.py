"""Recording of sessions on a GPU: a census worker and three workers under Nsight Compute, one after the other.

There are two rounds: first the census and the few counters of every session, then the slow tiers of every session.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from voxtune.errors import optional_import
from voxtune.files import recorded_text, write_file
from voxtune.profile import schema
from voxtune.profile.align import (
    SHARES,
    Key,
    align,
    choose_operators,
    function_name,
    most_expensive,
    occurrence_classes,
)
from voxtune.profile.budget import Budget, SessionBudget, stop_on_signals
from voxtune.profile.census import RAW
from voxtune.profile.counters import (
    COUNTER_TIERS,
    Identity,
    TierReport,
    assign_counters,
    kernel_rows,
    keys,
    prove_precision,
)
from voxtune.profile.merge import differences, merge_sessions
from voxtune.profile.ncu import SECTIONS, Ncu, NcuError, choose_metrics, explain, report_file, unknown_metric
from voxtune.profile.record import RecordOptions, RecordResult, SessionJob
from voxtune.profile.session import Session, load_session
from voxtune.profile.worker_pool import GRACE_S, ProfileWorker, WorkerOutcome, WorkerPool, worker_program
from voxtune.reading import read_file

with optional_import("profiling"):
    import pandas as pd

CENSUS_LIMIT_S = 900.0
# If the operators of this share of kernel time have numbers, they run in isolation. Otherwise a filter by function is used.
NUMBERED = 0.9
# The workers of each round.
ROUNDS = (("census", "few"), ("full", "opcodes"))
# The workers of the next turn, which start during the last tier of the current one.
NextTurn = tuple[WorkerPool, Sequence[str]] | None
_COLUMNS = {"few": schema.FEW, "full": schema.FULL, "opcodes": schema.SASS}


@dataclass
class Selection:
    """What a slow tier counts: operators, most expensive first; or the functions of the most expensive launches."""

    operators: list[int] | None
    functions: list[str]


def record_on_gpu(jobs: Sequence[SessionJob]) -> list[RecordResult]:
    """Records one session after the other. Reports are read while the next worker runs."""
    stop = threading.Event()
    options = jobs[0].options if jobs else RecordOptions()
    budget = Budget(options.budget_s, options.limit_s, [job.config.compile for job in jobs])
    pools = [_pool(job, stop) for job in jobs]
    # The workers of the next turn import PyTorch during the last tier of the current one.
    ahead = [(pool, names) for names in ROUNDS for pool in pools][1:]
    recordings: list[_SessionRecording | RecordResult] = []
    try:
        with stop_on_signals(stop):
            for job, pool in zip(jobs, pools, strict=True):
                recordings.append(_begin(job, pool, budget, ahead.pop(0), stop))
            for i, pool in enumerate(pools):
                recording, next_turn = recordings[i], ahead.pop(0) if ahead else None
                if isinstance(recording, _SessionRecording):
                    recordings[i] = _guarded(recording, partial(recording.record, ROUNDS[1], next_turn))
                pool.terminate()
            return [r if isinstance(r, RecordResult) else r.finish() for r in recordings]
    finally:
        for pool in pools:
            pool.terminate()


def _begin(
    job: SessionJob, pool: WorkerPool, budget: Budget, next_turn: NextTurn, stop: threading.Event
) -> _SessionRecording | RecordResult:
    share = budget.session()
    if stop.is_set() or share is None:
        reason = (
            "interrupted before it started"
            if stop.is_set()
            else f"the budget of {budget.total_s:.0f} s was used up before it started"
        )
        job.say(f"{job.folder.name}: {reason}")
        return RecordResult(config=job.config.name, folder=job.folder, error=reason)
    recording = _SessionRecording(job, pool, share)
    return _guarded(recording, partial(recording.record, ROUNDS[0], next_turn))


def _guarded(recording: _SessionRecording, turn: Callable[[], None]) -> _SessionRecording | RecordResult:
    """Runs a turn. An internal error fails this session, with its traceback; the next session goes on."""
    try:
        turn()
        return recording
    except Exception as error:
        job = recording.job
        job.say(traceback.format_exc())
        return RecordResult(config=job.config.name, folder=job.folder, error=f"{type(error).__name__}: {error}")


def _pool(job: SessionJob, stop: threading.Event) -> WorkerPool:
    commands: dict[str, Callable[[ProfileWorker], Sequence[str]]] = {"census": lambda m: worker_program(m.spec)}
    if job.ncu is not None:
        for tier in COUNTER_TIERS:
            # A compiled step is filtered by function, and the functions are known only after the census.
            if tier in job.options.tiers and not (job.config.compile and tier != "few"):
                commands[tier] = partial(_command, job.ncu, tier, Selection(None, []), refused=())
    # The census compiles the kernels; the workers that count find them in this cache.
    cache = {"TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(job.scratch / "inductor"))}
    return WorkerPool(job.scratch, commands, ahead=job.options.ahead, stop=stop, variables=cache)


def _metrics(ncu: Ncu, tier: str, refused: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    known = ncu.metrics
    if known is not None:
        known = known - set(refused)
    return choose_metrics(_COLUMNS[tier], known)


def _command(ncu: Ncu, tier: str, selection: Selection, worker: ProfileWorker, *, refused: Sequence[str]) -> list[str]:
    metrics = list(dict.fromkeys(_metrics(ncu, tier, refused)[0].values()))
    return ncu.command(
        worker.report,
        worker_program(worker.spec),
        # The time is needed to find the launches of the step that this one stands for.
        metrics=list(dict.fromkeys([*metrics, schema.TIME, *([schema.OPCODES] if tier == "opcodes" else [])])),
        sections=SECTIONS if tier == "full" else (),
        functions=selection.functions if selection.operators is None else (),
        once=tier != "few" and selection.operators is None and bool(selection.functions),
        source=tier == "opcodes",
    )


class _SessionRecording:
    """The recording of one session, from the census to the proof of its precision."""

    def __init__(self, job: SessionJob, pool: WorkerPool, budget: SessionBudget):
        self.job, self.pool, self.budget = job, pool, budget
        self.started = time.monotonic()
        self.seconds = 0.0
        self.error: str | None = None
        self.session: Session | None = None
        self.numbered: list[tuple[Key, int]] = []
        self.identities: dict[int, Identity] = {}
        self.kernels = pd.DataFrame()
        self.lock = threading.Lock()  # the thread that reads reports also writes the session
        self.reader = ThreadPoolExecutor(max_workers=1)
        self.reading: list[Future[Any]] = []

    def record(self, names: Sequence[str], next_turn: NextTurn) -> None:
        """Runs the workers of one round."""
        began, options = time.monotonic(), self.job.options
        turns = [n for n in names if n in options.tiers and (n == "census" or self.job.ncu is not None)]
        self.pool.start_ahead(turns if self.error is None else ())
        for name in turns if self.error is None else ():
            if name == turns[-1] and next_turn is not None and not self.pool.stop.is_set():
                next_turn[0].start_ahead(n for n in next_turn[1] if n in options.tiers)
            if name == "census":
                self.error = self._census()
            elif self.error is None:
                self._tier(name)
        self.seconds += time.monotonic() - began

    def finish(self) -> RecordResult:
        """Waits until all reports are read, and saves the session."""
        for future in self.reading:
            future.result()
        self.reader.shutdown()
        if self.session is not None:
            self._save()
        folder, session = self.job.folder, self.session
        if self.job.continues is not None:
            folder = self.job.continues
            session = load_session(folder) if session is not None else None
        return RecordResult(
            config=self.job.config.name, folder=folder, session=session, error=self.error, seconds=self.seconds
        )

    def _save(self) -> None:
        """Saves after each tier, so that an interrupted recording leaves a valid session."""
        assert self.session is not None
        with self.lock:
            self.session.meta["proof"] = prove_precision(self.session, claims_fp32=self.job.config.fp32)
            if self.job.earlier is None or self.job.continues is None:
                self.session.save(self.job.folder, overwrite=True)  # of its own
                return
            merge_sessions([self.job.earlier, self.session]).save(self.job.continues, overwrite=True)

    def _say(self, text: str) -> None:
        self.job.say(f"[{time.monotonic() - self.started:6.1f} s] {self.job.folder.name}: {text}")

    def _census(self) -> str | None:
        outcome = self.pool.run("census", self.job.census_spec(), min(CENSUS_LIMIT_S, self.budget.census_s))
        self.budget.spend("census", outcome.seconds)
        if outcome.result is None:
            lines = [line for line in outcome.log.splitlines() if line.strip()]
            reason = lines[-1][:300] if lines else f"status {outcome.status}"
            cut = " (interrupted)" if self.pool.stop.is_set() else " (time limit)" if outcome.stopped else ""
            error = f"census failed{cut}: {recorded_text(reason)}"
            self._say(error)
            return error
        self.numbered = [(Key(*key), number) for key, number in outcome.result["numbered"]]
        self.session = load_session(self.job.folder)
        bare = self.session.timings.loc[self.session.timings["tier"] == "bare", "step_ms"]
        self.kernels = kernel_rows(self.session, 0).copy()
        if self.job.earlier is not None:
            reasons = differences(self.job.earlier, self.session)
            if reasons:
                self.session = None
                error = f"cannot continue {self.job.folder.name}: {'; '.join(reasons)}"
                self._say(error)
                return error
        self._say(
            f"census {outcome.seconds:.1f} s: {len(self.kernels)} kernels, unprofiled step {bare.median():.2f} ms"
        )
        return None

    def _tier(self, tier: str) -> None:
        assert self.session is not None and self.job.ncu is not None
        seconds = self.budget.tier_s(tier)
        if self.pool.stop.is_set() or seconds is None:
            interrupted = self.pool.stop.is_set()
            self._missing(tier, "interrupted before it started" if interrupted else self.budget.refusal(tier))
            return
        if self._complete(tier):
            self._say(f"{tier}: complete in the earlier recording")
            return
        selection = self._select(tier)
        if selection.operators == []:
            self._say(f"{tier}: nothing is left to count")
            return
        outcome, refused = self._run(tier, selection, seconds)
        counting = (outcome.result or {}).get("counting_s")
        self.budget.spend(tier, outcome.seconds, max(0.0, outcome.seconds - counting) if counting is not None else 0.0)
        reason = self._failure(tier, selection, outcome)
        if reason is not None:
            self._missing(tier, reason)
            return
        self._say(f"{tier} {outcome.seconds:.1f} s" + (f", of which counting {counting:.1f} s" if counting else ""))
        # Printing a report takes seconds but no GPU, so it overlaps with the next tier.
        report = self.pool.workers[tier].report
        self.reading.append(self.reader.submit(copy_context().run, self._assign, tier, report, outcome, refused))

    def _complete(self, tier: str) -> bool:
        """Whether the recording that is continued has this slow tier. The few tier of each part identifies its launches."""
        return (
            tier != "few"
            and self.job.earlier is not None
            and bool((self.job.earlier.meta["tiers"].get(tier) or {}).get("done"))
        )

    def _failure(self, tier: str, selection: Selection, outcome: WorkerOutcome) -> str | None:
        """Why a tier has no report to read; None if it has one."""
        result = outcome.result or {}
        if self.pool.workers[tier].report.exists() and result.get("operators") != 0:
            return None
        if outcome.stopped or (result.get("expired") and not result.get("operators")):
            cause = "interrupted" if self.pool.stop.is_set() else "its time ran out"
            before = "the first operator" if selection.operators is not None else "the first launch"
            setup = f", {result['setup_s']:.0f} s of it set-up" if result.get("setup_s") else ""
            return f"{cause} before {before} was counted: after {outcome.seconds:.0f} s{setup}"
        failed = result.get("failed")
        if failed:
            return f"none of {len(failed)} operators ran in isolation, such as: {next(iter(failed.values()))}"
        return explain(outcome.log, outcome.status)

    def _select(self, tier: str) -> Selection:
        if tier == "few":
            return Selection(None, [])
        rows = self.kernels
        identities = list(zip(rows["name"], rows["grid"].fillna(""), rows["block"].fillna(""), strict=True))
        times = [float(t) for t in rows["duration_us"]]
        classes = occurrence_classes(list(zip(identities, times, strict=True)))
        launches = list(zip(classes, times, strict=True))
        if self.job.earlier is not None:
            # What the earlier parts counted costs nothing, so that the operators that are left come first.
            done = _counted(self.job.earlier, tier)
            launches = [(c, 0.0 if d else t) for (c, t), d in zip(launches, done, strict=True)]
        places = align(keys(rows), [key for key, _ in self.numbered])
        numbers = [-1 if place is None else self.numbered[place][1] for place in places]
        if not any(t for _, t in launches):
            return Selection([], [])
        if _numbered_share(launches, numbers) >= NUMBERED:
            return Selection(choose_operators(launches, numbers, SHARES[tier]), [])
        chosen = most_expensive(launches, SHARES[tier])
        return Selection(None, sorted({function_name(str(launch[0][0])) for launch in chosen}))  # type: ignore[index]

    def _run(self, tier: str, selection: Selection, seconds: float) -> tuple[WorkerOutcome, list[str]]:
        """Runs a tier; once more without the metric that this version of Nsight Compute refused, if it names one."""
        ncu, refused = self.job.ncu, list[str]()
        assert ncu is not None
        if selection.functions:
            self._replace_worker(tier, selection, refused)
        # Isolated operators stop by themselves. A whole step is stopped from here; its report is written in any case.
        isolated = selection.operators is not None
        deadline = max(seconds - GRACE_S, 0.6 * seconds) if isolated else None
        # Two warm-up steps: the first creates the optimizer's state, and compilation may need another.
        spec = self.job.spec(action="count", warmup=2, deadline_s=deadline, operators=selection.operators)
        outcome = self.pool.run(tier, spec, seconds)
        metric = unknown_metric(outcome.log) if outcome.result is None else None
        if metric is not None and not outcome.stopped:
            refused.append(metric)
            self._say(f"{tier}: this version of Nsight Compute refuses {metric}; retrying without it")
            self._replace_worker(tier, selection, refused)
            outcome = self.pool.run(tier, spec, seconds)
        if outcome.result is None and outcome.stopped:
            outcome.result = {"interrupted" if self.pool.stop.is_set() else "expired": True}
        return outcome, refused

    def _replace_worker(self, tier: str, selection: Selection, refused: list[str]) -> None:
        assert self.job.ncu is not None
        command = partial(_command, self.job.ncu, tier, selection, refused=tuple(refused))
        self.pool.replace(tier, command)

    def _assign(self, tier: str, report: Path, outcome: WorkerOutcome, refused: list[str]) -> None:
        """Reads the report and assigns its counters to the launches. A report that cannot be read fails only its tier."""
        session, ncu = self.session, self.job.ncu
        assert session is not None and ncu is not None
        columns, unknown = _metrics(ncu, tier, refused)
        try:
            tier_report = TierReport(
                tier=tier,
                columns=columns,
                raw=ncu.page(report, "raw", instances=tier == "opcodes"),
                details=ncu.page(report, "details") if tier == "full" else None,
                unknown=unknown,
                result=outcome.result or {},
                seconds=outcome.seconds,
            )
            if self.job.options.nvtx and self.job.continues is None:
                kept = report_file(self.job.folder / RAW, tier)
                write_file(kept, read_file(report, what="report"), overwrite=self.job.options.overwrite)
            if self.job.options.keep_raw:
                tier_report.save(self.job.folder / RAW, overwrite=self.job.options.overwrite)
            with self.lock:
                line, self.identities = assign_counters(session, tier_report, self.identities)
            self._save()
            self._say(line)
        except NcuError as error:
            self._missing(tier, explain(outcome.log, outcome.status) if "==ERROR==" in outcome.log else str(error))
        except Exception as error:  # an internal error: print it in full and go on with the other tiers
            self._say(traceback.format_exc())
            self._missing(tier, f"internal error while reading its report: {type(error).__name__}: {error}")

    def _missing(self, tier: str, reason: str) -> None:
        assert self.session is not None
        with self.lock:
            self.session.meta["tiers"][tier] = {"done": False, "why": recorded_text(reason)}
        self._save()
        self._say(f"{tier}: not recorded: {reason}")


def _counted(session: Session, tier: str) -> list[bool]:
    """Per kernel of the first step: whether the session has its counters of a slow tier."""
    rows = kernel_rows(session, 0)
    if tier == "full":
        return [bool(t == "full") for t in rows["counter_tier"].fillna("")]
    columns = ("name", "grid", "block")
    known = set(zip(*(session.opcodes[c].fillna("") for c in columns), strict=True))
    return [key in known for key in zip(*(rows[c].fillna("") for c in columns), strict=True)]


def _numbered_share(launches: Sequence[tuple[Any, float]], numbers: Sequence[int]) -> float:
    """Share of the time whose operators have a number."""
    total = sum(time for _, time in launches)
    return sum(time for (_, time), n in zip(launches, numbers, strict=True) if n >= 0) / total if total else 0.0

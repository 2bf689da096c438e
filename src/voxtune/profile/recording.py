"""The recording of sessions on a GPU: a census worker and three workers under Nsight Compute, turn by turn.

Two rounds: the census and the few counters of every session, then the slow tiers of every session.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from voxtune.profile import schema
from voxtune.profile.align import SHARES, Key, align, choose_operators, costliest, function_name, occurrence_classes
from voxtune.profile.budget import Budget, SessionBudget, stop_on_signals
from voxtune.profile.counters import COUNTER_TIERS, Identity, Reading, carry, kernel_rows, keys, prove_precision
from voxtune.profile.ncu import SECTIONS, Ncu, NcuError, choose_metrics, explain, unknown_metric
from voxtune.profile.record import Plan, Recorded, RecordOptions
from voxtune.profile.replay import RAW
from voxtune.profile.session import Session, load_session
from voxtune.profile.workers import GRACE_S, Crew, Member, Outcome, worker_program

CENSUS_LIMIT_S = 900.0
# Share of kernel time whose operators are known by number, from which they are run alone; below it a filter by function is used.
NUMBERED = 0.9
# The workers of each round's turns.
ROUNDS = (("census", "few"), ("full", "opcodes"))
Following = tuple[Crew, Sequence[str]] | None
_COLUMNS = {"few": schema.FEW, "full": schema.FULL, "opcodes": schema.SASS}


@dataclass
class Selection:
    """What a slow tier counts: operators, the costliest first, or (compiled) the functions of the costliest launches."""

    operators: list[int] | None
    functions: list[str]


def record_on_gpu(plans: Sequence[Plan]) -> list[Recorded]:
    """Records one after the other. What is left to read of a session's reports is read beside the next turn."""
    stop = threading.Event()
    options = plans[0].options if plans else RecordOptions()
    budget = Budget(options.budget_s, options.limit_s, [plan.config.compile for plan in plans])
    crews = [_crew(plan, stop) for plan in plans]
    # Each turn loads PyTorch for the next one's workers beside its own last tier.
    ahead = [(crew, names) for names in ROUNDS for crew in crews][1:]
    begun: list[_SessionRecording | Recorded] = []
    try:
        with stop_on_signals(stop):
            for plan, crew in zip(plans, crews, strict=True):
                begun.append(_begin(plan, crew, budget, ahead.pop(0), stop))
            for i, crew in enumerate(crews):
                recording, following = begun[i], ahead.pop(0) if ahead else None
                if isinstance(recording, _SessionRecording):
                    begun[i] = _guarded(recording, partial(recording.record, ROUNDS[1], following))
                crew.dismiss()
            return [b if isinstance(b, Recorded) else b.finish() for b in begun]
    finally:
        for crew in crews:
            crew.dismiss()


def _begin(
    plan: Plan, crew: Crew, budget: Budget, following: Following, stop: threading.Event
) -> _SessionRecording | Recorded:
    share = budget.session()
    if stop.is_set() or share is None:
        why = (
            "interrupted before it" if stop.is_set() else f"the budget of {budget.total_s:.0f} s was used up before it"
        )
        plan.say(f"{plan.folder.name}: {why}")
        return Recorded(config=plan.config.name, folder=plan.folder, error=why)
    recording = _SessionRecording(plan, crew, share)
    return _guarded(recording, partial(recording.record, ROUNDS[0], following))


def _guarded(recording: _SessionRecording, turn: Callable[[], None]) -> _SessionRecording | Recorded:
    """A session that breaks by our own mistake is told as such, and the next one goes on."""
    try:
        turn()
        return recording
    except Exception as error:
        plan = recording.plan
        plan.say(traceback.format_exc())
        return Recorded(config=plan.config.name, folder=plan.folder, error=f"{type(error).__name__}: {error}")


def _crew(plan: Plan, stop: threading.Event) -> Crew:
    commands: dict[str, Callable[[Member], Sequence[str]]] = {"census": lambda m: worker_program(m.spec)}
    if plan.ncu is not None:
        for tier in COUNTER_TIERS:
            # A compiled step is filtered by function, which is known only after the census.
            if tier in plan.options.tiers and not (plan.config.compile and tier != "few"):
                commands[tier] = partial(_command, plan.ncu, tier, Selection(None, []), refused=())
    # Compiled kernels are made once, by the census, and found again by the counters' processes.
    cache = {"TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(plan.scratch / "inductor"))}
    return Crew(plan.scratch, commands, ahead=plan.options.ahead, stop=stop, variables=cache)


def _metrics(ncu: Ncu, tier: str, refused: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    known = ncu.metrics
    if known is not None:
        known = known - set(refused)
    return choose_metrics(_COLUMNS[tier], known)


def _command(ncu: Ncu, tier: str, selection: Selection, member: Member, *, refused: Sequence[str]) -> list[str]:
    metrics = list(dict.fromkeys(_metrics(ncu, tier, refused)[0].values()))
    return ncu.command(
        member.report,
        worker_program(member.spec),
        # The time tells which launches of the step this one is like.
        metrics=list(dict.fromkeys([*metrics, schema.TIME, *([schema.OPCODES] if tier == "opcodes" else [])])),
        sections=SECTIONS if tier == "full" else (),
        functions=selection.functions if selection.operators is None else (),
        once=tier != "few" and selection.operators is None and bool(selection.functions),
        source=tier == "opcodes",
    )


class _SessionRecording:
    """One session, from the census to the proof."""

    def __init__(self, plan: Plan, crew: Crew, budget: SessionBudget):
        self.plan, self.crew, self.budget = plan, crew, budget
        self.started = time.monotonic()
        self.seconds = 0.0
        self.error: str | None = None
        self.session: Session | None = None
        self.numbered: list[tuple[Key, int]] = []
        self.called: dict[int, Identity] = {}
        self.kernels = pd.DataFrame()
        self.lock = threading.Lock()  # the session is written by the reader of reports too
        self.reader = ThreadPoolExecutor(max_workers=1)
        self.reading: list[Future[Any]] = []

    def record(self, names: Sequence[str], following: Following) -> None:
        """One round's turns on the GPU."""
        began, options = time.monotonic(), self.plan.options
        turns = [n for n in names if n in options.tiers and (n == "census" or self.plan.ncu is not None)]
        self.crew.assemble(turns if self.error is None else ())
        for name in turns if self.error is None else ():
            if name == turns[-1] and following is not None and not self.crew.stop.is_set():
                following[0].assemble(n for n in following[1] if n in options.tiers)
            if name == "census":
                self.error = self._census()
            elif self.error is None:
                self._tier(name)
        self.seconds += time.monotonic() - began

    def finish(self) -> Recorded:
        """Waits until all reports are read."""
        for future in self.reading:
            future.result()
        self.reader.shutdown()
        if self.session is not None:
            self._save()
        return Recorded(
            config=self.plan.config.name,
            folder=self.plan.folder,
            session=self.session,
            error=self.error,
            seconds=self.seconds,
        )

    def _save(self) -> None:
        """After each tier, so that whatever ends us leaves a session that stands."""
        assert self.session is not None
        with self.lock:
            self.session.meta["proof"] = prove_precision(self.session, claims_fp32=self.plan.config.fp32)
            self.session.save(self.plan.folder)

    def _say(self, text: str) -> None:
        self.plan.say(f"[{time.monotonic() - self.started:6.1f} s] {self.plan.folder.name}: {text}")

    def _census(self) -> str | None:
        outcome = self.crew.run("census", self.plan.census_spec(), min(CENSUS_LIMIT_S, self.budget.census_s))
        self.budget.took("census", outcome.seconds)
        if outcome.result is None:
            lines = [line for line in outcome.log.splitlines() if line.strip()]
            why = lines[-1][:300] if lines else f"status {outcome.status}"
            cut = " (interrupted)" if self.crew.stop.is_set() else " (ran out of time)" if outcome.stopped else ""
            error = f"census failed{cut}: {why}"
            self._say(error)
            return error
        self.numbered = [(Key(*key), number) for key, number in outcome.result["numbered"]]
        self.session = load_session(self.plan.folder)
        bare = self.session.timings.loc[self.session.timings["tier"] == "bare", "step_ms"]
        self.kernels = kernel_rows(self.session, 0).copy()
        self._say(f"census {outcome.seconds:.1f} s: {len(self.kernels)} kernels, bare step {bare.median():.2f} ms")
        return None

    def _tier(self, tier: str) -> None:
        assert self.session is not None and self.plan.ncu is not None
        seconds = self.budget.tier_s(tier)
        if self.crew.stop.is_set() or seconds is None:
            self._missing(tier, "interrupted before it" if self.crew.stop.is_set() else self.budget.why(tier))
            return
        selection = self._select(tier)
        outcome, refused = self._run(tier, selection, seconds)
        told = outcome.result or {}
        counting = told.get("counting_s")
        self.budget.took(tier, outcome.seconds, max(0.0, outcome.seconds - counting) if counting is not None else 0.0)
        why = self._uncounted(tier, selection, outcome)
        if why is not None:
            self._missing(tier, why)
            return
        self._say(f"{tier} {outcome.seconds:.1f} s" + (f", of which counting {counting:.1f} s" if counting else ""))
        # Printing a report takes seconds and no GPU: it goes on beside the next tier's turn.
        report = self.crew.members[tier].report
        self.reading.append(self.reader.submit(self._carry, tier, report, outcome, refused))

    def _uncounted(self, tier: str, selection: Selection, outcome: Outcome) -> str | None:
        """Why a turn left nothing to read; None when it left a report."""
        told = outcome.result or {}
        if self.crew.members[tier].report.exists() and told.get("operators") != 0:
            return None
        if outcome.stopped or (told.get("expired") and not told.get("operators")):
            cause = "it was interrupted" if self.crew.stop.is_set() else "its time ran out"
            before = "the first operator" if selection.operators is not None else "the first launch"
            setup = f", of which {told['setup_s']:.0f} s were set-up" if told.get("setup_s") else ""
            return f"{cause} before {before} was counted: after {outcome.seconds:.0f} s{setup}"
        failed = told.get("failed")
        if failed:
            return f"none of {len(failed)} operators ran alone, such as: {next(iter(failed.values()))}"
        return explain(outcome.log, outcome.status)

    def _select(self, tier: str) -> Selection:
        if tier == "few":
            return Selection(None, [])
        rows = self.kernels
        identities = list(zip(rows["name"], rows["grid"].fillna(""), rows["block"].fillna(""), strict=True))
        times = [float(t) for t in rows["duration_us"]]
        classes = occurrence_classes(list(zip(identities, times, strict=True)))
        launches = list(zip(classes, times, strict=True))
        places = align(keys(rows), [key for key, _ in self.numbered])
        numbers = [-1 if place is None else self.numbered[place][1] for place in places]
        if _numbered_share(launches, numbers) >= NUMBERED:
            return Selection(choose_operators(launches, numbers, SHARES[tier]), [])
        chosen = costliest(launches, SHARES[tier])
        return Selection(None, sorted({function_name(str(what[0][0])) for what in chosen}))  # type: ignore[index]

    def _run(self, tier: str, selection: Selection, seconds: float) -> tuple[Outcome, list[str]]:
        """One turn; a second one without the metric that this version refused, if it named one."""
        ncu, refused = self.plan.ncu, list[str]()
        assert ncu is not None
        if selection.functions:
            self._place(tier, selection, refused)
        # Operators run alone stop by themselves; a whole step is ended from here, and its report is written all the same.
        own_end = selection.operators is not None
        deadline = max(seconds - GRACE_S, 0.6 * seconds) if own_end else None
        # Compiling anew costs a warm-up step; the optimizer's state appears in the first.
        spec = self.plan.spec(action="count", warmup=2, deadline_s=deadline, operators=selection.operators)
        outcome = self.crew.run(tier, spec, seconds)
        named = unknown_metric(outcome.log) if outcome.result is None else None
        if named is not None and not outcome.stopped:
            refused.append(named)
            self._say(f"{tier}: this version of Nsight Compute refuses {named}; once more without it")
            self._place(tier, selection, refused)
            outcome = self.crew.run(tier, spec, seconds)
        if outcome.result is None and outcome.stopped:
            outcome.result = {"interrupted" if self.crew.stop.is_set() else "expired": True}
        return outcome, refused

    def _place(self, tier: str, selection: Selection, refused: list[str]) -> None:
        assert self.plan.ncu is not None
        command = partial(_command, self.plan.ncu, tier, selection, refused=tuple(refused))
        self.crew.replace(tier, command)

    def _carry(self, tier: str, report: Path, outcome: Outcome, refused: list[str]) -> None:
        """Reads the report and carries its counters; a report that cannot be read costs this tier alone."""
        session, ncu = self.session, self.plan.ncu
        assert session is not None and ncu is not None
        columns, unknown = _metrics(ncu, tier, refused)
        try:
            reading = Reading(
                tier=tier,
                columns=columns,
                raw=ncu.page(report, "raw", instances=tier == "opcodes"),
                details=ncu.page(report, "details") if tier == "full" else None,
                unknown=unknown,
                told=outcome.result or {},
                seconds=outcome.seconds,
            )
            if self.plan.options.keep_raw:
                reading.keep(self.plan.folder / RAW)
            with self.lock:
                line, self.called = carry(session, reading, self.called)
            self._save()
            self._say(line)
        except NcuError as error:
            why = explain(outcome.log, outcome.status) if "==ERROR==" in outcome.log else str(error)
            self._missing(tier, why)
        except Exception as error:  # our own mistake: told in full, and the other tiers go on
            self._say(traceback.format_exc())
            self._missing(tier, f"its report could not be carried: {type(error).__name__}: {error}")

    def _missing(self, tier: str, why: str) -> None:
        assert self.session is not None
        with self.lock:
            self.session.meta["tiers"][tier] = {"done": False, "why": why}
        self._save()
        self._say(f"{tier}: none: {why}")


def _numbered_share(launches: Sequence[tuple[Any, float]], numbers: Sequence[int]) -> float:
    """Share of the time whose operator is known by number."""
    total = sum(time for _, time in launches)
    return sum(time for (_, time), n in zip(launches, numbers, strict=True) if n >= 0) / total if total else 0.0

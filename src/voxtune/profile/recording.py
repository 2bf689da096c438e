"""The recording of sessions on a GPU: a census worker and three workers under Nsight Compute, turn by turn."""

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
from voxtune.profile.align import FULL_SHARES, OPCODE_SHARES, Key, choose_operators, costliest, function_name
from voxtune.profile.counters import Identity, kernel_rows, keys, prove_precision
from voxtune.profile.crew import GRACE_S, Crew, Member, Outcome, worker_program
from voxtune.profile.ncu import SECTIONS, Ncu, NcuError
from voxtune.profile.ncucsv import choose_metrics, explain, unknown_metric
from voxtune.profile.record import Plan, Recorded
from voxtune.profile.replay import RAW
from voxtune.profile.session import Session, load_session
from voxtune.profile.tiers import COUNTER_TIERS, Reading, carry

CENSUS_LIMIT_S = 900.0
# Of the time left for counters: the few, and of what is then left the full set; the opcodes get the rest.
SHARE_OF_LIMIT = {"few": 0.6, "full": 0.6, "opcodes": 1.0}
_COLUMNS = {"few": schema.FEW, "full": schema.FULL, "opcodes": schema.SASS}


@dataclass
class Selection:
    """What a slow tier counts: rounds of operators, or (compiled) the functions of the costliest launches."""

    rounds: list[list[int]] | None
    functions: list[str]


def record_on_gpu(plans: Sequence[Plan]) -> list[Recorded]:
    done: list[Recorded] = []
    crews = [_crew(plan) for plan in plans]
    try:
        for i, plan in enumerate(plans):
            following = crews[i + 1] if i + 1 < len(plans) else None
            done.append(_record_one(plan, crews[i], following))
            crews[i].dismiss()
    finally:
        for crew in crews:
            crew.dismiss()
    return done


def _record_one(plan: Plan, crew: Crew, following: Crew | None) -> Recorded:
    """A session that breaks by our own mistake is told as such, and the next one goes on."""
    try:
        return _SessionRecording(plan, crew.assemble(), following).record()
    except Exception as error:
        plan.say(traceback.format_exc())
        return Recorded(config=plan.config.name, folder=plan.folder, error=f"{type(error).__name__}: {error}")


def _crew(plan: Plan) -> Crew:
    commands: dict[str, Callable[[Member], Sequence[str]]] = {"census": lambda m: worker_program(m.spec)}
    if plan.ncu is not None:
        for tier in COUNTER_TIERS:
            # A compiled step is filtered by function, which is known only after the census.
            if tier in plan.options.tiers and not (plan.config.compile and tier != "few"):
                commands[tier] = partial(_command, plan.ncu, tier, Selection(None, []), refused=())
    # Compiled kernels are made once, by the census, and found again by the counters' processes.
    cache = {"TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(plan.scratch / "inductor"))}
    return Crew(plan.scratch, commands, ahead=plan.options.ahead, variables=cache)


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
        metrics=[*metrics, *([schema.OPCODES] if tier == "opcodes" else [])],
        sections=SECTIONS if tier == "full" else (),
        functions=selection.functions if selection.rounds is None else (),
        once=tier != "few" and selection.rounds is None and bool(selection.functions),
        source=tier == "opcodes",
    )


class _SessionRecording:
    """One session, from the census to the proof."""

    def __init__(self, plan: Plan, crew: Crew, following: Crew | None):
        self.plan, self.crew, self.following = plan, crew, following
        self.started = time.monotonic()
        self.counting_since = self.started
        self.session: Session | None = None
        self.numbered: list[tuple[Key, int]] = []
        self.called: dict[int, Identity] = {}
        self.kernels = pd.DataFrame()
        self.lock = threading.Lock()  # the session is written by the reader of reports too
        self.reader = ThreadPoolExecutor(max_workers=1)
        self.reading: list[tuple[str, Future[Any]]] = []

    def record(self) -> Recorded:
        plan = self.plan
        error = self._census()
        tiers = [t for t in COUNTER_TIERS if t in plan.options.tiers and plan.ncu is not None]
        self.counting_since = time.monotonic()
        for tier in tiers if error is None else ():
            if tier == tiers[-1] and self.following is not None:
                self.following.assemble()  # loads PyTorch beside this session's last tier
            self._tier(tier)
        for _, future in self.reading:
            future.result()
        self.reader.shutdown()
        if self.session is not None:
            self.session.meta["proof"] = prove_precision(self.session, claims_fp32=plan.config.fp32)
            self.session.save(plan.folder)
        return Recorded(
            config=plan.config.name,
            folder=plan.folder,
            session=self.session,
            error=error,
            seconds=time.monotonic() - self.started,
        )

    def _say(self, text: str) -> None:
        self.plan.say(f"[{time.monotonic() - self.started:6.1f} s] {self.plan.folder.name}: {text}")

    def _census(self) -> str | None:
        outcome = self.crew.run("census", self.plan.census_spec(), CENSUS_LIMIT_S)
        if outcome.result is None:
            lines = [line for line in outcome.log.splitlines() if line.strip()]
            why = lines[-1][:300] if lines else f"status {outcome.status}"
            error = f"census failed{' (ran out of time)' if outcome.stopped else ''}: {why}"
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
        left = self.plan.options.limit_s - (time.monotonic() - self.counting_since)
        if left < 10:
            self._missing(tier, f"the limit of {self.plan.options.limit_s:.0f} s for counters was used up before it")
            return
        selection = self._select(tier)
        deadline = left * SHARE_OF_LIMIT[tier]
        outcome, refused = self._run(tier, selection, deadline)
        if outcome.result is None and not self.crew.members[tier].report.exists():
            why = f"stopped after {outcome.seconds:.0f} s" if outcome.stopped else explain(outcome.log, outcome.status)
            self._missing(tier, why)
            return
        counting = (outcome.result or {}).get("counting_s")
        self._say(f"{tier} {outcome.seconds:.1f} s" + (f", of which counting {counting:.1f} s" if counting else ""))
        # Printing a report takes seconds and no GPU: it goes on beside the next tier's turn.
        report = self.crew.members[tier].report
        self.reading.append((tier, self.reader.submit(self._carry, tier, report, outcome, refused)))

    def _select(self, tier: str) -> Selection:
        if tier == "few":
            return Selection(None, [])
        rows = self.kernels
        shares = FULL_SHARES if tier == "full" else OPCODE_SHARES
        identities = list(zip(rows["name"], rows["grid"].fillna(""), rows["block"].fillna(""), strict=True))
        launches = list(zip(identities, map(float, rows["duration_us"]), strict=True))
        numbers = [number for _, number in self.numbered]
        if [key for key, _ in self.numbered] == keys(rows) and _numbered_share(launches, numbers) >= shares[-1]:
            return Selection(choose_operators(launches, numbers, shares), [])
        chosen = costliest(launches, shares[-1])
        return Selection(None, sorted({function_name(str(what[0])) for what in chosen}))  # type: ignore[index]

    def _run(self, tier: str, selection: Selection, deadline: float) -> tuple[Outcome, list[str]]:
        """One turn; a second one without the metric that this version refused, if it named one."""
        ncu, refused = self.plan.ncu, list[str]()
        assert ncu is not None
        if selection.functions:
            self._place(tier, selection, refused)
        # Compiling anew costs a warm-up step; the optimizer's state appears in the first.
        spec = self.plan.spec(action="count", warmup=2, deadline_s=deadline, rounds=selection.rounds)
        outcome = self.crew.run(tier, spec, deadline + GRACE_S)
        named = unknown_metric(outcome.log) if outcome.result is None else None
        if named is not None and not outcome.stopped:
            refused.append(named)
            self._say(f"{tier}: this version of Nsight Compute refuses {named}; once more without it")
            self._place(tier, selection, refused)
            outcome = self.crew.run(tier, spec, deadline + GRACE_S)
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
                session.save(self.plan.folder)
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
            self.session.save(self.plan.folder)
        self._say(f"{tier}: none: {why}")


def _numbered_share(launches: Sequence[tuple[Any, float]], numbers: Sequence[int]) -> float:
    """Share of the time whose operator is known by number."""
    total = sum(time for _, time in launches)
    return sum(time for (_, time), n in zip(launches, numbers, strict=True) if n >= 0) / total if total else 0.0

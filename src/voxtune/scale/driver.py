"""The driver of a shard: hands out what is missing, records what is written, and reports the rest with its reason."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

from voxtune.errors import FileProblems, InputError
from voxtune.files import AppendLog, reporting_os_errors
from voxtune.reading import file_sha256
from voxtune.scale.engine import Engine
from voxtune.scale.ledger import (
    DatasetLedger,
    WrittenFile,
    failure_line,
    split_volume_name,
    volume_name,
)
from voxtune.scale.manifest import ManifestRow
from voxtune.scale.worker import Task, TaskResult, WorkerSettings

# A task is tried this often, the later times alone on a worker.
ATTEMPTS = 3
# The work ends when this many tasks in a row could not be written: the disk is full.
MAX_UNWRITTEN = 12
SYNC_SECONDS = 2.0
SIGNALS: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)
POLL_SECONDS = 0.5


@dataclass(kw_only=True)
class WrittenVolumes:
    """What the ledger and the disk agree on: the numbers of each subject as bits, and the masks that are stored.

    `sources` are the masks that volumes were drawn from, `damaged` the files of volumes and masks that differ.
    """

    bits: dict[str, int] = field(default_factory=dict)
    stored: set[str] = field(default_factory=set)
    sources: dict[str, WrittenFile] = field(default_factory=dict)
    damaged: dict[str, set[str]] = field(default_factory=dict)

    def add(self, subject: str, number: int) -> None:
        self.bits[subject] = self.bits.get(subject, 0) | 1 << number

    def has(self, subject: str, number: int) -> bool:
        return bool(self.bits.get(subject, 0) >> number & 1)


def written_volumes(
    ledger: DatasetLedger,
    rows: Sequence[ManifestRow],
    images: Sequence[str],
    *,
    read: bool = False,
) -> WrittenVolumes:
    """The complete volumes, by the ledger of all shards. With `read`, the content of every file is compared."""
    expected = {row.subject: row.replicates for row in rows}
    written = WrittenVolumes()
    for line in ledger.lines():
        if not ledger.is_expected(line, expected, images):
            continue
        volume = split_volume_name(line.name)
        damage = ledger.damage(line, read=read)
        if damage is not None:
            written.damaged.setdefault(line.name, set()).update(line.files)
        if volume is None and line.source is not None:
            written.sources[line.name] = line.source
        if damage is None and volume is None:
            written.stored.add(line.name)
        elif damage is None and volume is not None:
            written.add(*volume)
    return written


def check_sources(rows: Sequence[ManifestRow], written: WrittenVolumes) -> None:
    """Raises for masks that changed since volumes were drawn from them."""
    problems = FileProblems()
    for row in rows:
        source = written.sources.get(row.subject)
        if source is None:
            continue
        with reporting_os_errors(row.mask):
            state = row.mask.stat()
        if (state.st_size, state.st_mtime_ns) == (source.size, source.time_ns):
            continue
        if file_sha256(row.mask) != source.sha256:
            problems.add(row.mask, f"is not the mask that volumes of {row.subject} were drawn from; restore it")
    problems.raise_all()


def tasks(
    rows: Sequence[ManifestRow], batch: int, written: WrittenVolumes, shard: tuple[int, int] = (1, 1)
) -> Iterator[Task]:
    """The tasks of a shard with volumes that are missing; shards take turns."""
    for row, batches in _batches(rows, batch, shard):
        source, stored = written.sources.get(row.subject), row.subject in written.stored
        for numbers in batches:
            first = numbers[0]
            missing = tuple(n for n in numbers if not written.has(row.subject, n))
            store = not stored
            if not missing and not (store and first == 1):
                continue
            names = [*([row.subject] if store else []), *(volume_name(row.subject, n) for n in missing)]
            yield Task(
                mask=row.mask,
                named=row.named,
                subject=row.subject,
                first=first,
                numbers=missing,
                images=row.images,
                source_sha256=None if source is None else source.sha256,
                store_mask=store,
                damaged=tuple(sorted(file for name in names for file in written.damaged.get(name, ()))),
            )
            # By this task. Shards that share a mask store the same bytes.
            stored = True


def shard_counts(
    rows: Sequence[ManifestRow], batch: int, written: WrittenVolumes, shard: tuple[int, int]
) -> tuple[int, int]:
    """The number of volumes of a shard, and of those that are complete."""
    volumes = before = 0
    for row, batches in _batches(rows, batch, shard):
        for numbers in batches:
            volumes += len(numbers)
            before += sum(written.has(row.subject, number) for number in numbers)
    return volumes, before


def _batches(
    rows: Sequence[ManifestRow], batch: int, shard: tuple[int, int]
) -> Iterator[tuple[ManifestRow, list[range]]]:
    """The numbers of the volumes of each batch of a shard; shards take turns, in the order of the manifest."""
    place = 0
    for row in rows:
        count = -(-row.replicates // batch)
        mine = range((shard[0] - 1 - place) % shard[1], count, shard[1])
        place += count
        yield row, [range(k * batch + 1, min((k + 1) * batch, row.replicates) + 1) for k in mine]


@dataclass(kw_only=True)
class Tally:
    """What a shard has done so far; its figures are those of this start."""

    volumes: int  # of the shard
    before: int  # complete before this start
    workers: int
    price: float | None = None  # of a worker per hour
    drawn: int = 0
    reduced: int = 0
    problems: dict[Task, str] = field(default_factory=dict)
    retries: int = 0
    busy: float = 0.0
    idle: float = 0.0
    started: float = field(default_factory=time.monotonic)
    ended: float | None = None
    first: tuple[float, int] | None = None  # when the first volumes were written, and how many

    @property
    def done(self) -> int:
        return self.before + self.drawn

    @property
    def seconds(self) -> float:
        return (time.monotonic() if self.ended is None else self.ended) - self.started

    @property
    def per_hour(self) -> float:
        return 3600 * self.drawn / max(self.seconds, 1e-9)

    @property
    def sustained_per_hour(self) -> float | None:
        """Volumes per hour since the first ones were written: without the start of the workers."""
        if self.first is None or self.drawn == self.first[1]:
            return None
        end = time.monotonic() if self.ended is None else self.ended
        return 3600 * (self.drawn - self.first[1]) / max(end - self.first[0], 1e-9)

    @property
    def idle_share(self) -> float | None:
        """The share of time in which a loaded network waited for tasks."""
        return self.idle / (self.busy + self.idle) if self.busy else None

    @property
    def cost_per_1000(self) -> float | None:
        if self.price is None or not self.drawn:
            return None
        return self.price * self.workers * self.seconds / 3600 / self.drawn * 1000

    @property
    def missing(self) -> int:
        return self.volumes - self.done

    def end(self) -> None:
        self.ended = time.monotonic()

    def note(self) -> str:
        """The figures beside the progress bar."""
        failed = sum(len(task.numbers) for task in self.problems)
        parts = [f"{failed} failed"] if failed else []
        parts += [f"{self.per_hour:.0f} volumes/h"] if self.drawn else []
        parts += [] if self.cost_per_1000 is None else [f"{self.cost_per_1000:.2f} per 1000 volumes"]
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        share, cost = self.idle_share, self.cost_per_1000
        return {
            "volumes": self.volumes,
            "finished_before": self.before,
            "drawn": self.drawn,
            "missing": self.missing,
            "reduced_batch": self.reduced,
            "retries": self.retries,
            "seconds": round(self.seconds, 3),
            "volumes_per_hour": round(self.per_hour, 1),
            "sustained_per_hour": None if self.sustained_per_hour is None else round(self.sustained_per_hour, 1),
            "idle_share": None if share is None else round(share, 4),
            "cost_per_1000": None if cost is None else round(cost, 4),
            "failed": [
                {"subject": task.subject, "mask": task.mask.name, "numbers": list(task.numbers), "problem": reason}
                for task, reason in self.problems.items()
            ],
        }


class Stopping:
    """Ctrl-C and SIGTERM: the first finishes what runs, the second ends it. Elsewhere than in a main thread, never."""

    def __init__(self, say: Callable[[str], None]):
        self.say, self.signals = say, list[int]()
        self._before: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return bool(self.signals)

    def _press(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)
        if len(self.signals) > 1:
            self._raise(number, frame)
        with contextlib.suppress(RuntimeError):  # in the middle of another line
            self.say("finishing the volumes that are being drawn; press Ctrl-C again to end at once")

    def _raise(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number)
        if callable(before):
            before(number, frame)
        raise KeyboardInterrupt

    def raise_interrupt(self) -> None:
        """Ends the command as the signal would have ended it."""
        self._raise(self.signals[0], None)

    @contextmanager
    def handling(self) -> Iterator[Stopping]:
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._press)
        try:
            yield self
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)


class ShardDriver:
    """Draws what is missing in a shard with an engine, and appends to the shard's ledger."""

    def __init__(
        self,
        engine: Engine,
        log: AppendLog,
        tally: Tally,
        *,
        report: Callable[[Tally], None] = lambda _tally: None,
        stopping: Stopping | None = None,
    ):
        self.engine, self.log, self.tally, self.report = engine, log, tally, report
        self.stopping = Stopping(lambda _line: None) if stopping is None else stopping
        self._again: deque[Task] = deque()
        self._running = 0
        self._unwritten = 0
        self._last = ""

    def run(self, settings: WorkerSettings, missing: Iterator[Task]) -> None:
        """Until all tasks have a result, or after a signal those that run; raises InputError if nothing can be written."""
        first = next(missing, None)
        if first is None:
            return
        self._again.append(first)
        self.tally.started = time.monotonic()
        try:
            self.engine.start(settings)
            synced = time.monotonic()
            while True:
                self._hand_out(missing)
                if not self._running:
                    break
                for result in self.engine.wait(POLL_SECONDS):
                    self._record(result)
                self.report(self.tally)
                if time.monotonic() - synced > SYNC_SECONDS:
                    self.log.sync()
                    synced = time.monotonic()
                if self._unwritten >= MAX_UNWRITTEN:
                    raise InputError(f"stopped: {MAX_UNWRITTEN} volumes in a row could not be written; {self._last}")
        finally:
            self.engine.close()
            with contextlib.suppress(InputError):
                self.log.sync()

    def _hand_out(self, missing: Iterator[Task]) -> None:
        while not self.stopping and self.engine.room > 0:
            task = self._again.popleft() if self._again else next(missing, None)
            if task is None:
                return
            self.engine.submit(task)
            self._running += 1

    def _record(self, result: TaskResult) -> None:
        self._running -= 1
        task, problem, recorded = result.task, result.problem, set()
        self.tally.busy += result.busy
        self.tally.idle += result.idle
        reason = None if problem is None else problem.reason
        for line in result.lines:
            try:
                self.log.write(line.to_json())
            except InputError as error:  # such as a full disk
                reason, problem = str(error), None
                break
            volume = split_volume_name(line.name)
            if volume is not None:
                recorded.add(volume[1])
                self.tally.drawn += 1
                self.tally.reduced += line.reduced
        if recorded and self.tally.first is None:
            self.tally.first = time.monotonic(), self.tally.drawn
        rest = tuple(number for number in task.numbers if number not in recorded)
        if not rest and problem is None:
            self._unwritten = 0
            return
        reason = reason or "the worker returned no result"
        disk = problem is None or problem.stage == "disk"
        self._unwritten = self._unwritten + 1 if disk and not recorded else 0
        self._last = reason
        again = replace(task, numbers=rest, attempt=task.attempt + 1)
        if (problem is None or problem.retry) and again.attempt <= ATTEMPTS:
            self.tally.retries += 1
            self._again.append(again)
            return
        tries = f" ({task.attempt} attempts)" if task.attempt > 1 else ""
        self.tally.problems[replace(task, numbers=rest)] = reason + tries
        with contextlib.suppress(InputError):
            names = [volume_name(task.subject, number) for number in rest]
            self.log.write(failure_line(names, reason))

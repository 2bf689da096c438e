"""The local engine: worker processes on this machine, one for each GPU, or several on the CPU.

A process that ends is replaced, and its tasks come back as lost. Processes ignore Ctrl-C and SIGTERM, which a terminal and
Slurm send to all processes of a job: the driver decides what is finished. They end when the driver does.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from voxtune.errors import InputError
from voxtune.files import one_line
from voxtune.scale.engine import IN_HAND, Engine, EngineOptions, MakeWorker
from voxtune.scale.worker import Task, TaskProblem, TaskResult, WorkerSettings

log = logging.getLogger("voxtune")

# Worker processes that may end one after the other without any result between them.
MAX_LOSSES = 5
IGNORED = (signal.SIGINT, signal.SIGTERM)
PREPARE = "prepare"


@dataclass(kw_only=True, eq=False)
class WorkerProcess:
    """A worker process, its end of the pipe, and the tasks in its hands."""

    device: str
    process: BaseProcess
    pipe: Connection
    tasks: dict[Task, None] = field(default_factory=dict)
    ready: bool = False
    refused: str = ""  # why it cannot work

    @property
    def room(self) -> int:
        alone = any(task.attempt > 1 for task in self.tasks)
        return 0 if alone else IN_HAND - len(self.tasks)

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.pipe.close()


class LocalEngine(Engine):
    def __init__(self, options: EngineOptions):
        super().__init__(options)
        self._settings: WorkerSettings | None = None
        self._workers: list[WorkerProcess] = []
        # Later attempts, until a worker has nothing else in its hands.
        self._alone: deque[Task] = deque()
        self._losses = 0

    def prepare(self, settings: WorkerSettings) -> dict[str, Any]:
        worker = self._process(settings, self.options.devices[0])
        try:
            worker.pipe.send(PREPARE)
            while True:
                kind, value = worker.pipe.recv()
                if kind == "refused":
                    raise InputError(value)
                if kind == PREPARE:
                    return dict(value)
        except (EOFError, OSError):
            worker.process.join(5)
            raise InputError(f"the worker {_end_of(worker.process)} before it was ready") from None
        finally:
            worker.end()

    def start(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._workers = [self._process(settings, device) for device in self.options.devices]

    def _process(self, settings: WorkerSettings, device: str) -> WorkerProcess:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, self.options.make, settings, device), daemon=True)
        with _without_signals():
            process.start()
        theirs.close()
        return WorkerProcess(device=device, process=process, pipe=ours)

    @property
    def room(self) -> int:
        # One worker empties its hands for the tasks that have to run alone.
        return sum(worker.room for worker in self._workers[1 if self._alone else 0 :])

    def submit(self, task: Task) -> None:
        if task.attempt > 1:
            self._alone.append(task)
            self._hand_out_alone()
            return
        worker = max(self._workers[1 if self._alone else 0 :], key=lambda worker: worker.room)
        self._send(worker, task)

    def _hand_out_alone(self) -> None:
        for worker in self._workers:
            if self._alone and not worker.tasks:
                self._send(worker, self._alone.popleft())

    def _send(self, worker: WorkerProcess, task: Task) -> None:
        worker.tasks[task] = None
        # A process that has ended is noticed by `wait`, which returns its tasks.
        with suppress(OSError):
            worker.pipe.send(task)

    def wait(self, seconds: float) -> list[TaskResult]:
        waited: list[Any] = [worker.pipe for worker in self._workers]
        ready = connection.wait([*waited, *(worker.process.sentinel for worker in self._workers)], seconds)
        results: list[TaskResult] = []
        for place, worker in enumerate(self._workers):
            if worker.pipe not in ready and worker.process.sentinel not in ready:
                continue
            try:
                self._receive(worker, results)
            except (EOFError, OSError):
                self._replace(place, worker, results)
        self._workers = [worker for worker in self._workers if not worker.refused]
        self._hand_out_alone()
        return results

    def _receive(self, worker: WorkerProcess, results: list[TaskResult]) -> None:
        """Adds the results of a worker; raises EOFError if it has ended."""
        while worker.pipe.poll():
            kind, value = worker.pipe.recv()
            if kind == "ready":
                worker.ready = True
            elif kind == "refused":
                worker.refused = value
            else:
                self._losses = 0
                worker.tasks.pop(value.task, None)
                results.append(value)
        if not worker.process.is_alive():
            raise EOFError

    def _replace(self, place: int, worker: WorkerProcess, results: list[TaskResult]) -> None:
        worker.process.join(5)
        end = _end_of(worker.process)
        worker.end()
        problem = TaskProblem(stage="worker", reason=worker.refused or f"the worker {end}")
        results += [TaskResult(task=task, problem=problem) for task in worker.tasks]
        if worker.refused:
            # A GPU that is lost must not end the work of the others.
            if not any(other.ready and not other.refused for other in self._workers if other is not worker):
                raise InputError(worker.refused)
            log.warning("going on without %s: %s", worker.device, worker.refused)
            return
        self._losses += 1
        if self._losses > MAX_LOSSES + self.workers:
            raise InputError(f"workers end before they finish a task: the last one {end}")
        assert self._settings is not None
        self._workers[place] = self._process(self._settings, worker.device)

    def close(self) -> None:
        for worker in self._workers:
            worker.end()
        self._workers = []


def _end_of(process: BaseProcess) -> str:
    code = process.exitcode
    if code is not None and code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"was ended by {name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")
    return f"ended with exit code {code}"


@contextmanager
def _without_signals() -> Iterator[None]:
    """Within the block, new processes are started with Ctrl-C and SIGTERM blocked, also while they import."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(pipe: Connection, make: MakeWorker, settings: WorkerSettings, device: str) -> None:
    """The main function of a worker process: draws the tasks that arrive until the driver ends."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    sending = threading.Lock()

    def send(kind: str, value: Any = None) -> None:
        with sending, suppress(BrokenPipeError):
            pipe.send((kind, value))

    try:
        worker = make(settings, device)
    except InputError as error:
        send("refused", str(error))
        return
    except (MemoryError, RuntimeError) as error:  # such as a GPU without free memory
        send("refused", f"a worker on {device} could not load the model: {one_line(error)}")
        return
    send("ready")
    hands = ThreadPoolExecutor(IN_HAND)

    def draw(task: Task) -> None:
        result = worker.draw(task)
        send("result", result)
        if result.problem is not None and "CUDA error" in result.problem.reason:
            os._exit(1)  # the device is unusable for the rest of this process

    while True:
        try:
            message = pipe.recv()
        except (EOFError, OSError):  # the driver has ended; what is half-written is drawn again
            os._exit(0)
        if message == PREPARE:
            try:
                send(PREPARE, worker.prepare())
            except InputError as error:
                send("refused", str(error))
            return
        hands.submit(draw, message)

"""ProfileWorker processes that are started before their turn.

Importing PyTorch takes a worker longer than many a step. All workers of a session start together, import what they need
without using the GPU, and wait for the file `go`. Only one worker at a time uses the GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Environment variable with the id of the process that started the worker: the worker's parent may be Nsight Compute.
PARENT = "VOXTUNE_PROFILE_PARENT"
# Seconds beyond a worker's own deadline, for the running operator and for writing the report.
GRACE_S = 6.0


def worker_program(spec: Path) -> list[str]:
    return [sys.executable, "-m", "voxtune.profile.worker", str(spec)]


@dataclass
class WorkerOutcome:
    """`result` is the worker's result.json; None if it failed or was `stopped` (by its time limit or by a signal)."""

    status: int
    log: str
    seconds: float
    result: dict[str, Any] | None
    stopped: bool = False


@dataclass
class ProfileWorker:
    """One worker process. Its folder holds spec.json, go, result.json and log."""

    folder: Path
    process: subprocess.Popen[bytes] | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def spec(self) -> Path:
        return self.folder / "spec.json"

    @property
    def report(self) -> Path:
        return self.folder / "report.ncu-rep"

    def start(self, command: Sequence[str], variables: dict[str, str]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "spec.json").write_text("{}")
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", PARENT: str(os.getpid()), **variables}
        package = str(Path(__file__).resolve().parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, environment.get("PYTHONPATH")]))
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, process_group=0
            )

    def go(self, spec: dict[str, Any]) -> None:
        """Starts the worker's turn. Only now is the spec known: it may depend on the results of earlier workers."""
        self.spec.write_text(json.dumps(spec))
        self.started = time.monotonic()
        (self.folder / "go").write_text("go")

    def wait(self, limit_s: float, stop: threading.Event) -> WorkerOutcome:
        assert self.process is not None, "the worker was not started"
        until, stopped = time.monotonic() + limit_s, False
        status = self.process.poll()
        while status is None and not stopped:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self.process.wait(timeout=0.1)
            stopped = status is None and (stop.is_set() or time.monotonic() >= until)
        if status is None:
            status = self.terminate()
        log = (self.folder / "log").read_text(errors="replace")
        path = self.folder / "result.json"
        result = json.loads(path.read_text()) if path.exists() else None
        return WorkerOutcome(status, log, time.monotonic() - self.started, result, stopped)

    def terminate(self) -> int:
        """Ends the worker's process group; with SIGINT first if its turn began, so that a report is still written."""
        if self.process is None:
            return 0
        gentle = ((signal.SIGINT, 10.0), (signal.SIGTERM, 3.0)) if (self.folder / "go").exists() else ()
        for number, patience in (*gentle, (signal.SIGKILL, 10.0)):
            if self.process.poll() is not None:
                break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=patience)
        return self.process.returncode if self.process.returncode is not None else -9


class WorkerPool:
    """The workers of one session by name, in the order of their turns."""

    def __init__(
        self,
        folder: Path,
        commands: dict[str, Callable[[ProfileWorker], Sequence[str]]],
        *,
        ahead: bool,
        stop: threading.Event,
        variables: dict[str, str] | None = None,
    ):
        self.stop = stop
        self.variables = variables or {}
        self.folder = folder
        self.workers = {name: ProfileWorker(folder / name) for name in commands}
        self.commands = commands
        self.ahead = ahead
        self._started: set[str] = set()

    def start_ahead(self, names: Iterable[str]) -> None:
        """Starts the named workers before their turn, if `ahead` is set."""
        for name in names if self.ahead else ():
            if name in self.workers:
                self._start(name)

    def run(self, name: str, spec: dict[str, Any], limit_s: float) -> WorkerOutcome:
        self._start(name)
        worker = self.workers[name]
        worker.go(spec)
        return worker.wait(limit_s, self.stop)

    def replace(self, name: str, command: Callable[[ProfileWorker], Sequence[str]]) -> None:
        """Replaces a worker by a new one with another command."""
        if name in self.workers:
            self.workers[name].terminate()
        turn = sum(1 for _ in self.folder.glob(f"{name}*"))
        self.workers[name] = ProfileWorker(self.folder / (f"{name}-{turn}" if turn else name))
        self.commands[name] = command
        self._started.discard(name)

    def terminate(self) -> None:
        for worker in self.workers.values():
            worker.terminate()

    def _start(self, name: str) -> None:
        if name not in self._started:
            self._started.add(name)
            self.workers[name].start(self.commands[name](self.workers[name]), self.variables)

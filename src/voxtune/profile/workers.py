"""Worker processes that are ready before their turn.

Importing PyTorch costs a worker more than many a step. All workers of a session start together, load what they need
without touching the GPU, and wait for a file that says go; so only one at a time is on the GPU.
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

# Names the process that started the worker, since Nsight Compute stands between the two.
PARENT = "VOXTUNE_PROFILE_PARENT"
# Beyond a worker's own deadline: an operator in flight, and the writing of the report.
GRACE_S = 6.0


def worker_program(spec: Path) -> list[str]:
    return [sys.executable, "-m", "voxtune.profile.worker", str(spec)]


@dataclass
class Outcome:
    """`result` is what the worker wrote; None when it failed or was `stopped`: at its limit, or because we were asked to."""

    status: int
    log: str
    seconds: float
    result: dict[str, Any] | None
    stopped: bool = False


@dataclass
class Member:
    """One worker: its folder holds spec.json, go, result.json and log."""

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
        """The spec counts only now: what it asks for may depend on what the workers before it found."""
        self.spec.write_text(json.dumps(spec))
        self.started = time.monotonic()
        (self.folder / "go").write_text("go")

    def wait(self, limit_s: float, stop: threading.Event) -> Outcome:
        assert self.process is not None, "the worker was not started"
        until, stopped = time.monotonic() + limit_s, False
        status = self.process.poll()
        while status is None and not stopped:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self.process.wait(timeout=0.1)
            stopped = status is None and (stop.is_set() or time.monotonic() >= until)
        if status is None:
            status = self.end()
        log = (self.folder / "log").read_text(errors="replace")
        result = self.folder / "result.json"
        told = json.loads(result.read_text()) if result.exists() else None
        return Outcome(status, log, time.monotonic() - self.started, told, stopped)

    def end(self) -> int:
        """Ends the worker's own process group; gently if it had its turn, so that a report is still written."""
        if self.process is None:
            return 0
        gentle = ((signal.SIGINT, 10.0), (signal.SIGTERM, 3.0)) if (self.folder / "go").exists() else ()
        for sign, patience in (*gentle, (signal.SIGKILL, 10.0)):
            if self.process.poll() is not None:
                break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=patience)
        return self.process.returncode if self.process.returncode is not None else -9


class Crew:
    """The workers of one session by name, in the order of their turns."""

    def __init__(
        self,
        folder: Path,
        commands: dict[str, Callable[[Member], Sequence[str]]],
        *,
        ahead: bool,
        stop: threading.Event,
        variables: dict[str, str] | None = None,
    ):
        self.stop = stop
        self.variables = variables or {}
        self.folder = folder
        self.members = {name: Member(folder / name) for name in commands}
        self.commands = commands
        self.ahead = ahead
        self._started: set[str] = set()

    def assemble(self, names: Iterable[str]) -> None:
        """Starts those of these workers that may start before their turn."""
        for name in names if self.ahead else ():
            if name in self.members:
                self._start(name)

    def run(self, name: str, spec: dict[str, Any], limit_s: float) -> Outcome:
        self._start(name)
        member = self.members[name]
        member.go(spec)
        return member.wait(limit_s, self.stop)

    def replace(self, name: str, command: Callable[[Member], Sequence[str]]) -> None:
        """Another command for a worker that has not had its turn, or that is to have another one."""
        if name in self.members:
            self.members[name].end()
        turn = sum(1 for _ in self.folder.glob(f"{name}*"))
        self.members[name] = Member(self.folder / (f"{name}-{turn}" if turn else name))
        self.commands[name] = command
        self._started.discard(name)

    def dismiss(self) -> None:
        for member in self.members.values():
            member.end()

    def _start(self, name: str) -> None:
        if name not in self._started:
            self._started.add(name)
            self.members[name].start(self.commands[name](self.members[name]), self.variables)

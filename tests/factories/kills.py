"""Commands that die, fail or are interrupted at a chosen step of the writer, and commands that are killed from outside.

A step is one system call by which Voxtune changes a disk (see CALLS): creating a file, writing, flushing, renaming,
removing. A command without a fault lists its steps; then it can be run once for each of them:

    commands = Commands()
    steps = commands.run(["train", ..., "-o", out]).steps
    for at in range(1, len(steps) + 1):
        commands.run(["train", ..., "-o", out], Fault(at))                            # kill -9 before (or within) step `at`
        commands.run(["train", ..., "-o", out], Fault(at, "ENOSPC", lasting=True))    # the disk is full from then on
        commands.run(["train", ..., "-o", out], Fault(at, "SIGINT"))                  # Ctrl-C at that step
    commands.run(["sample", ...], kill_after=0.3)                                     # kill -9 from outside, in seconds
    commands.run(["train", ...], signal_after=(0.3, signal.SIGTERM), fresh=True)      # also during the imports

At a write, half of the bytes are written first. A command runs in a child of a process that has imported torch and Voxtune,
which takes a few milliseconds, or with `fresh` in a Python of its own. Commands run on one thread, so that their outputs are
the same bits in every run.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import faulthandler
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Module, function, and what a step is called. Only calls of Voxtune count, also those through pathlib.
CALLS = (
    ("tempfile", "mkstemp", "create"),
    ("os", "open", "open"),  # only to create a file
    ("os", "write", "append"),
    ("os", "fsync", "flush"),
    ("os", "link", "publish"),
    ("os", "replace", "publish"),
    ("os", "rename", "publish"),
    ("os", "unlink", "remove"),
    ("os", "ftruncate", "truncate"),
    ("os", "mkdir", "mkdir"),
    ("os", "rmdir", "rmdir"),
)
# A full disk does not prevent these.
NEED_NO_SPACE = ("remove", "truncate", "rmdir")
# Imported once. torch._dynamo takes half of the time of a small training otherwise.
MODULES = (
    *("torch._dynamo", "torch.utils.tensorboard.summary", "nibabel", "PIL.Image", "voxtune.analysis.estimate"),
    *("voxtune.cli.main", "voxtune.training.loop", "voxtune.segmentation.train", "voxtune.runtime.generate"),
)


@dataclass(frozen=True)
class Fault:
    """What happens at step `at`, counted from 1: "kill", an error such as "EIO" or "ENOSPC", or a signal such as "SIGINT".

    `lasting`: every later step that writes fails with the same error.
    """

    at: int
    kind: str = "kill"
    lasting: bool = False


@dataclass(frozen=True)
class Done:
    """An ended command. `code` is minus the signal that ended it; `steps` holds the kind and the file name of each step."""

    code: int
    stdout: str
    stderr: str
    steps: tuple[str, ...]

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL


class Commands:
    """Runs `voxtune` commands, one after the other, from a process that is started for the first one."""

    def __init__(self, modules: Iterable[str] = MODULES, environment: Mapping[str, str] | None = None):
        self.modules = list(modules)
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.environment = {**os.environ, **threads, "PYTHONPATH": path, **(environment or {})}
        self._server: subprocess.Popen[str] | None = None

    def run(
        self,
        arguments: Iterable[object],
        fault: Fault | None = None,
        *,
        kill_after: float | None = None,
        signal_after: tuple[float, int] | None = None,
        timeout: float = 300.0,
        fresh: bool = False,
        cwd: Path | None = None,
    ) -> Done:
        """Runs one command. One that takes longer than `timeout` is killed; the TimeoutError says where it was."""
        if kill_after is not None:
            signal_after = (kill_after, signal.SIGKILL)
        with tempfile.TemporaryDirectory() as place:
            files = {name: str(Path(place) / name) for name in ("stdout", "stderr", "steps")}
            for file in files.values():
                Path(file).touch()
            job = {"arguments": [str(a) for a in arguments], "cwd": None if cwd is None else str(cwd), **files}
            job["fault"] = None if fault is None else vars(fault)
            code = self._run_fresh(job, signal_after, timeout) if fresh else self._run_warm(job, signal_after, timeout)
            texts = {name: Path(file).read_text(errors="replace") for name, file in files.items()}
            return Done(code, texts["stdout"], texts["stderr"], tuple(texts["steps"].splitlines()))

    def _run_fresh(self, job: dict[str, Any], signal_after: tuple[float, int] | None, timeout: float) -> int:
        command = [sys.executable, "-m", "tests.factories.kills", json.dumps(job)]
        process = subprocess.Popen(command, env=self.environment, cwd=ROOT)
        _signal_later(process.pid, signal_after, lambda: process.poll() is not None)
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise TimeoutError(f"hangs: {job['arguments']}") from None

    def _run_warm(self, job: dict[str, Any], signal_after: tuple[float, int] | None, timeout: float) -> int:
        server = self._start()
        assert server.stdin and server.stdout
        ended = Path(job["steps"]).with_name("ended")
        server.stdin.write(json.dumps({**job, "ended": str(ended)}) + "\n")
        server.stdin.flush()
        child = int(server.stdout.readline())
        _signal_later(child, signal_after, ended.exists)
        deadline = time.monotonic() + timeout
        while not ended.exists():
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGUSR1)
                time.sleep(1)
                os.kill(child, signal.SIGKILL)
                server.stdout.readline()
                raise TimeoutError(f"hangs: {job['arguments']}\n{Path(job['stderr']).read_text(errors='replace')}")
            time.sleep(0.002)
        return int(server.stdout.readline())

    def _start(self) -> subprocess.Popen[str]:
        if self._server is None:
            command = [sys.executable, "-m", "tests.factories.kills", "--serve", *self.modules]
            self._server = subprocess.Popen(
                command, env=self.environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            atexit.register(self.close)
        return self._server

    def close(self) -> None:
        """Ends the process that the commands run from."""
        if self._server is not None and self._server.stdin:
            self._server.stdin.close()
            self._server.wait(60)
            self._server = None


def _signal_later(pid: int, signal_after: tuple[float, int] | None, ended: Any) -> None:
    if signal_after is None:
        return
    deadline = time.monotonic() + signal_after[0]
    while time.monotonic() < deadline and not ended():
        time.sleep(0.002)
    if not ended():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal_after[1])


class _Steps:
    """Counts the steps of this process and makes the fault happen."""

    def __init__(self, record: str, fault: Fault | None):
        self.fault, self.count = fault, 0
        self._write, self._kill, self._pid = os.write, os.kill, os.getpid()
        self._record = os.open(record, os.O_WRONLY | os.O_APPEND)

    def install(self) -> None:
        for module, name, kind in CALLS:
            owner = sys.modules[module]
            setattr(owner, name, self._wrapped(getattr(owner, name), name, kind))
        for name in ("write_bytes", "write_text"):
            setattr(pathlib.Path, name, self._wrapped_content(getattr(pathlib.Path, name)))

    def _wrapped(self, real: Any, name: str, kind: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not _called_by_voxtune() or _changes_nothing(name, args):
                return real(*args, **kwargs)

            def half() -> None:
                if name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])

            target = _target(args) or str(kwargs.get("dir", ""))
            if self._fails(kind, target, half):
                raise OSError(self._errno(), os.strerror(self._errno()), target or None)
            return real(*args, **kwargs)

        return call

    def _wrapped_content(self, real: Any) -> Any:
        def call(path: Path, data: Any, *args: Any, **kwargs: Any) -> Any:
            if not _called_by_voxtune():
                return real(path, data, *args, **kwargs)
            if self._fails("write", str(path), lambda: real(path, data[: len(data) // 2], *args, **kwargs)):
                raise OSError(self._errno(), os.strerror(self._errno()), str(path))
            return real(path, data, *args, **kwargs)

        return call

    def _errno(self) -> int:
        assert self.fault is not None
        return int(getattr(errno, self.fault.kind))

    def _fails(self, kind: str, target: str, half: Any) -> bool:
        """Counts a step; whether it is to fail with an error. A kill does not return."""
        self.count += 1
        file = "a temporary file" if target.endswith(".part") else Path(target).name
        self._write(self._record, f"{kind} {file}\n".encode(errors="replace"))
        fault = self.fault
        if fault is None or self.count < fault.at or (self.count > fault.at and not fault.lasting):
            return False
        if fault.kind.startswith("E"):
            if kind in NEED_NO_SPACE and fault.kind == "ENOSPC":
                return False
            half()
            return True
        if fault.kind == "kill":
            half()
        self._kill(self._pid, signal.SIGKILL if fault.kind == "kill" else getattr(signal, fault.kind))
        return False


def _changes_nothing(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a call only opens a file that exists, or makes a folder that exists."""
    return (name == "open" and not args[1] & os.O_CREAT) or (name == "mkdir" and Path(args[0]).is_dir())


def _target(args: tuple[Any, ...]) -> str:
    """The file of a call: of a handle its path, of two paths the second."""
    paths = [str(a) for a in args[:2] if isinstance(a, str | os.PathLike)]
    if not paths and args and isinstance(args[0], int):
        with contextlib.suppress(OSError):
            return str(Path(f"/proc/self/fd/{args[0]}").readlink())
    return paths[-1] if paths else ""


def _called_by_voxtune() -> bool:
    """Whether a function of Voxtune made the call, directly or through pathlib."""
    frame: Any = sys._getframe(2)
    for _ in range(4):
        if frame is None:
            return False
        module = frame.f_globals.get("__name__", "")
        if module.startswith("voxtune."):
            return True
        if module != "pathlib":
            return False
        frame = frame.f_back
    return False


def _execute(job: dict[str, Any]) -> int:
    """Runs the command of a job in this process."""
    for handle, name in ((0, os.devnull), (1, job["stdout"]), (2, job["stderr"])):
        os.dup2(os.open(name, os.O_RDWR | os.O_APPEND), handle)
    if job["cwd"] is not None:
        os.chdir(job["cwd"])
    faulthandler.register(signal.SIGUSR1, file=2)
    sys.argv[:] = ["voxtune", *job["arguments"]]
    _Steps(job["steps"], None if job["fault"] is None else Fault(**job["fault"])).install()
    from voxtune.__main__ import run

    try:
        run()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _serve(modules: Iterable[str]) -> None:
    """Forks a child for every job that is read; prints its process number, and its exit code when it has ended."""
    import importlib

    for name in modules:
        importlib.import_module(name)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            os._exit(_child(job))
        _tell(child)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        Path(job["ended"]).touch()
        _tell(code)


def _tell(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def _child(job: dict[str, Any]) -> int:
    try:
        return _execute(job)
    except BaseException:
        import traceback

        traceback.print_exc()
        return 1


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        _serve(sys.argv[2:])
    else:
        sys.exit(_execute(json.loads(sys.argv[1])))

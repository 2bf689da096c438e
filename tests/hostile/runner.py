"""Runs cases in children of a process that has imported Voxtune, each with a limit on its time and its memory.

    runner = Runner()
    tally = runner.run("NIfTI volumes", range(500), folder)

A case passes if its files are read, or refused with a good InputError. Everything else is a failure: another exception, a
poor message, a process that dies, takes too long or too much memory, runs something from the file, or writes or changes a
file outside of its output folder.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
import resource
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60
# Cases that one child reads.
BATCH = 50
MEMORY_MIB = 2048
# Address space beyond that of the parent. What exceeds it fails at once, so that the machine survives.
ADDRESS_SPACE = 6 * 2**30
LONGEST_MESSAGE = 500
# In the temporary folder: the list of many errors, and the empty folder that torch makes when it is imported.
TEMPORARY = ("voxtune-errors-", "torchinductor_")
# The depth of a case's folder: paths such as ../../../x end within the folder of the campaign, where they are seen.
DEPTH = ("a", "b", "c", "d")


@dataclass
class Result:
    """What became of one case. `outcome`: read, refused or failed; of a failure `kind` is its column in the record."""

    outcome: str
    message: str = ""
    kind: str = ""
    seconds: float = 0.0
    mib: float = 0.0
    code: int = 0


@dataclass
class Tally:
    """Counts over cases, and the failures with their numbers."""

    cases: int = 0
    read: int = 0
    refused: int = 0
    tracebacks: int = 0
    messages: int = 0
    hangs: int = 0
    over_memory: int = 0
    crashes: int = 0
    files: int = 0
    replaced: int = 0
    max_mib: int = 0
    max_seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    def add(self, case: str, result: Result) -> None:
        self.cases += 1
        self.max_mib = max(self.max_mib, round(result.mib))
        self.max_seconds = max(self.max_seconds, round(result.seconds, 1))
        column = result.outcome if result.outcome in ("read", "refused") else result.kind
        setattr(self, column, getattr(self, column) + 1)
        if result.outcome == "failed":
            self.failures.append(f"{case}: {result.kind}: {result.message}")

    def record(self, record_property: Any) -> None:
        """Every count as a property of the test that ran the cases."""
        for name, value in asdict(self).items():
            if name != "failures":
                record_property(name, value)


class Runner:
    """Starts its process for the first case."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def run_commands(self, numbers: Iterable[int], folder: Path, *, fresh: bool = False) -> Tally:
        """Runs cases through the command; consecutive numbers are different commands."""
        try:
            return self._run("fresh" if fresh else "command", numbers, folder)
        finally:
            self.close()

    def run(self, kind: str, numbers: Iterable[int], folder: Path, *, keep: bool = False) -> Tally:
        """Runs cases of one kind.

        The process ends with them, because forking takes time that grows with what was read before; `keep` keeps it.
        """
        try:
            return self._run(kind, numbers, folder, every=not keep)
        finally:
            if not keep:
                self.close()

    def _run(self, kind: str, numbers: Iterable[int], folder: Path, *, every: bool = True) -> Tally:
        server, tally = self._start(), Tally()
        assert server.stdin and server.stdout
        for number in numbers:
            server.stdin.write(
                json.dumps({"kind": kind, "number": number, "folder": str(folder), "every": every}) + "\n"
            )
            server.stdin.flush()
            line = server.stdout.readline()
            assert line, f"{kind} {number}: the process that runs the cases has ended"
            tally.add(f"{kind} {number}", Result(**json.loads(line)))
        outside = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() or p.is_symlink())
        if outside:
            tally.files += 1
            tally.failures.append(f"{kind}: files outside of the cases: {outside[:5]}")
        return tally

    def _start(self) -> subprocess.Popen[str]:
        if self._server is None:
            threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
            path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
            # A canonical address of every file in the case: the hash seed decides the order of sets in messages.
            environment = {**os.environ, **threads, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.hostile.runner"],
                env=environment,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            atexit.register(self.close)
        return self._server

    def close(self) -> None:
        if self._server is not None and self._server.stdin:
            self._server.stdin.close()
            assert self._server.stdout
            self._server.wait(60)
            self._server.stdout.close()
            self._server = None


def case_folder(folder: Path, name: str) -> Path:
    """A new folder for one case, with the folders that a reader may use."""
    case = folder.joinpath(*DEPTH, name)
    for part in ("in", "cwd", "tmp", "home", "cache", "out"):
        (case / part).mkdir(parents=True)
    return case


def enter(case: Path) -> None:
    """This process works in the folder of the case: its current folder, temporary files, home and cache."""
    os.chdir(case / "cwd")
    for name, part in (("TMPDIR", "tmp"), ("HOME", "home"), ("VOXTUNE_CACHE", "cache"), ("XDG_CACHE_HOME", "cache")):
        os.environ[name] = str(case / part)
    tempfile.tempdir = None


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def snapshot(folder: Path) -> dict[str, Any]:
    """Every path below `folder` with its type and, for a file, its content."""
    state: dict[str, Any] = {}
    for place, folders, files in os.walk(os.fsencode(folder)):
        for name in [*folders, *files]:
            path = os.path.join(place, name)  # noqa: PTH118  bytes, because names need not be text
            mode = os.lstat(path).st_mode
            content = None
            if stat.S_ISREG(mode):
                handle = os.open(path, os.O_RDONLY)
                content = os.read(handle, 2**30)
                os.close(handle)
            elif stat.S_ISLNK(mode):
                content = os.readlink(path)  # noqa: PTH115
            state[os.fsdecode(path)] = (stat.S_IFMT(mode), content)
    return state


def changed_files(case: Path, before: dict[str, Any]) -> str:
    """What a case changed that it must not: its input, or anything outside of `out`, `tmp` and `cache`."""
    after = snapshot(case / "in")
    wrong = [name for name in before if after.get(name) != before[name]] + [
        name for name in after if name not in before
    ]
    for part in ("cwd", "home", "tmp"):
        wrong += [str(p) for p in (case / part).rglob("*") if not p.name.startswith(TEMPORARY)]
    return ", ".join(ascii(name) for name in wrong[:3])


def _serve() -> None:
    import torch

    torch.set_num_threads(1)
    replies, sys.stdout = sys.stdout, sys.stderr
    readers = _Readers()
    for line in sys.stdin:
        job = json.loads(line)
        if job["kind"] in ("command", "fresh"):
            result = _command(job["number"], Path(job["folder"]), fresh=job["kind"] == "fresh")
        else:
            result = readers.run(job["kind"], job["number"], Path(job["folder"]), every=job["every"])
        replies.write(json.dumps(asdict(result)) + "\n")
        replies.flush()


class _Readers:
    """Children of this process that read cases, one at a time: a new one for each kind, after BATCH cases and after a failure.

    Forking for every case would take most of the time of the campaign.
    """

    def __init__(self) -> None:
        self.warmed: set[str] = set()
        self.child, self.kind, self.left = 0, "", 0
        self.requests, self.replies = -1, -1

    def run(self, kind_name: str, number: int, folder: Path, *, every: bool) -> Result:
        """`every`: each of the kind's files is read undamaged first; otherwise only one."""
        from tests.hostile.kinds import KINDS

        kind = KINDS[kind_name]
        if kind_name not in self.warmed:
            self.warmed.add(kind_name)
            _warm(kind, folder, None if every else 1)
        if kind_name != self.kind or self.left == 0:
            self.end()
            self.start(kind, folder)
        self.left -= 1
        began = time.monotonic()
        os.write(self.requests, f"{number}\n".encode())
        reply = _line(self.replies, SECONDS + 5)
        if reply:
            result = Result(**json.loads(reply))
            if result.outcome == "failed":
                self.end()
            return result
        code = self.end(kill=reply is None)
        seconds = time.monotonic() - began
        _remove(folder / DEPTH[0])
        if reply is None or code == -signal.SIGALRM:
            return Result("failed", f"more than {SECONDS} s", "hangs", seconds)
        return Result("failed", f"the process ended with {code}", "crashes", seconds)

    def start(self, kind: Any, folder: Path) -> None:
        ours, theirs = os.pipe(), os.pipe()
        self.kind, self.left = kind.name, BATCH
        self.child = os.fork()
        if self.child == 0:
            os.close(ours[1])
            os.close(theirs[0])
            os._exit(_read_cases(kind, folder, ours[0], theirs[1]))
        os.close(ours[0])
        os.close(theirs[1])
        self.requests, self.replies = ours[1], theirs[0]

    def end(self, *, kill: bool = False) -> int:
        """Ends the child, which reads no more cases, and returns its exit code."""
        if not self.child:
            return 0
        if kill:
            os.kill(self.child, signal.SIGKILL)
        os.close(self.requests)
        os.close(self.replies)
        code = os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])
        self.child, self.kind = 0, ""
        return code


def _line(handle: int, seconds: float) -> bytes | None:
    """One line; empty at the end, None after `seconds`."""
    text = b""
    while not text.endswith(b"\n"):
        if not select.select([handle], [], [], seconds)[0]:
            return None
        part = os.read(handle, 2**16)
        if not part:
            return b""
        text += part
    return text


def _read_cases(kind: Any, folder: Path, requests: int, replies: int) -> int:
    """Body of a child: reads the cases whose numbers it receives, and sends the result of each."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    limit_memory()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    while number := _line(requests, 3600):
        result = _case(kind, int(number), folder)
        os.write(replies, json.dumps(asdict(result)).encode(errors="replace") + b"\n")
    return 0


def _case(kind: Any, number: int, folder: Path) -> Result:
    from tests.hostile.kinds import make_case

    case = case_folder(folder, "case")
    damaged = make_case(kind, number, case / "in")
    before = snapshot(case / "in")
    enter(case)
    forget_peak()
    began = time.monotonic()
    signal.alarm(SECONDS)
    result = _read(kind, case, damaged)
    signal.alarm(0)
    result = replace(result, seconds=time.monotonic() - began, mib=peak_mib())
    if result.mib > MEMORY_MIB:
        result = replace(
            result, outcome="failed", message=f"{result.mib:.0f} MiB; {result.message}", kind="over_memory"
        )
    result = _checked(result, case, before)
    os.chdir("/")
    _remove(folder / DEPTH[0])
    return result


def forget_peak() -> None:
    """The peak of this process's resident memory is counted from here on, where Linux allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def _command(number: int, folder: Path, *, fresh: bool) -> Result:
    from tests.hostile import commands
    from tests.hostile.kinds import KINDS, make_case

    command = commands.COMMANDS[number % len(commands.COMMANDS)]
    rng = random.Random(f"command/{number}")
    auxiliary = snapshot(commands.auxiliary())
    case = case_folder(folder, "case")
    try:
        # Not a case of the other tests.
        damaged = make_case(KINDS[command.kind], 1_000_000 + number, case / "in")
        arguments = commands.prepare(command, case, damaged, rng)
        before, mine = snapshot(case / "in"), commands.strangers(case)
        streams = [(case / name).open("wb+") for name in ("stdout", "stderr")]

        def body() -> int:
            limit_memory()
            enter(case)
            return commands.run(arguments, *(stream.fileno() for stream in streams), fresh=fresh)

        result = _in_child(body, commands.SECONDS)
        texts = []
        for stream in streams:
            stream.seek(0)
            texts.append(stream.read(2**24).decode(errors="backslashreplace"))
            stream.close()
        if result.kind not in ("hangs", "over_memory"):
            message, column = commands.judge(command, result.code, *texts)
            outcome = "failed" if column else "read" if result.code in (0, 1, 3) else "refused"
            result = replace(result, outcome=outcome, message=message, kind=column)
        missing = [str(path) for path in mine if path not in commands.strangers(case)]
        if missing or snapshot(commands.auxiliary()) != auxiliary:
            result = replace(result, outcome="failed", message=f"replaced {missing}", kind="replaced")
        result = _checked(result, case, before)
        return replace(result, message=f"{result.message} <{' '.join(command.arguments[:2])}>")
    finally:
        _remove(folder / DEPTH[0])


def _checked(result: Result, case: Path, before: dict[str, Any]) -> Result:
    """The result, unless the case changed a file that it must not."""
    changed = changed_files(case, before)
    if changed and result.outcome != "failed":
        return replace(result, outcome="failed", message=f"changed {changed}", kind="files")
    return result


def _remove(folder: Path) -> None:
    shutil.rmtree(os.fsencode(folder))


def _warm(kind: Any, folder: Path, files: int | None) -> None:
    """Reads the undamaged files once, in this process: the children need not import the libraries."""
    for name in list(kind.damages)[:files]:
        case = case_folder(folder, "case")
        with contextlib.chdir(case / "cwd"):
            kind.write(case / "in")
            kind.read(case / "in", case / "in" / name)
        _remove(folder / DEPTH[0])


def _in_child(body: Callable[[], int], limit: int) -> Result:
    """Runs `body` in a child and waits for it."""
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        os._exit(body())
    # The child has an alarm of its own; `wait4` knows its peak of memory.
    _, status, usage = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    seconds, mib = time.monotonic() - began, usage.ru_maxrss / 1024
    if code == -signal.SIGALRM:
        return Result("failed", f"more than {limit} s", "hangs", seconds, mib, code)
    if mib > MEMORY_MIB:
        return Result("failed", f"{mib:.0f} MiB", "over_memory", seconds, mib, code)
    return Result("read", seconds=seconds, mib=mib, code=code)


def _read(kind: Any, case: Path, damaged: Path) -> Result:
    from voxtune.errors import InputError

    try:
        kind.read(case / "in", damaged)
    except InputError as error:
        if "not enough memory" in str(error):
            return Result("failed", str(error), "over_memory")
        problem = poor_message(error, case, damaged)
        return Result("failed", problem, "messages") if problem else Result("refused")
    except BaseException as error:
        import traceback

        frames = traceback.extract_tb(error.__traceback__)
        places = [f"{Path(f.filename).name}:{f.lineno}" for f in frames if "voxtune" in f.filename][-4:]
        text = f"{type(error).__name__}: {str(error)[:200]!r} at {' '.join(places)}"
        return Result("failed", text, "tracebacks")
    return Result("read")


def poor_message(error: Exception, case: Path, damaged: Path) -> str:
    """Why the message of an error is not one short printable line that names the file; nothing if it is.

    The command prints a message through `printable`, which cuts and escapes it. Here it is taken as a program receives it.
    """
    from voxtune.errors import printable

    text = str(error)
    named = text.replace(str(case), "")
    if len(named) > LONGEST_MESSAGE:
        return f"{len(named)} characters: {text[:200]!r}"
    if not named.isprintable():
        return f"not printable: {text[:300]!r}"
    names = [damaged.name, damaged.parent.name, str(case / "in"), "--labels", "--set"]
    if not any(printable(name)[:160] in text for name in names):
        return f"does not name the file: {text[:300]!r}"
    return ""


if __name__ == "__main__":
    _serve()

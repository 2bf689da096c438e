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
# The bar is 60 s and 2 GiB; a reader that takes a third of the time is looked at.
SECONDS = 20
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
            return self._run(kind, numbers, folder)
        finally:
            if not keep:
                self.close()

    def _run(self, kind: str, numbers: Iterable[int], folder: Path) -> Tally:
        server, tally = self._start(), Tally()
        assert server.stdin and server.stdout
        for number in numbers:
            server.stdin.write(json.dumps({"kind": kind, "number": number, "folder": str(folder)}) + "\n")
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
    warmed: set[str] = set()
    for line in sys.stdin:
        job = json.loads(line)
        if job["kind"] in ("command", "fresh"):
            result = _command(job["number"], Path(job["folder"]), fresh=job["kind"] == "fresh")
        else:
            result = _case(job["kind"], job["number"], Path(job["folder"]), warmed)
        replies.write(json.dumps(asdict(result)) + "\n")
        replies.flush()


def _case(kind_name: str, number: int, folder: Path, warmed: set[str]) -> Result:
    from tests.hostile.kinds import KINDS, make_case

    kind = KINDS[kind_name]
    assert callable(kind.read)
    if kind_name not in warmed:
        warmed.add(kind_name)
        _warm(kind, folder)
    case = case_folder(folder, "case")
    try:
        damaged = make_case(kind, number, case / "in")
        before = snapshot(case / "in")
        result = _in_child(lambda reply: _read(kind, case, damaged, reply), SECONDS)
        return _checked(result, case, before)
    finally:
        _remove(folder / DEPTH[0])


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

        def body(_reply: int) -> int:
            limit_memory()
            enter(case)
            return commands.run(arguments, *(stream.fileno() for stream in streams), fresh=fresh)

        result = _in_child(body, commands.SECONDS, codes=command.codes)
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


def _warm(kind: Any, folder: Path) -> None:
    """Reads the undamaged files once, in this process: the children need not import the libraries."""
    for name in kind.damages:
        case = case_folder(folder, "case")
        with contextlib.chdir(case / "cwd"):
            kind.write(case / "in")
            kind.read(case / "in", case / "in" / name)
        _remove(folder / DEPTH[0])


def _in_child(body: Callable[[int], int], limit: int, codes: tuple[int, ...] = (0,)) -> Result:
    """Runs `body` in a child and waits for it; the child may send a result."""
    began = time.monotonic()
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        os._exit(body(theirs))
    os.close(theirs)
    reply = _reply(ours, limit + 5)
    if reply is None:
        os.kill(child, signal.SIGKILL)
    os.close(ours)
    _, status, usage = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    seconds, mib = time.monotonic() - began, usage.ru_maxrss / 1024
    if reply is None or code == -signal.SIGALRM:
        return Result("failed", f"more than {limit} s", "hangs", seconds, mib, code)
    if mib > MEMORY_MIB:
        return Result("failed", f"{mib:.0f} MiB", "over_memory", seconds, mib, code)
    if code not in codes:
        return Result("failed", f"the process ended with {code}", "crashes", seconds, mib, code)
    return Result(**(json.loads(reply) if reply else {"outcome": "read"}), seconds=seconds, mib=mib, code=code)


def _reply(handle: int, seconds: float) -> bytes | None:
    """All bytes that the child sends; None if it is silent for too long."""
    parts = []
    while select.select([handle], [], [], seconds)[0]:
        part = os.read(handle, 2**16)
        if not part:
            return b"".join(parts)
        parts.append(part)
    return None


def _read(kind: Any, case: Path, damaged: Path, reply: int) -> int:
    """Body of a child: reads the files, and sends the outcome."""
    from voxtune.errors import InputError

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(SECONDS)
    limit_memory()
    enter(case)
    sys.stdin = open(os.devnull)  # noqa: PTH123, SIM115
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    result = {"outcome": "read", "message": "", "kind": ""}
    try:
        kind.read(case / "in", damaged)
    except InputError as error:
        problem = poor_message(error, case, damaged)
        result = {"outcome": "failed" if problem else "refused", "message": problem, "kind": "messages"}
        if "not enough memory" in str(error):
            result = {"outcome": "failed", "message": str(error)[:300], "kind": "over_memory"}
    except BaseException as error:
        import traceback

        frames = traceback.extract_tb(error.__traceback__)
        places = [f"{Path(f.filename).name}:{f.lineno}" for f in frames if "voxtune" in f.filename][-4:]
        text = f"{type(error).__name__}: {str(error)[:200]!r} at {' '.join(places)}"
        result = {"outcome": "failed", "message": text, "kind": "tracebacks"}
    os.write(reply, json.dumps(result).encode(errors="replace"))
    return 0


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

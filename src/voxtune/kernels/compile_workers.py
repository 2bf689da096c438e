"""Worker processes that compile kernels into Triton's cache on disk, from which the main process loads them.

Why: threads of one process share Python's lock, and a compilation holds it for about a quarter of its time: many threads are
no faster than a few. What a worker cannot compile, the main process compiles itself.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, BinaryIO

from voxtune.files import one_line

log = logging.getLogger("voxtune")
# Each uses about 300 MB of host memory.
MAX_WORKERS = 8
DONE = b"done\n"


class Worker:
    """One worker process, used by one thread at a time."""

    def __init__(self) -> None:
        # The worker can import whatever this process can.
        paths = os.pathsep.join(p for p in sys.path if p)
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )

    def compile(self, call: Callable[[], Any]) -> bool:
        """Compiles what `call` would compile into the cache; False if that failed."""
        job = describe(call)
        if job is None or self.process.poll() is not None:
            return False
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(len(job).to_bytes(8, "little") + job)
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except OSError:
            return False
        if answer != DONE:
            log.info("a worker could not compile: %s", answer.decode(errors="replace").strip() or "it ended")
        return answer == DONE

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


_active: ContextVar[tuple[Worker, ...]] = ContextVar("voxtune_workers", default=())


def active() -> tuple[Worker, ...]:
    return _active.get()


@contextmanager
def compiling(count: int | None = None) -> Iterator[None]:
    """Starts workers that `compiled_ahead` uses inside the block; does not wait until they are up."""
    workers = tuple(Worker() for _ in range(min(MAX_WORKERS, (os.cpu_count() or 1) - 1) if count is None else count))
    token = _active.set(workers)
    try:
        yield
    finally:
        _active.reset(token)
        for worker in workers:
            worker.stop()


def describe(call: Callable[[], Any]) -> bytes | None:
    """Triton's compile request, serialised for another process; None if it cannot be."""
    try:
        request = inspect.getclosurevars(call).nonlocals
        source, target, options = request["src"], request["target"], request["options"]
        kernel = source.fn.fn
        job = (
            (type(source).__module__, type(source).__name__),
            # A generated kernel's module makes it again from this name.
            (kernel.__module__, getattr(kernel, "lookup_name", kernel.__name__)),
            (source.signature, source.constants, source.attrs),
            (target.backend, target.arch, target.warp_size),
            dict(vars(options)),
        )
        return pickle.dumps(job)
    except (TypeError, KeyError, AttributeError, pickle.PicklingError):
        return None


def perform(job: bytes) -> None:
    """Compiles a job of `describe` into the cache."""
    import triton
    from triton.backends.compiler import GPUTarget

    form, kernel, (signature, constants, attributes), target, options = pickle.loads(job)
    source_type, function = (getattr(importlib.import_module(module), name) for module, name in (form, kernel))
    source = source_type(function, signature, constants, attributes)
    triton.compile(source, target=GPUTarget(*target), options=options)


def serve(jobs: BinaryIO, answers: BinaryIO) -> None:
    while size := jobs.read(8):
        try:
            perform(jobs.read(int.from_bytes(size, "little")))
            answer = DONE
        # The compiler raises many kinds of errors; the main process logs it and compiles the kernel itself.
        except Exception as error:
            answer = f"{type(error).__name__}: {one_line(error)}\n".encode()
        answers.write(answer)
        answers.flush()


if __name__ == "__main__":
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # anything printed must not reach the reply pipe
    importlib.import_module("voxtune.kernels.ops")  # before the first job arrives
    serve(sys.stdin.buffer, replies)

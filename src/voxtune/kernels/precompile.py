"""Compiles kernels in parallel before they are needed.

Why: a network's first step launches some forty kernels, and each is compiled at its first launch, one after the other: most of
a minute on one core while the others idle. Here a rehearsal of the network requests all of them; threads, or worker processes
if there are any, compile, and no kernel runs.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from voxtune.kernels.compile_workers import Worker, active

log = logging.getLogger("voxtune")
# Seconds before a thread must release the interpreter, for which launches in the body wait; Python's default is ten times this.
SWITCH_INTERVAL = 0.0005
_threads = threading.local()
_rehearsing: ContextVar[bool] = ContextVar("voxtune_rehearsing", default=False)


class _Ready:
    """Launches a kernel; compiles it instead in a rehearsal, and does nothing with fake tensors, which have no memory.

    A fake tensor's address is 0: its kernel would write there, which ends every later use of the GPU by this process.
    """

    def __init__(self, kernel: Any):
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            if any(map(_is_fake, args)) or any(map(_is_fake, kwargs.values())):
                return None
            if _rehearsing.get():
                return self.kernel.run(*args, grid=grid, warmup=True, **kwargs)
            _give_context()
            return self.kernel[grid](*args, **kwargs)

        return launch


def _give_context() -> None:
    """Makes the GPU's context this thread's own: PyTorch's threads for gradients have none before their first allocation.

    Triton encodes a descriptor of a tensor with a function of the driver, which fails without.
    """
    if not getattr(_threads, "has_context", False) and torch.cuda.is_initialized():
        torch.cuda.mem_get_info()
        _threads.has_context = True


def _is_fake(argument: Any) -> bool:
    """Of a tensor, or of a descriptor of one."""
    return isinstance(argument if isinstance(argument, Tensor) else getattr(argument, "base", None), FakeTensor)


def ready(kernel: Any) -> Any:
    """The kernel, to be launched as usual: `ready(kernel)[grid](...)`, the one way in which this project launches kernels."""
    return _Ready(kernel)


class _DeferredExecutor(Executor):
    """Starts its jobs on `release`: threads that compile during the rehearsal would compete with it for the interpreter."""

    def __init__(self, pool: Executor):
        self.pool = pool
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        assert not args, "Triton's compile requests have no arguments"
        assert not kwargs, "Triton's compile requests have no arguments"
        future: Future[Any] = Future()
        self.waiting.append((future, fn))
        return future

    def release(self) -> None:
        if workers := active():
            jobs = deque(sorted(self.waiting, key=lambda job: -_length(job[1])))
            for worker in workers:
                self.pool.submit(_by_worker, worker, jobs)
        else:
            for future, call in self.waiting:
                self.pool.submit(_fulfil, future, call)
        self.waiting = []


def _length(call: Callable[[], Any]) -> int:
    """Length of the kernel's source: long ones take longest to compile and are started first."""
    try:
        return len(inspect.getclosurevars(call).nonlocals["src"].fn.src)
    except (TypeError, KeyError, AttributeError):
        return 0


def _by_worker(worker: Worker, jobs: deque[tuple[Future[Any], Callable[[], Any]]]) -> None:
    while jobs:
        try:
            future, call = jobs.popleft()
        except IndexError:  # another thread was faster
            return
        worker.compile(call)
        _fulfil(future, call)  # from the cache; compiled here if the worker could not


def _fulfil(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


@contextmanager
def compiled_ahead(rehearse: Callable[[], object]) -> Iterator[None]:
    """Calls `rehearse` without launching the project's kernels; they compile while the body runs and are ready at its end.

    The results of a rehearsal are invalid. A kernel that fails to compile here is compiled again at its launch, which raises.
    """
    try:
        from triton.runtime._async_compile import AsyncCompileMode, active_mode
    except ImportError:
        log.info("this version of Triton compiles kernels one by one")
        yield
        return
    started, interval = time.perf_counter(), sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            deferred = _DeferredExecutor(pool)
            mode = AsyncCompileMode(deferred)
            mode.__enter__()
            token = _rehearsing.set(True)
            try:
                rehearse()
            except Exception as error:
                log.info("the rehearsal stopped: %s: %s", type(error).__name__, error)
            finally:
                _rehearsing.reset(token)
                active_mode.set(None)  # the mode must not apply to launches in the body
            rehearsed, kernels = time.perf_counter(), list(mode.future_kernels.values())
            deferred.release()
            try:
                yield
            finally:
                done = time.perf_counter()
                _finish(mode, kernels, pool)
        times = (rehearsed - started, done - rehearsed, time.perf_counter() - done)
        log.info(
            "%d kernels compiled ahead: rehearsal %.2f s, other work %.2f s, then waited %.2f s", len(kernels), *times
        )
    finally:
        sys.setswitchinterval(interval)


class _Built(Exception):  # noqa: N818 - a signal, no failure
    """A launcher has been built on disk."""


def _build_launchers(kernels: list[Any], pool: ThreadPoolExecutor) -> None:
    """Older Triton versions compile a C module for each kernel's launcher: threads build them without loading them.

    All these modules have the same name, and Python confuses them when several threads load them at once (observed: a kernel
    launched by the launcher of another one, in about one of a hundred starts).
    """
    from triton.runtime import build

    load, here = build._load_module_from_path, threading.local()

    def built_or_loaded(name: str, path: str, *more: Any) -> Any:
        if getattr(here, "building", False):
            raise _Built(path)
        return load(name, path, *more)

    def make(kernel: Any) -> None:
        here.building = True
        try:
            kernel.run  # noqa: B018 - reading it builds it
        except _Built:
            pass
        finally:
            here.building = False

    build._load_module_from_path = built_or_loaded
    try:
        list(pool.map(make, kernels))
    finally:
        build._load_module_from_path = load


def _finish(mode: Any, kernels: list[Any], pool: ThreadPoolExecutor) -> None:
    try:
        mode.__exit__(None, None, None)
        compiled = [k.kernel for k in kernels if k.kernel is not None]
        _build_launchers(compiled, pool)
        for kernel in compiled:
            kernel.run  # noqa: B018 - loads it
    except Exception as error:
        log.info("a kernel was not compiled ahead: %s: %s", type(error).__name__, error)

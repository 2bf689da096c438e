"""Work on many subjects by processes side by side, which may die or hang without taking the caller along."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from typing import TypeVar

T = TypeVar("T")
# Far longer than a process needs to start and to draw a subject: whoever takes more will not come back.
PATIENCE_S = 300.0


def side_by_side(
    work: Callable[[int], T], count: int, processes: int, *, patience_s: float = PATIENCE_S
) -> Iterator[T]:
    """work(0), work(1), ... work(count - 1), in order. `work` goes to the processes anew with every number: keep it small.

    Raises TimeoutError where a result does not come, BrokenProcessPool where a process dies (out of memory, mostly).
    """
    others = set(active_children())
    # Fresh processes: a forked one would inherit locks of threads that it does not have.
    pool = ProcessPoolExecutor(min(processes, count), mp_context=get_context("spawn"))
    with _one_thread_each(), pool:
        try:
            futures = [pool.submit(work, number) for number in range(count)]
            for future in futures:
                yield future.result(timeout=patience_s)
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            if isinstance(error, TimeoutError):
                # Leaving the block waits for the processes, and these do not end of themselves.
                for process in set(active_children()) - others:
                    process.kill()
            raise


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Processes started meanwhile compute with one thread each: many of them with many threads would crawl."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

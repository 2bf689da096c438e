"""Batches of a run on their way to the device, and how long the device waited for them.

On a GPU a thread copies the next batches in a stream of its own while the GPU computes. An event after each copy orders it
before the step that reads it, and `record_stream` keeps the memory until that step has ended. On a CPU nothing is copied.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from queue import Full, Queue
from typing import Any

import torch
from torch import Tensor

from voxtune.training.data import Batch, Loader

# Batches on the GPU beside the one in use: with one, a copy could start only after the step before has read its batch.
DEPTH = 2
POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class _Copied:
    """A batch on the GPU, once `done` has happened there; or the error of loading it."""

    batch: Batch | None = None
    done: Any = None
    error: Exception | None = None


class Prefetch:
    """The batches of a loader on `device`, in order. `close` ends the loader too."""

    def __init__(self, loader: Loader, device: torch.device, *, threaded: bool):
        self.device, self.loader = device, loader
        self._batches = iter(loader)
        self._idle = _IdleTime(device)
        self._closed = threading.Event()
        self._ahead: Queue[_Copied] = Queue(DEPTH)
        self._thread: threading.Thread | None = None
        if threaded and device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._stream = torch.cuda.Stream(index)
            self._thread = threading.Thread(target=self._copy_all, args=(index,), name="voxtune-prefetch", daemon=True)
            self._thread.start()

    def take(self, count: int) -> list[Batch]:
        """The next `count` batches; the time until the device can read them counts as idle."""
        self._idle.begin()
        try:
            return [self._next() for _ in range(count)]
        finally:
            self._idle.end()

    def idle_seconds(self, *, wait: bool = False) -> float:
        """The time in which the device had nothing to do but wait for batches, as far as it is known.

        With `wait`, up to the last `take`: waits for the GPU.
        """
        return self._idle.seconds(wait=wait)

    def close(self) -> None:
        self._closed.set()
        self.loader.close()
        if self._thread is not None:
            self._thread.join()

    def _next(self) -> Batch:
        if self._thread is None:
            return next(self._batches)
        copied = self._ahead.get()
        if copied.error is not None:
            raise copied.error
        assert copied.batch is not None
        current = torch.cuda.current_stream(self.device)
        current.wait_event(copied.done)
        for tensor in (copied.batch.images, copied.batch.masks):
            if tensor is not None:
                tensor.record_stream(current)
        return copied.batch

    def _copy_all(self, index: int) -> None:
        """The thread: copies batches until the run closes, or until one cannot be loaded."""
        torch.cuda.set_device(index)
        while not self._closed.is_set():
            try:
                copied = self._copied(next(self._batches))
            except Exception as error:
                copied = _Copied(error=error)
            while not self._closed.is_set():
                try:
                    self._ahead.put(copied, timeout=POLL_S)
                    break
                except Full:
                    continue
            if copied.error is not None:
                return

    def _copied(self, batch: Batch) -> _Copied:
        with torch.cuda.stream(self._stream):
            images = batch.images.to(self.device, non_blocking=True)
            masks: Tensor | None = None if batch.masks is None else batch.masks.to(self.device, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        return _Copied(batch=replace(batch, images=images, masks=masks), done=done)


class _IdleTime:
    """The sum of the intervals from `begin` to `end` in which the device had no other work.

    On a GPU both ends are events in the stream of the steps: what is still queued before `begin` delays that event, so the time
    between the two is that of an idle GPU alone.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._total = 0.0
        self._started = 0.0
        self._pairs: deque[tuple[Any, Any]] = deque()

    def begin(self) -> None:
        if self.device.type == "cuda":
            self._pairs.append((self._event(), torch.cuda.Event(enable_timing=True)))
        else:
            self._started = time.perf_counter()

    def end(self) -> None:
        if self.device.type == "cuda":
            self._pairs[-1][1].record(torch.cuda.current_stream(self.device))
        else:
            self._total += time.perf_counter() - self._started

    def seconds(self, *, wait: bool) -> float:
        if wait and self._pairs:
            self._pairs[-1][1].synchronize()
        while self._pairs and self._pairs[0][1].query():
            begin, end = self._pairs.popleft()
            self._total += begin.elapsed_time(end) / 1e3
        return self._total

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

"""Workers and engines for tests of data sets: without a network, short of memory, in this process."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from typing import Any

import numpy as np
import torch

from voxtune.data.derivative import dataset_mask
from voxtune.files import write_file
from voxtune.scale.engine import IN_HAND, Engine, EngineOptions
from voxtune.scale.ledger import LedgerLine, WrittenFile, files_of_volume, volume_name
from voxtune.scale.worker import Task, TaskResult, VolumeWorker, WorkerSettings


class NoNetworkWorker(VolumeWorker):
    """Reads masks and writes volumes like any worker; their voxels depend on the index of the noise alone."""

    def prepare(self) -> dict[str, Any]:
        self._choose_batch = lambda: self.settings.batch or 1
        return super().prepare()

    def evaluate(self, job, cond, indices, batch):
        values = [np.float32(index % 1000 / 500 - 1) for index in indices]
        return np.stack([np.full((1, *cond.shape[2:]), value, np.float32) for value in values])


class BareWorker(NoNetworkWorker):
    """Reads no mask, and writes a few bytes in place of a volume: what is left is the work of the engine and the ledger."""

    def draw(self, task):
        out, lines = self.settings.out, []
        for number in task.numbers:
            names = files_of_volume(task.subject, number, ("T1w",))
            for name in names:
                write_file(out / name, f"{name}\n", state=True)
            files = {name: WrittenFile.of(out / name) for name in names}
            lines.append(LedgerLine(name=volume_name(task.subject, number), files=files))
        if task.store_mask:
            name = dataset_mask(task.named)
            write_file(out / name, f"{name}\n", state=True)
            source = WrittenFile.of(task.mask)
            lines.append(LedgerLine(name=task.subject, files={name: WrittenFile.of(out / name)}, source=source))
        return TaskResult(task=task, lines=tuple(lines))


class SlowWorker(NoNetworkWorker):
    """Takes a while, so that there is time to end it."""

    def evaluate(self, job, cond, indices, batch):
        time.sleep(0.1)
        return super().evaluate(job, cond, indices, batch)


class ShortOfMemoryWorker(VolumeWorker):
    """Has memory for one volume only, except in the measurements of the first start."""

    def evaluate(self, job, cond, indices, batch):
        if batch > 1:
            raise torch.OutOfMemoryError("tried to allocate 1 TiB")
        return super().evaluate(job, cond, indices, batch)


class InvalidWorker(NoNetworkWorker):
    """Draws NaN for the second volume of each batch."""

    def evaluate(self, job, cond, indices, batch):
        samples = super().evaluate(job, cond, indices, batch)
        samples[1] = np.nan
        return samples


class DeadlyWorker(NoNetworkWorker):
    """Ends its process when it draws the subject sub-1."""

    def _job(self, task):
        if task.subject == "sub-1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._job(task)


class InlineEngine(Engine):
    """Draws in this process, one task after the other; `backwards` the last one that was handed out first."""

    def __init__(self, make=NoNetworkWorker, *, backwards: bool = False, drawn: int | None = None):
        super().__init__(EngineOptions(devices=("cpu",), make=make))
        self.backwards, self.limit = backwards, drawn
        self.tasks: deque[Task] = deque()
        self.drawn: list[Task] = []
        self.worker: VolumeWorker | None = None

    def prepare(self, settings: WorkerSettings) -> dict[str, Any]:
        return self.options.make(settings, "cpu").prepare()

    def start(self, settings: WorkerSettings) -> None:
        self.worker = self.options.make(settings, "cpu")

    @property
    def room(self) -> int:
        return 10 * IN_HAND - len(self.tasks)

    def submit(self, task: Task) -> None:
        self.tasks.append(task)

    def wait(self, seconds: float) -> list[TaskResult]:
        if len(self.drawn) == self.limit:
            raise KeyboardInterrupt
        task = self.tasks.pop() if self.backwards else self.tasks.popleft()
        self.drawn.append(task)
        assert self.worker is not None
        return [self.worker.draw(task)]

    def close(self) -> None:
        self.worker = None

"""What an engine is: it runs `VolumeWorker.draw` on workers. The driver hands out tasks and records results.

An engine is one module with a class that the registry `ENGINES` names. It starts workers, loads the model once in each, and
returns a result for every task, also if the worker that had it was lost.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from voxtune.errors import InputError
from voxtune.scale.worker import Task, TaskResult, VolumeWorker, WorkerSettings

# (settings, device) -> worker; tests have workers without a network.
MakeWorker = Callable[[WorkerSettings, str], VolumeWorker]
# Tasks in the hands of a worker: one in the network, the others are read, compressed and written meanwhile.
IN_HAND = 6
# Name -> module and class.
ENGINES = {
    "local": ("voxtune.scale.local", "LocalEngine"),
    "ray": ("voxtune.scale.ray_engine", "RayEngine"),
}


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Where workers run: one for each device, such as ("cuda:0", "cuda:1") or ("cpu", "cpu")."""

    devices: tuple[str, ...]
    make: MakeWorker = VolumeWorker
    address: str | None = None  # of a Ray cluster; None: that of RAY_ADDRESS, or a new one on this machine


class Engine(ABC):
    """`prepare` at the first start of a data set, then `start`, `submit` and `wait` until all results are back."""

    def __init__(self, options: EngineOptions):
        self.options = options

    @property
    def workers(self) -> int:
        return len(self.options.devices)

    @abstractmethod
    def prepare(self, settings: WorkerSettings) -> dict[str, Any]:
        """`VolumeWorker.prepare` on one worker; raises InputError if that refuses or ends."""

    @abstractmethod
    def start(self, settings: WorkerSettings) -> None:
        """Starts the workers, without waiting until they have loaded the model."""

    @property
    @abstractmethod
    def room(self) -> int:
        """The number of tasks that `submit` takes now."""

    @abstractmethod
    def submit(self, task: Task) -> None:
        """Hands out a task. One of a later attempt runs alone on its worker, in case it is what ends workers."""

    @abstractmethod
    def wait(self, seconds: float) -> list[TaskResult]:
        """The results that have arrived, after at most some seconds; raises InputError if no worker can work."""

    @abstractmethod
    def close(self) -> None:
        """Ends the workers at once; tasks in their hands are lost."""


def make_engine(name: str, options: EngineOptions) -> Engine:
    if name not in ENGINES:
        raise InputError(f"--engine {name[:40]}: choose from {', '.join(ENGINES)}")
    module, kind = ENGINES[name]
    engine: Engine = getattr(importlib.import_module(module), kind)(options)
    return engine

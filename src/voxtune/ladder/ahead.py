"""Compiling many kernels at once: a step is some sixty different ones, and a compiler runs on one core.

Each worker compiles into Triton's own cache on disk; the launches that follow find everything there.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from torch import Tensor

from voxtune.kernels.convnext.launch import Launch

log = logging.getLogger("voxtune")
# A worker's own start costs about as much as this many kernels.
FEW = 8


def compile_ahead(launches: Iterable[Launch], workers: int | None = None) -> int:
    """Compiles each different launch once, in processes of their own; how many there were. On a CPU there is nothing to do."""
    tasks: dict[str, tuple[Any, ...]] = {}
    for launch in launches:
        tensors = [a for a in launch.arguments if isinstance(a, Tensor)]
        if not tensors or not tensors[0].is_cuda or len(tensors) != len(launch.arguments):
            continue
        task = _task(launch)
        tasks[repr(task)] = task
    workers = min(workers or max(1, (os.cpu_count() or 2) - 2), len(tasks) // FEW)
    if workers > 1:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            for done in as_completed([pool.submit(_compile, task) for task in tasks.values()]):
                if (error := done.exception()) is not None:
                    # The launch itself will say what is wrong, where it can be read.
                    log.info("compiling ahead: %s", error)
    return len(tasks)


def _task(launch: Launch) -> tuple[Any, ...]:
    function = launch.kernel.fn
    constants = tuple(sorted(launch.constants.items()))
    types = tuple(a.dtype for a in launch.arguments)
    return (
        function.__module__,
        function.__name__,
        types,
        constants,
        launch.warps,
        launch.stages,
        tuple(launch.options.items()),
    )


def _compile(task: tuple[Any, ...]) -> None:
    module, name, types, constants, warps, stages, options = task
    kernel = getattr(importlib.import_module(module), name)
    kernel.warmup(*types, grid=(1,), num_warps=warps, num_stages=stages, **dict(constants), **dict(options))

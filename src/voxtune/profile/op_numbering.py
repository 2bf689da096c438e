"""Numbers the operators of a step, and switches counting on and off.

Nsight Compute's own filters tell launches apart by function name and grid: template instances of one function, such as
PyTorch's elementwise kernels, are one to them. An operator's number in the step is exact. The numbers hold in the
backward pass too, since autograd carries the dispatch mode to its thread.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from voxtune.profile.align import Key, launch_key
from voxtune.profile.trace import Trace

OPERATOR = "voxtune::op#"
Around = Callable[[int], AbstractContextManager[Any]]


class NumberedOperators(TorchDispatchMode):
    """Runs each operator inside `around(its number in this step)`."""

    def __init__(self, around: Around):
        super().__init__()
        self.around, self.count = around, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") == "profiler":  # named ranges come and go with the profiler
            return func(*args, **(kwargs or {}))
        number, self.count = self.count, self.count + 1
        with self.around(number):
            return func(*args, **(kwargs or {}))


def number_launches(step: Callable[[], Any], device: torch.device) -> list[tuple[Key, int]]:
    """Runs one step and gives, for each kernel in order of launch, its key and the number of its operator (or -1)."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as recorded:
        with NumberedOperators(lambda n: record_function(f"{OPERATOR}{n}")):
            step()
        torch.cuda.synchronize(device)
    return _numbers(_exported(recorded))


def _exported(recorded: profile) -> Trace:
    import tempfile
    from pathlib import Path

    from voxtune.profile.trace import read_trace

    with tempfile.TemporaryDirectory(prefix="voxtune-") as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        return read_trace(path)


def _numbers(trace: Trace) -> list[tuple[Key, int]]:
    numbered = []
    for work in trace.work:
        if work.kind != "kernel":
            continue
        inside = work.call.find(lambda s: s.name.startswith(OPERATOR)) if work.call else None
        number = int(inside.name[len(OPERATOR) :]) if inside else -1
        shape = [",".join(map(str, work.args.get(k, ()))) for k in ("grid", "block")]
        numbered.append((launch_key(work.name, *shape), number))
    return numbered


class Counting:
    """The profiler's switch: cudaProfilerStart and Stop.

    Both are called in the thread that launches: a stop from another one (a watch on the clock) had no effect on an H200.
    """

    def __init__(self, start: Callable[[], Any], stop: Callable[[], Any]):
        self._start, self._stop = start, stop

    def __enter__(self) -> None:
        self._start()

    def __exit__(self, *error: Any) -> None:
        self._stop()

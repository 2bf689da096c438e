"""Numbers the operators of a step, and switches the counters on and off.

Nsight Compute's own filters select launches by function name and grid. They cannot distinguish template instances of
one function, such as PyTorch's elementwise kernels. The number of an operator in the step is exact. It is also valid in
the backward pass, because autograd passes the dispatch mode on to its thread.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from voxtune.profile.align import Key, launch_key
from voxtune.profile.trace import Trace, decode_trace, export_trace

OPERATOR = "voxtune::op#"
Around = Callable[[int], AbstractContextManager[Any]]


class NumberedOperators(TorchDispatchMode):
    """Runs each operator inside the context `around(number)`."""

    def __init__(self, around: Around):
        super().__init__()
        self.around, self.count = around, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") == "profiler":  # ranges exist only under the profiler
            return func(*args, **(kwargs or {}))
        number, self.count = self.count, self.count + 1
        with self.around(number):
            return func(*args, **(kwargs or {}))


def number_launches(step: Callable[[], Any], device: torch.device) -> list[tuple[Key, int]]:
    """Runs one step; returns each kernel's key and the number of its operator (or -1), in order of launch."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as recorded:
        with NumberedOperators(lambda n: record_function(f"{OPERATOR}{n}")):
            step()
        torch.cuda.synchronize(device)
    return _numbers(decode_trace(export_trace(recorded)))


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


class CounterSwitch:
    """Switches the counters on and off: cudaProfilerStart and cudaProfilerStop.

    Call both in the thread that launches the kernels. A stop from another thread had no effect on an H200.
    """

    def __init__(self, start: Callable[[], Any], stop: Callable[[], Any]):
        self._start, self._stop = start, stop

    def __enter__(self) -> None:
        self._start()

    def __exit__(self, *error: Any) -> None:
        self._stop()

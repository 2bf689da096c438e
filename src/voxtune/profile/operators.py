"""Numbers the operators of a step, and runs selected ones in isolation with the counters switched on.

Why numbers: Nsight Compute's own filters select launches by function name and grid. They cannot distinguish template
instances of one function, such as PyTorch's elementwise kernels. The number of an operator in the step is exact. It is
also valid in the backward pass, because autograd passes the dispatch mode on to its thread.

Why isolation: Nsight Compute replays a kernel once for each group of counters. Before each replay it restores all memory
of the process: 7 GB for each of 23 replays of a kernel of three microseconds, and 25 GB of a training step. So the calls
of the selected operators are recorded in one step (shapes, strides, types), the network is freed, and each operator runs
on new tensors of the same form. The order is free: the most expensive operator comes first. Floating-point values are
random, since the work of a kernel depends on shapes only. Integers are copied: they may be indices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from voxtune.profile.align import Key, launch_key
from voxtune.profile.census import synchronize
from voxtune.profile.trace import Trace, decode_trace, export_trace

OPERATOR = "voxtune::op#"
# Largest integer tensor whose values are copied.
_MAX_VALUES = 1 << 20
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


@dataclass(frozen=True)
class TensorSpec:
    """The form of a tensor. `storage` identifies arguments that share memory; `values` are kept for integers only."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    values: Tensor | None = None

    @property
    def extent(self) -> int:
        """Bytes of storage up to its last element."""
        reach = 0 if 0 in self.size else 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        return (self.offset + reach) * self.dtype.itemsize


def tensor_spec(tensor: Tensor) -> TensorSpec:
    copy = not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() <= _MAX_VALUES
    return TensorSpec(
        storage=tensor.untyped_storage()._cdata,
        size=tuple(tensor.shape),
        stride=tensor.stride(),
        offset=int(tensor.storage_offset()),
        dtype=tensor.dtype,
        device=tensor.device,
        values=tensor.detach().to("cpu", copy=True) if copy else None,
    )


@dataclass
class OperatorCall:
    """An operator and the form of its arguments."""

    function: Any
    args: Any
    kwargs: Any
    specs: list[TensorSpec] = field(default_factory=list)

    def arguments(self) -> tuple[Any, Any]:
        """New tensors of the recorded form. Arguments that shared memory share it again."""
        bytes_of: dict[int, int] = {}
        for spec in self.specs:
            bytes_of[spec.storage] = max(bytes_of.get(spec.storage, 0), spec.extent)
        storages: dict[int, Tensor] = {}

        def make(leaf: Any) -> Any:
            if not isinstance(leaf, TensorSpec):
                return leaf
            if leaf.storage not in storages:
                storages[leaf.storage] = _filled(bytes_of[leaf.storage], leaf)
            storage = storages[leaf.storage].untyped_storage()
            tensor = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
            tensor.set_(storage, leaf.offset, leaf.size, leaf.stride)
            if leaf.values is not None:
                tensor.copy_(leaf.values)
            return tensor

        return tree_map(make, (self.args, self.kwargs))


def _filled(size: int, spec: TensorSpec) -> Tensor:
    flat = torch.empty(max(1, -(-size // spec.dtype.itemsize)), dtype=spec.dtype, device=spec.device)
    return flat.normal_() if spec.dtype.is_floating_point and spec.dtype.itemsize > 1 else flat.zero_()


class _CallRecorder(NumberedOperators):
    def __init__(self, numbers: Iterable[int]):
        super().__init__(lambda _number: nullcontext())
        self.numbers, self.calls = set(numbers), dict[int, OperatorCall]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number = self.count
        if number in self.numbers and number not in self.calls and getattr(func, "namespace", "") != "profiler":
            specs: list[TensorSpec] = []

            def describe(leaf: Any) -> Any:
                if not isinstance(leaf, Tensor):
                    return leaf
                specs.append(tensor_spec(leaf))
                return specs[-1]

            spec_args, spec_kwargs = tree_map(describe, (args, kwargs or {}))
            self.calls[number] = OperatorCall(func, spec_args, spec_kwargs, specs)
        return super().__torch_dispatch__(func, types, args, kwargs)


def record_calls(step: Callable[[], Any], numbers: Iterable[int]) -> dict[int, OperatorCall]:
    """Runs one step and records the calls of the operators with these numbers."""
    mode = _CallRecorder(numbers)
    with mode:
        step()
    return mode.calls


def count_isolated(
    order: Sequence[int],
    calls: dict[int, OperatorCall],
    counters: CounterSwitch,
    deadline: float | None,
    device: torch.device,
) -> dict[str, Any]:
    """Counts the operators in this order until the deadline. Returns how many were counted, and failures with reasons."""
    done, failed = 0, dict[str, str]()
    for number in order:
        if deadline is not None and time.monotonic() >= deadline:
            return {"operators": done, "of_operators": len(order), "failed": failed, "expired": True}
        try:
            if number not in calls:
                raise LookupError("the step has no operator with this number")
            _count_one(calls[number], counters, device)
            done += 1
        except torch.OutOfMemoryError as error:
            failed[str(number)] = str(error).splitlines()[0][:200]
        except (RuntimeError, TypeError, ValueError, LookupError) as error:
            # An operator that cannot run in isolation only lowers the coverage.
            failed[str(number)] = f"{type(error).__name__}: {error}"[:200]
    return {"operators": done, "of_operators": len(order), "failed": failed, "expired": False}


def _count_one(call: OperatorCall, counters: CounterSwitch, device: torch.device) -> None:
    with torch.no_grad():
        args, kwargs = call.arguments()
        synchronize(device)
        with counters:
            call.function(*args, **kwargs)
            synchronize(device)
    del args, kwargs
    if device.type == "cuda":
        torch.cuda.empty_cache()  # every replay restores all reserved memory

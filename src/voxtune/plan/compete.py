"""The project's convolutions against cuDNN's, one form at a time: which of them a plan should leave to PyTorch.

Why: a kernel that wins for most shapes of a network may lose for some (64 to 4 channels, 128 channels at 64^3). Each form of an
own convolution in the rewritten graph is timed with its epilogue, and so is what the graph would hold without it: see
kernel_forms.py. Both are recorded as CUDA graphs and replayed in turns. Times are remembered for the card, the versions and the
source.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from voxtune.files import one_line
from voxtune.plan.card_table import CardTable
from voxtune.plan.kernel_forms import Call, KernelForm, kernel_forms, own_call, rival_call
from voxtune.plan.optimized import Optimized
from voxtune.plan.passes.base import EXCEPT
from voxtune.plan.plan import Plan, Step
from voxtune.plan.run import WARM_UP, Inputs

log = logging.getLogger("voxtune")
# A kernel that takes this much longer than cuDNN leaves its place.
LOSES = 1.03
# Of one form, in seconds, and in runs of each of the two.
SECONDS_EACH, LEAST, MOST = 0.1, 3, 100
# A recorded graph repeats a short call: the start of a graph takes a few microseconds.
GRAPH_MS, MAX_REPEATS = 0.3, 16
TABLE = CardTable(what="measured times of kernels", format="voxtune-kernels/1", entries="times")

# Times two calls in turns for about so many seconds; returns the median of each in milliseconds.
Timer = Callable[[Call, Call, torch.device, float], tuple[float, float]]


def race(first: Call, second: Call, device: torch.device, seconds: float) -> tuple[float, float]:
    """Median milliseconds of two calls that run in turns, on a GPU as recorded graphs."""
    runs = [(first, 1), (second, 1)]
    if device.type == "cuda":
        stream = torch.cuda.Stream(device)
        runs = [_recorded(call, stream) for call in (first, second)]
    for call, _ in runs:
        call()
    times: tuple[list[float], list[float]] = ([], [])
    until = time.perf_counter() + seconds
    while len(times[0]) < LEAST or (len(times[0]) < MOST and time.perf_counter() < until):
        for (call, repeats), own in zip(runs, times, strict=True):
            own.append(_milliseconds(call, device) / repeats)
    return statistics.median(times[0]), statistics.median(times[1])


def _milliseconds(call: Call, device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        call()
        return (time.perf_counter() - started) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _recorded(call: Call, stream: torch.cuda.Stream) -> tuple[Call, int]:
    """A graph of the call, which is repeated in it if it is short, and how often."""
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            call()
        once = _captured(call, 1)
        once.replay()
        ms = _milliseconds(once.replay, stream.device)
        repeats = max(1, min(MAX_REPEATS, int(GRAPH_MS / max(ms, 1e-3))))
        graph = once if repeats == 1 else _captured(call, repeats)
    torch.cuda.current_stream(stream.device).wait_stream(stream)
    return graph.replay, repeats


def _captured(call: Call, repeats: int) -> torch.cuda.CUDAGraph:
    """Unlike torch.cuda.graph, does not collect garbage and empty the cache each time."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Threads that load a training run's batches pin memory meanwhile, which the mode for all threads forbids.
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        for _ in range(repeats):
            call()
    finally:
        graph.capture_end()
    return graph


@dataclass(frozen=True)
class KernelTimes:
    """One form of an own convolution: how often the graph calls it, and the milliseconds of a call; cuDNN's beside them."""

    form: KernelForm
    count: int
    own_ms: float
    rival_ms: float


@dataclass
class Competition:
    """`times` of the forms that were timed; `untimed` are the others, because the time was over or one failed.

    `failure`: why there are no forms.
    """

    times: list[KernelTimes] = field(default_factory=list)
    untimed: list[KernelForm] = field(default_factory=list)
    failure: str = ""

    def lost(self) -> dict[tuple[str, tuple[int, ...]], list[KernelTimes]]:
        """By pass and shape, the largest loss first: all forms of a shape, which a plan's option does not distinguish."""
        groups: dict[tuple[str, tuple[int, ...]], list[KernelTimes]] = {}
        for entry in self.times:
            groups.setdefault(entry.form.excepted, []).append(entry)
        unknown = {form.excepted for form in self.untimed}
        totals = {shape: _totals(entries) for shape, entries in groups.items() if shape not in unknown}
        losers = [shape for shape, (own, rival) in totals.items() if own > LOSES * rival]
        return {shape: groups[shape] for shape in sorted(losers, key=lambda s: totals[s][1] - totals[s][0])}

    def excepting(self, plan: Plan) -> Plan | None:
        """The plan that leaves the convolutions that lose to PyTorch; None if none loses."""
        lost = self.lost()
        if not lost:
            return None
        excepted: dict[str, list[list[int]]] = {}
        for name, shape in lost:
            excepted.setdefault(name, []).append(list(shape))
        # The pass conv3d would take some that another pass leaves; where it has won at the same shape, it may.
        known = {form.excepted for form in (*(t.form for t in self.times), *self.untimed)}
        for (_, shape), entries in lost.items():
            if ("conv3d", shape) not in known and any(t.form.suits_conv3d for t in entries):
                excepted.setdefault("conv3d", []).append(list(shape))
        return Plan(tuple(_excepting(step, excepted.get(step.name, [])) for step in plan.steps))

    def report(self) -> str:
        """The convolutions that lost, with the times of all their calls in one step."""
        if self.failure:
            return self.failure
        entries = self.lost().items()
        missing = [f"{len(self.untimed)} forms of own convolutions were not timed"] if self.untimed else []
        lines = [_describe(shape, times) for (_, shape), times in entries]
        return "; ".join((lines or [f"none of {len(self.times)} forms of own convolutions loses to cuDNN"]) + missing)


def _totals(times: Sequence[KernelTimes]) -> tuple[float, float]:
    """Milliseconds of all calls in one step: of the own kernels, and of their rivals."""
    return sum(t.count * t.own_ms for t in times), sum(t.count * t.rival_ms for t in times)


def _excepting(step: Step, shapes: list[list[int]]) -> Step:
    before = [list(shape) for shape in step.options.get(EXCEPT, ())]
    more = [shape for shape in shapes if shape not in before]
    return Step(step.name, {**step.options, EXCEPT: before + more}) if more else step


def _describe(shape: tuple[int, ...], times: Sequence[KernelTimes]) -> str:
    """head 64->4 at 64x64x64: 0.21 ms, cuDNN 0.18 ms"""
    operators = " and ".join(sorted({t.form.operator for t in times}))
    calls = sum(t.count for t in times)
    own, rival = _totals(times)
    inputs, outputs, *size = shape
    often = f" ({calls} x)" if calls > 1 else ""
    return f"{operators} {inputs}->{outputs} at {'x'.join(map(str, size))}{often}: {own:.3g} ms, cuDNN {rival:.3g} ms"


def compete(network: Optimized, inputs: Inputs, seconds: float, *, timer: Timer = race) -> Competition:
    """Times the own convolutions of a rewritten network, those with the largest share first, for at most `seconds`.

    Times of an earlier run on this card with the same versions are used without timing them again.
    """
    until = time.monotonic() + seconds
    result = Competition()
    try:
        forms = kernel_forms(network, inputs)
    except Exception as error:  # outside a graph, a large network may not fit into memory
        result.failure = f"own convolutions were not timed: {type(error).__name__}: {one_line(error)}"
        return result
    if not forms:
        return result
    runner, device = network.runner, network.signature.device
    known = _remembered(device)
    waiting = []
    for form, count in forms.most_common():
        if form.key in known:
            result.times.append(KernelTimes(form, count, *known[form.key]))
        else:
            waiting.append(form)
    waiting.sort(key=lambda form: -form.work * forms[form])
    new: dict[str, tuple[float, float]] = {}
    with runner.flags(), _cudnn_benchmark():
        _rehearse(waiting, device, time.monotonic() + seconds / 2)
        for form in waiting:
            times = None
            if time.monotonic() + SECONDS_EACH <= until:
                times = _times(form, device, timer)
            if times is None:
                result.untimed.append(form)
                continue
            new[form.key] = times
            result.times.append(KernelTimes(form, forms[form], *times))
    if new:
        TABLE.add(device, {key: list(pair) for key, pair in new.items()})
    return result


def _times(form: KernelForm, device: torch.device, timer: Timer) -> tuple[float, float] | None:
    """Milliseconds of the own kernel and of its rival; None if one fails."""
    try:
        given = form.tensors(device)
        return timer(own_call(form, given), rival_call(form, given), device, SECONDS_EACH)
    except Exception as error:  # out of memory, or an algorithm that fails: the kernel stays
        log.info("%s was not timed: %s: %s", form.operator, type(error).__name__, one_line(error))
        return None


@contextmanager
def _cudnn_benchmark() -> Iterator[None]:
    """cuDNN chooses its algorithms by measuring, inside the block."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _rehearse(forms: Sequence[KernelForm], device: torch.device, until: float) -> None:
    """Compiles the rivals' kernels in parallel, which would else be compiled one by one."""
    if device.type != "cuda" or not forms:
        return
    from voxtune.kernels.precompile import compiled_ahead

    def rehearse() -> None:
        for form in forms:
            if time.monotonic() > until:
                return
            rival_call(form, form.tensors(device))()

    with compiled_ahead(rehearse):
        pass


def _remembered(device: torch.device) -> dict[str, tuple[float, float]]:
    """Milliseconds by the key of a form. Whatever is not a pair of positive times is ignored."""
    return {key: (pair[0], pair[1]) for key, pair in TABLE.read(device).items() if _is_pair(pair)}


def _is_pair(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    return all(isinstance(ms, int | float) and not isinstance(ms, bool) and 0 < ms < math.inf for ms in value)

"""The memory of a training step, simulated: every tensor that a step allocates, from its creation to its release.

The step is the real one - weights from parameters, forward pass, loss, backward pass, clipping - with fake tensors, which have
sizes but no memory. Operators of this project run their implementation, which allocates what it allocates on the GPU; their
kernels are not launched. A CUDA graph's pool has the same peak, since it is filled by the same allocations.

Not contained: what lies between blocks that the allocator cannot use, and workspaces of cuDNN and cuBLAS.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from voxtune.plan.training import TrainingNetwork

# The allocator's unit, in bytes.
BLOCK = 512
# Of Adam.
MOMENTS = 2
# Elements of weights whose differences to their moving average are in memory at a time.
AVERAGED_AT_ONCE = 2**24


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes by category at the moment of a training step at which most are allocated.

    `cast` are weights in the form that the kernels read, `kept` is what the forward pass keeps for gradients, and `temporary`
    all that is there for a moment, gradients of activations included.
    """

    weights: int
    gradients: int
    optimizer: int
    average: int
    inputs: int
    cast: int
    kept: int
    temporary: int

    @property
    def total(self) -> int:
        return sum(self.by_category().values())

    def by_category(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def of_batch(self, share: float) -> StepMemory:
        """With this share of the batch: what does not belong to a sample stays."""
        parts = {name: int(getattr(self, name) * share) for name in ("inputs", "kept", "temporary")}
        return StepMemory(**{**self.by_category(), **parts})


CATEGORIES = tuple(field.name for field in fields(StepMemory))


@dataclass(frozen=True)
class Block:
    """A tensor's memory: the events at which it is allocated and released, and the operator that allocated it."""

    bytes: int
    category: str
    first: int
    end: int
    by: str


@dataclass(frozen=True)
class SimulatedStep:
    """The blocks of a step, the number of its events, and that of the first event of the backward pass."""

    blocks: tuple[Block, ...]
    events: int
    backward: int

    def timeline(self) -> list[dict[str, int]]:
        """Bytes by category after each event."""
        changes = [dict.fromkeys(CATEGORIES, 0) for _ in range(self.events + 1)]
        for block in self.blocks:
            changes[block.first][block.category] += block.bytes
            changes[min(block.end, self.events)][block.category] -= block.bytes
        columns = {name: list(accumulate(change[name] for change in changes)) for name in CATEGORIES}
        return [{name: column[i] for name, column in columns.items()} for i in range(self.events)]

    def peak_event(self) -> int:
        changes = [0] * (self.events + 1)
        for block in self.blocks:
            changes[block.first] += block.bytes
            changes[min(block.end, self.events)] -= block.bytes
        totals = list(accumulate(changes))
        return max(range(self.events), key=totals.__getitem__)

    def at(self, event: int) -> list[Block]:
        """What is allocated after an event, the largest first."""
        return sorted((b for b in self.blocks if b.first <= event < b.end), key=lambda b: -b.bytes)

    def peak(self) -> StepMemory:
        totals = dict.fromkeys(CATEGORIES, 0)
        for block in self.at(self.peak_event()):
            totals[block.category] += block.bytes
        return StepMemory(**totals)


_UNCHANGED = frozenset({FakeTensor, int, float, bool, type(None), torch.dtype, torch.memory_format, torch.layout})


class _Allocations(TorchDispatchMode):
    """Follows the storages of fake tensors; own operators run their implementations, and real tensors become fake ones."""

    def __init__(self, mode: FakeTensorMode):
        super().__init__()
        self.mode = mode
        self.events = 0
        self.by = ""
        self.numbers: dict[int, int] = {}  # of the storages that exist, by address
        self.first: list[int] = []
        self.end: list[int | None] = []
        self.bytes: list[int] = []
        self.operators: list[str] = []
        self._fakes: dict[int, tuple[Tensor, Tensor]] = {}

    def track(self, value: Any) -> list[int]:
        """The numbers of the blocks of all tensors in a value."""
        return [self._number(x) for x in tree_leaves(value) if isinstance(x, FakeTensor)]

    def _number(self, x: Tensor) -> int:
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self.numbers:
            self.numbers[key] = number = len(self.first)
            self.first.append(self.events)
            self.end.append(None)
            self.bytes.append(-(-storage.nbytes() // BLOCK) * BLOCK)
            self.operators.append(self.by)
            self.events += 1
            weakref.finalize(storage, self._release, key, number)
        return self.numbers[key]

    def _release(self, key: int, number: int) -> None:
        del self.numbers[key]
        self.end[number] = self.events
        self.events += 1

    def fake(self, x: Tensor) -> Tensor:
        """A fake tensor on the CPU in place of a real one."""
        if isinstance(x, FakeTensor):
            return x
        if id(x) not in self._fakes:
            with self.mode, torch.no_grad():
                self._fakes[id(x)] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype), x
        return self._fakes[id(x)][0]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _UNCHANGED.issuperset(map(type, (*args, *kwargs.values()))):  # most have nothing to convert
            args, kwargs = tree_map(self._here, (args, kwargs))
        if function.namespace != "voxtune":
            y = function(*args, **kwargs)
            self.track(y)
            return y
        from voxtune.kernels.ops import IMPLEMENTATIONS

        with self:
            return IMPLEMENTATIONS[function._schema.name.split("::")[1]](*args, **kwargs)

    def _here(self, x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("cpu")
        return self.fake(x) if isinstance(x, Tensor) else x


def simulated_step(
    network: TrainingNetwork,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    groups: Sequence[Any] | None = None,
    *,
    accumulated: bool = False,
) -> SimulatedStep:
    """The step of a network with Adam and a moving average, by default with the groups that it computes again now.

    `accumulated`: the gradients of earlier batches are there.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    allocations = _Allocations(mode)
    with warnings.catch_warnings(), _on_its_gpu(network):
        # Kernels ask for the alignment of their arguments; a fake tensor's address is 0.
        warnings.filterwarnings("ignore", message=".*data pointer of FakeTensor.*")
        given = tree_map_only(Tensor, lambda x: allocations.fake(x.detach()), (tuple(args), kwargs or {}))
        simulation = _Simulation(network, allocations, network.groups if groups is None else groups)
        return simulation.run(*given, accumulated=accumulated)


@contextmanager
def _on_its_gpu(network: TrainingNetwork) -> Iterator[None]:
    """Tensors are treated as if they were on the network's GPU, or on an H200."""
    from voxtune.kernels.conv3d_tiles import Device, simulated_device

    device = next(network.parameters()).device
    with simulated_device(Device.of(device) if device.type == "cuda" else Device()):
        yield


class _Simulation:
    def __init__(self, network: TrainingNetwork, allocations: _Allocations, groups: Sequence[Any]):
        self.network, self.allocations = network, allocations
        self.execution = network.execution(groups)
        self.execution.watch = self._watch
        self.categories: dict[int, str] = {}
        self._cast = 0

    def _watch(self, i: int, _known: Any) -> None:
        if i == 0:
            self._cast = len(self.allocations.first)
        self.allocations.by = self.execution.nodes[i].name

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, accumulated: bool) -> SimulatedStep:
        allocations = self.allocations
        with allocations.mode, _fake_weights(self.network, allocations.fake) as parameters, allocations:
            lasting: list[Any] = []
            self._there("weights", lasting, [*self.network.parameters(), *self.network.buffers()])
            copies = lambda: [torch.empty_like(p) for p in parameters]  # noqa: E731
            for _ in range(MOMENTS):
                self._there("optimizer", lasting, copies())
            self._there("average", lasting, copies())
            self._there("inputs", lasting, (args, kwargs))
            if accumulated:
                for p in parameters:
                    p.grad = torch.zeros_like(p)
            first = len(allocations.first)
            with torch.enable_grad():
                loss = self._loss(args, kwargs)
            after = set(allocations.numbers.values())
            kept = {n for n in after if n >= first}
            for n in kept:
                self.categories[n] = "cast" if first <= n < self._cast else "kept"
            self._named("backward")
            backward = allocations.events
            loss.backward()
            del loss
            gradients = [p.grad for p in parameters if p.grad is not None]
            for n in allocations.track(gradients):
                self.categories[n] = "gradients"
            self._named("update")
            self._update(gradients, parameters)
            events = allocations.events
            blocks = tuple(self._blocks(events))
            del gradients, lasting
            for p in parameters:
                p.grad = None
        return SimulatedStep(blocks, events, backward)

    def _there(self, category: str, lasting: list[Any], value: Any) -> None:
        """Tensors that exist before the step and after it."""
        lasting.append(value)
        self._named(category)
        for number in self.allocations.track(value):
            self.categories.setdefault(number, category)

    def _named(self, name: str) -> None:
        self.allocations.by = name

    def _loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        self._named("weights from parameters")
        y = self.network.run(self.execution, args, kwargs)
        self._named("loss")
        parts = []
        for result in tree_leaves(y):
            if isinstance(result, Tensor) and result.requires_grad:
                target = torch.empty_like(result, dtype=torch.promote_types(result.dtype, torch.float32))
                parts.append((result.to(target.dtype) - target).abs().mean())
        return torch.stack(parts).sum()

    def _update(self, gradients: list[Tensor], parameters: list[nn.Parameter]) -> None:
        """Clipping, and the moving average; a fused optimizer allocates nothing."""
        with torch.no_grad():
            norm = nn.utils.get_total_norm(gradients, foreach=True)
            nn.utils.clip_grads_with_norm_(parameters, 1.0, norm, foreach=True)
            chunk: list[Tensor] = []
            for p in parameters:
                chunk.append(torch.empty_like(p))
                if sum(x.numel() for x in chunk) >= AVERAGED_AT_ONCE:
                    chunk = []

    def _blocks(self, events: int) -> Iterator[Block]:
        a = self.allocations
        for n, (size, first, end, by) in enumerate(zip(a.bytes, a.first, a.end, a.operators, strict=True)):
            yield Block(size, self.categories.get(n, "temporary"), first, events if end is None else end, by)


@contextmanager
def _fake_weights(network: nn.Module, fake: Callable[[Tensor], Tensor]) -> Iterator[list[nn.Parameter]]:
    """The network with fake parameters and buffers inside the block; the parameters that are trained."""
    fakes: dict[int, Tensor] = {}

    def of(x: Tensor) -> Tensor:
        if id(x) not in fakes:
            made = fake(x)
            fakes[id(x)] = nn.Parameter(made, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else made
        return fakes[id(x)]

    before: list[tuple[dict[str, Any], str, Any]] = [
        (d, name, x) for m in network.modules() for d in (m._parameters, m._buffers) for name, x in d.items()
    ]
    try:
        for values, name, x in before:
            if x is not None:
                values[name] = of(x)
        yield [p for p in fakes.values() if isinstance(p, nn.Parameter) and p.requires_grad]
    finally:
        for values, name, x in before:
            values[name] = x

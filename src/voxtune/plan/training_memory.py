"""Memory of a training step with a rewritten network, from shapes alone; and the groups that fit a budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from voxtune.errors import InputError
from voxtune.plan.recompute import (
    GROUP_SIZES,
    Group,
    Kept,
    computed_again,
    grouped,
    kept_bytes,
    recomputation,
    repeated_bytes,
)
from voxtune.plan.training import TrainingNetwork

# Float32 copies of the weights: themselves, their gradients, two moments of Adam, and their moving average.
STATES = 5


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes of a training step: float32 states, cast weights, what is kept for gradients, and what is there for a moment."""

    states: int
    weights: int
    kept: int
    transient: int

    @property
    def total(self) -> int:
        return self.states + self.weights + self.kept + self.transient


class TrainingMemory:
    """What each operator of a network keeps for its gradient, found without computing."""

    def __init__(self, network: TrainingNetwork, args: Sequence[Any], kwargs: dict[str, Any] | None = None):
        self.network = network
        self.graph: fx.Graph = network.rewritten.graph
        self.weights, self.kept = _kept(network, args, kwargs or {})
        self.nodes = list(self.graph.nodes)
        self.position = {node: i for i, node in enumerate(self.nodes)}
        self.sizes = {item.of: item.bytes for item in self.kept}
        self.transient = max(map(self._transient, self.nodes), default=0)

    def step(self, groups: Sequence[Group] = ()) -> StepMemory:
        states = STATES * sum(p.numel() * 4 for p in self.network.parameters())
        needed = {
            self.position[node]: self._bytes(node)
            for group in groups
            for node in recomputation(self.nodes, group).inputs
            if not computed_again(node)
        }
        kept = kept_bytes(self.kept, groups, needed)
        transient = self.transient + repeated_bytes(self.kept, groups)
        return StepMemory(states=states, weights=self.weights, kept=kept, transient=transient)

    def _bytes(self, node: fx.Node) -> int:
        return self.sizes.get(self.position[node], 0)

    def _transient(self, node: fx.Node) -> int:
        """Bytes of an operator's backward pass beside what is kept: gradients of its results and of its inputs.

        A convolution's input is computed again where a norm returned it, and at a residual connection another gradient waits.
        """
        if node.op != "call_function":
            return 0
        inputs = sum(map(self._bytes, node.all_input_nodes))
        result = self._bytes(node) or max(map(self._bytes, node.users), default=0)
        return inputs + result if computed_again(node) else 2 * (inputs + result)

    def choices(self) -> Iterator[tuple[tuple[Group, ...], StepMemory]]:
        """Groups from none to the largest, with the memory of each; only those that need less than the ones before."""
        least = self.step()
        yield (), least
        for size in GROUP_SIZES:
            groups = grouped(self.graph, size)
            memory = self.step(groups)
            if memory.total < least.total:
                least = memory
                yield groups, memory

    def computed_twice(self, groups: Sequence[Group]) -> float:
        """The share of the forward pass's products with weights that is computed again."""
        again = {node for group in groups for node in recomputation(self.nodes, group).nodes}
        total = sum(map(_products, self.nodes))
        return sum(map(_products, again)) / total if total else 0.0

    def within(self, budget: int) -> tuple[Group, ...]:
        """The groups that compute least again among those that fit; InputError, with the smallest figure, if none does."""
        choices = list(self.choices())
        for groups, memory in choices:
            if memory.total <= budget:
                return groups
        least = choices[-1][1].total
        raise InputError(
            f"a training step needs at least {least / 2**30:.3g} GiB here, more than the memory budget of {budget / 2**30:.3g}: "
            "use a smaller size or batch, or raise --memory-budget"
        )


def _products(node: fx.Node) -> int:
    """Products of a convolution or matrix product, by the sizes of its result and weight."""
    if node.op != "call_function":
        return 0
    value = next((x for x in tree_leaves(node.meta.get("val")) if isinstance(x, Tensor)), None)
    weights = [n.meta.get("val") for n in node.all_input_nodes if n.op == "get_attr"]
    matrix = max((w for w in weights if isinstance(w, Tensor) and w.dim() > 1), key=Tensor.numel, default=None)
    if value is None or matrix is None:
        return 0
    return value.numel() * (matrix.numel() // max(1, value.shape[1] if value.dim() > 1 else 1))


def _kept(network: TrainingNetwork, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, list[Kept]]:
    """Bytes of the weights that are computed from the parameters, and what each operator keeps."""
    from voxtune.kernels.gradients import recipe_of

    execution = network.execution(())
    of: dict[int, int] = {}
    kept: list[Kept] = []
    alive: list[Any] = []
    current = 0

    def learn(i: int, value: Any) -> None:
        for x in tree_leaves(value):
            if isinstance(x, Tensor):
                alive.append(x)  # so that no other tensor gets its storage's place
                of.setdefault(_storage(x), i)

    def watch(i: int, known: dict[fx.Node, Any]) -> None:
        nonlocal current
        current = i
        before = execution.nodes[i - 1] if i else None
        if before is not None and before in known:
            learn(i - 1, known[before])

    def pack(x: Tensor) -> Tensor:
        recipe = recipe_of(x)
        parts = () if recipe is None else [part for part in tree_leaves(recipe.kept) if isinstance(part, Tensor)]
        for part in (x, *parts):
            position = of.get(_storage(part))
            if position is not None and execution.nodes[position].op != "get_attr":
                size = part.untyped_storage().nbytes()
                kept.append(Kept(current, position, size, again=recipe is not None and part is x))
        return x

    execution.watch = watch
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = tree_map_only(Tensor, lambda x: mode.from_tensor(x.detach()), (tuple(args), kwargs))
    execution.hooks = lambda: torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    with mode, torch.enable_grad():
        values = network.weights()
        weights = sum(v.untyped_storage().nbytes() for v in values.values() if not isinstance(v, torch.nn.Parameter))
        execution(tree_leaves(fake), values)
    return weights, kept


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)

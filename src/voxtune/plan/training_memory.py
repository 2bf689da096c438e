"""The groups of operators that are computed again so that a training step fits into a memory budget, by simulated steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from voxtune.errors import InputError
from voxtune.plan.recompute import Group, merged, pieces, recomputation, tensor_bytes, window
from voxtune.plan.step_memory import SimulatedStep, StepMemory, simulated_step
from voxtune.plan.training import TrainingNetwork

# Products with weights that take as long as reading or writing a byte: 450 TFLOP/s and 3 TB/s, measured on an H200.
PRODUCTS_PER_BYTE = 75
# Results that a search tries to compute again, and that it then tries to keep after all.
MOST_STEPS, MOST_REMOVED = 24, 4
# Searches whose result is kept.
REMEMBERED = 8
_within: dict[tuple[Any, ...], tuple[Group, ...]] = {}
# Of the budget: what a search in large steps must reach so that one in small steps is tried.
WITHIN_REACH = 1.25


class TrainingMemory:
    """The memory of a network's training step, and what can be computed again to need less."""

    def __init__(
        self,
        network: TrainingNetwork,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None = None,
        *,
        accumulated: bool = False,
    ):
        """`accumulated`: the gradients of a step's earlier batches are in memory too."""
        self.network, self.args, self.kwargs, self.accumulated = network, tuple(args), kwargs or {}, accumulated
        self.nodes: list[fx.Node] = list(network.rewritten.graph.nodes)
        self._steps: dict[tuple[Group, ...], SimulatedStep] = {}
        parts = pieces(network.rewritten.graph)
        # Each result that can be computed again by a group of its own: the group, and what that costs.
        self.candidates: dict[fx.Node, tuple[Group, float]] = {}
        for node in self.nodes:
            group = window(self.nodes, parts, node)
            cost = 0.0 if group is None else sum(map(_cost, recomputation(self.nodes, group).nodes))
            if group is not None and cost:  # others are views
                self.candidates[node] = group, cost

    def simulated(self, groups: Sequence[Group] = ()) -> SimulatedStep:
        key = tuple(groups)
        if key not in self._steps:
            self._steps[key] = simulated_step(self.network, self.args, self.kwargs, key, accumulated=self.accumulated)
        return self._steps[key]

    def step(self, groups: Sequence[Group] = ()) -> StepMemory:
        return self.simulated(groups).peak()

    def choices(self, budget: int = 0) -> Iterator[tuple[tuple[Group, ...], StepMemory]]:
        """Groups with the memory of each, from none on; each needs less than the one before.

        Of what is kept at the moment of the peak, results are computed again that cost least for their size: one more each
        time, or with a budget as many as make up half of what exceeds it.
        """
        memory = self.step()
        yield (), memory
        for nodes in self._searched(budget):
            groups = self._groups(nodes)
            yield groups, self.step(groups)

    def _groups(self, nodes: Sequence[fx.Node]) -> tuple[Group, ...]:
        return merged([self.candidates[node][0] for node in nodes])

    def _searched(self, budget: int) -> Iterator[list[fx.Node]]:
        chosen: list[fx.Node] = []
        useless: set[fx.Node] = set()
        cautious, steps = False, 0
        while steps < MOST_STEPS and (least := self.step(self._groups(chosen)).total) > budget:
            waiting = self._at_peak(self.simulated(self._groups(chosen)), {*chosen, *useless})
            if not waiting:
                return
            more = _making_up(waiting, (least - budget) // 2) if budget and not cautious else waiting[:1]
            steps += 1
            if self.step(self._groups([*chosen, *more])).total < least:
                chosen, cautious = [*chosen, *more], False
                yield chosen
            elif len(more) > 1:
                cautious = True
            else:
                useless.update(more)

    def within(self, budget: int) -> tuple[Group, ...]:
        """The groups that compute least again among those that fit; InputError, with the smallest figure, if none does."""
        key = self._key(budget)
        if key not in _within:
            if len(_within) >= REMEMBERED:
                del _within[next(iter(_within))]
            _within[key] = self._cheapest(budget)
        return _within[key]

    def _key(self, budget: int) -> tuple[Any, ...]:
        """What the groups depend on: a run rewrites copies of its network several times."""
        from voxtune.kernels.conv3d_tiles import Device

        shapes = tuple(tuple(x.shape) for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, Tensor))
        device = Device.of(next(self.network.parameters()).device)
        return str(self.network.rewritten.graph), shapes, device, self.accumulated, budget

    def _cheapest(self, budget: int) -> tuple[Group, ...]:
        least = self.step().total
        if least <= budget:
            return ()
        for at_once in (budget, 0):  # in large steps, then in small ones
            if not at_once and least > WITHIN_REACH * budget:
                break
            for chosen in self._searched(at_once):
                total = self.step(self._groups(chosen)).total
                least = min(least, total)
                if total <= budget:
                    return self._groups(self._without_idle(chosen, budget))
        raise InputError(
            f"a training step needs at least {least / 2**30:.3g} GiB here, more than the memory budget of {budget / 2**30:.3g}: "
            "use a smaller size or batch, or raise --memory-budget"
        )

    def _without_idle(self, chosen: list[fx.Node], budget: int) -> list[fx.Node]:
        """Without those that the budget does not need, the most expensive first."""
        for node in sorted(chosen, key=lambda node: -self.candidates[node][1])[:MOST_REMOVED]:
            fewer = [n for n in chosen if n is not node]
            if self.step(self._groups(fewer)).total <= budget:
                chosen = fewer
        return chosen

    def _at_peak(self, step: SimulatedStep, without: set[fx.Node]) -> list[fx.Node]:
        """Results that are kept at the peak and needed only later, the least cost for their size first."""
        event = step.peak_event()
        kept = {block.by: block for block in step.blocks if block.category == "kept"}

        def block_of(node: fx.Node) -> Any:
            return kept.get(node.name) or kept.get(node.args[0].name if isinstance(node.args[0], fx.Node) else "")

        def relieves(node: fx.Node) -> bool:
            block = block_of(node)
            if block is None or not block.first <= event < block.end:
                return False
            # What the group's operators return is released when their backward pass begins, for which the group is computed.
            group = self.candidates[node][0]
            after = [b for n in self.nodes[group.first : group.end] if n is not node and (b := block_of(n)) is not None]
            return any(b.end > event for b in after if b.first > block.first) or event < step.backward

        kept_only = [node for node in self.candidates if node not in without and relieves(node)]
        return sorted(kept_only, key=lambda node: self.candidates[node][1] / tensor_bytes(node.meta["val"]))

    def computed_twice(self, groups: Sequence[Group]) -> float:
        """The share of the forward pass's products with weights that is computed again."""
        again = {node for group in groups for node in recomputation(self.nodes, group).nodes}
        total = sum(map(_products, self.nodes))
        return sum(map(_products, again)) / total if total else 0.0


def _making_up(nodes: Sequence[fx.Node], bytes_: int) -> list[fx.Node]:
    """The first ones, at least one, of as many bytes."""
    sizes = list(accumulate(tensor_bytes(node.meta["val"]) for node in nodes))
    return list(nodes[: 1 + sum(size < bytes_ for size in sizes)])


def _cost(node: fx.Node) -> float:
    """Of computing an operator again, in products with weights; nothing for views, and for small operators between large ones."""
    products = _products(node)
    if not products and getattr(node.target, "namespace", "") != "voxtune":
        return 0.0
    moved = sum(tensor_bytes(n.meta.get("val")) for n in (node, *node.all_input_nodes))
    return products + PRODUCTS_PER_BYTE * moved


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

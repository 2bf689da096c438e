"""`torch.compile(model, backend="voxtune")`: the passes as a torch.compile backend."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, fx, nn

from voxtune.errors import InputError
from voxtune.files import one_line
from voxtune.plan.api import optimize
from voxtune.plan.optimized import MAX_VARIANTS, Optimized
from voxtune.plan.optimized_training import OptimizedTraining, optimize_training
from voxtune.plan.plan import Plan

log = logging.getLogger("voxtune")


def voxtune(
    graph: fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Dynamo's graph with its weights as constants, optimized; where gradients are required, with its parameters, to train.

    `options` are those of `voxtune.optimize`: plan, precision, search, cache, memory_limit.
    """
    train = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in example_inputs)
    frozen, places = _freeze(graph, example_inputs, train=train)
    if not any(isinstance(example_inputs[i], Tensor) for i in places):
        return graph.forward
    weights = [i for i in range(len(example_inputs)) if i not in places]
    state: tuple[list[Tensor], list[int]] | None = None
    # By the sizes that a graph of any size receives as numbers; they are part of a plan.
    networks: OrderedDict[tuple[Any, ...], Optimized | OptimizedTraining] = OrderedDict()

    def call(*given: Any) -> Any:
        nonlocal state
        current = _state([given[i] for i in weights])
        if state is None or not all(map(is_, current[0], state[0])) or current[1] != state[1]:
            frozen.take(dict(zip(weights, current[0], strict=True)))
            state = current
        inputs = [given[i] for i in places]
        return network_for(inputs)(*inputs)

    def network_for(inputs: Sequence[Any]) -> Optimized | OptimizedTraining:
        sizes = tuple(x for x in inputs if not isinstance(x, Tensor))
        if sizes not in networks:
            while len(networks) >= MAX_VARIANTS:
                networks.popitem(last=False)
            networks[sizes] = _made(frozen, inputs, list(networks.values()), options or {}, train=train)
        networks.move_to_end(sizes)
        return networks[sizes]

    if not any(isinstance(x, torch.SymInt) for x in example_inputs):
        network_for([example_inputs[i] for i in places])
    return call


def _made(
    frozen: _Frozen,
    inputs: Sequence[Any],
    others: Sequence[Optimized | OptimizedTraining],
    options: dict[str, Any],
    *,
    train: bool,
) -> Optimized | OptimizedTraining:
    if train:
        known: dict[str, Any] = {"say": log.info}
        known |= {name: options[name] for name in ("plan", "precision") if name in options}
        try:
            return optimize_training(frozen, inputs, **known)
        except InputError as error:
            log.warning("%s; running the original graph", one_line(error))
            return OptimizedTraining(frozen, Plan(()), None)
    pool = next((n.pool for n in others if isinstance(n, Optimized) and n.pool is not None), None)
    return optimize(frozen, inputs, **{"say": log.info, "pool": pool, **options})


def _state(weights: list[Tensor]) -> tuple[list[Tensor], list[int]]:
    """What changes when a weight is replaced; a weight that is written to is seen by the network itself."""
    return weights, [x.data_ptr() for x in weights]


class _Frozen(nn.Module):
    """The graph with its weights as buffers, or to train it with its parameters, called with the other inputs."""

    def __init__(
        self, graph: fx.GraphModule, weights: dict[int, Tensor], places: list[int], count: int, *, train: bool
    ):
        super().__init__()
        self.trains = train
        # Dynamo's own class compiles its code at the first call, by way of `__call__`.
        self.graph, self.places, self.count = fx.GraphModule(graph, graph.graph), places, count
        self.weight_names = {i: f"weight_{i}" for i in weights}
        self.take(weights)

    def take(self, weights: dict[int, Tensor]) -> None:
        """Uses these weights: the caller's parameters, or views that share memory and version counter with them."""
        for i, weight in weights.items():
            if self.trains and isinstance(weight, nn.Parameter):
                self.register_parameter(self.weight_names[i], weight)
            else:
                self.register_buffer(self.weight_names[i], weight.detach())

    def forward(self, *inputs: Any) -> Any:
        given = dict(zip(self.places, inputs, strict=True))
        names = self.weight_names
        # Its `__call__` prints a traceback where the gate finds that a network does not accept float64.
        return self.graph.forward(*(getattr(self, names[i]) if i in names else given[i] for i in range(self.count)))


def _freeze(graph: fx.GraphModule, example_inputs: Sequence[Any], *, train: bool) -> tuple[_Frozen, list[int]]:
    """Dynamo passes weights as inputs: those that are parameters or buffers of the caller become the module's own."""
    weights = {
        i: x
        for i, (node, x) in enumerate(zip(graph.graph.find_nodes(op="placeholder"), example_inputs, strict=True))
        if isinstance(x, nn.Parameter) or (isinstance(x, Tensor) and "_buffers_" in str(node.target))
    }
    places = [i for i in range(len(example_inputs)) if i not in weights]
    frozen = _Frozen(graph, weights, places, len(example_inputs), train=train)
    frozen.train(train)
    return frozen, places

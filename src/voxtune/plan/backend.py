"""`torch.compile(model, backend="voxtune")`: the passes as a torch.compile backend."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from voxtune.plan.api import BASELINE, CPU_READY, READY
from voxtune.plan.build import PlanTarget
from voxtune.plan.gate import Gate
from voxtune.plan.plan import Plan
from voxtune.plan.tuner import first_admitted

log = logging.getLogger("voxtune")


def voxtune(
    graph: fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Dynamo's graph with its weights as constants, rewritten and gated; unchanged if gradients are required.

    `options={"plan": "plan.json"}` selects a plan; the default is the first ready-made plan that passes the gate.
    """
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in example_inputs):
        log.warning("gradients are required: running the original graph; call it under torch.no_grad() to use a plan")
        return graph.forward
    frozen, places = _freeze(graph, example_inputs)
    inputs = tuple(example_inputs[i] for i in places)
    device = next((x.device for x in inputs if isinstance(x, Tensor)), torch.device("cpu"))
    path = (options or {}).get("plan")
    plans = (Plan.load(path),) if path else READY if device.type == "cuda" else CPU_READY
    target = PlanTarget(frozen, (inputs, {}))
    admitted = first_admitted(target, plans, Gate(frozen, [(inputs, {})]))
    network = target.build(BASELINE) if admitted is None else admitted[0]
    weights = [i for i in range(len(example_inputs)) if i not in places]
    versions = [_version(example_inputs[i]) for i in weights]
    warned = False

    def call(*given: Any) -> Any:
        nonlocal warned
        if [_version(given[i]) for i in weights] == versions:
            return network(*(given[k] for k in places))
        if not warned:
            log.warning("the weights have changed since the plan was made: running the original graph; compile again")
            warned = True
        return graph.forward(*given)

    return call


def _version(x: Tensor) -> tuple[int, int]:
    """Changes when a tensor is replaced or written to."""
    return x.data_ptr(), 0 if x.is_inference() else x._version


class _Frozen(nn.Module):
    """The graph with its weights as buffers, called with the other inputs."""

    def __init__(self, graph: fx.GraphModule, weights: dict[int, Tensor], places: list[int], count: int):
        super().__init__()
        self.graph, self.places, self.count = graph, places, count
        self.buffer_names = {i: f"weight_{i}" for i in weights}
        for i, weight in weights.items():
            self.register_buffer(self.buffer_names[i], weight.detach())

    def forward(self, *inputs: Any) -> Any:
        given = dict(zip(self.places, inputs, strict=True))
        names = self.buffer_names
        return self.graph(*(getattr(self, names[i]) if i in names else given[i] for i in range(self.count)))


def _freeze(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[nn.Module, list[int]]:
    """Dynamo passes weights as inputs: those that are parameters or buffers of the caller become constants."""
    weights = {
        i: x
        for i, (node, x) in enumerate(zip(graph.graph.find_nodes(op="placeholder"), example_inputs, strict=True))
        if isinstance(x, nn.Parameter) or (isinstance(x, Tensor) and "_buffers_" in str(node.target))
    }
    places = [i for i in range(len(example_inputs)) if i not in weights]
    return _Frozen(graph, weights, places, len(example_inputs)).eval(), places

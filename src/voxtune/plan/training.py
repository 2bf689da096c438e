"""A network rewritten for training: the plan's operators with their gradients, and the network's own parameters.

The graph is the one that inference plans rewrite. Its weights are not stored in it: packed, cast and merged weights are computed
from the parameters in every step, by the functions that the passes recorded, so that gradients reach the parameters through them.

What is kept for the backward pass are the sources of norms; their results, which convolutions need for their weights' gradients,
are computed again from these.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten

from voxtune.errors import InputError
from voxtune.plan.build import PlanTarget, rewrite
from voxtune.plan.derivation import Derivation, LiveWeights, Ref
from voxtune.plan.graph import Captured
from voxtune.plan.passes import Context
from voxtune.plan.plan import Plan

# Their results depend on the batch, or on chance, in training mode: an inference graph computes something else.
_DIFFERS = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd, nn.AlphaDropout)


class TrainingNetwork(nn.Module):
    """Computes what the network computes, with the plan's operators; gradients go to the network's parameters.

    It shares the network's parameters and buffers.
    """

    original: nn.Module
    rewritten: fx.GraphModule
    notes: dict[str, str]
    _live: LiveWeights

    def __init__(self, original: nn.Module, captured: Captured, notes: dict[str, str]):
        super().__init__()
        for shared in ("_parameters", "_buffers", "_modules"):
            self.__dict__[shared] = original.__dict__[shared]
        # Not as submodules: their parameters are not this network's.
        live = LiveWeights(original, captured.module, captured.derived)
        self.__dict__.update(original=original, rewritten=captured.module, notes=notes, _live=live)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves = tree_flatten((args, kwargs))[0]
        runner = _TrainingInterpreter(self.rewritten, self._live.values())
        return self.rewritten.graph.process_outputs(runner.run(*leaves, enable_io_processing=False))


class _TrainingInterpreter(fx.Interpreter):
    """Runs the graph with given weights; results of norms are computed again in the backward pass."""

    def __init__(self, module: fx.GraphModule, values: dict[str, Tensor]):
        super().__init__(module)
        self.values = values
        self.read_after = _read_after(module.graph)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        from voxtune.kernels.gradients import recomputing_norms

        with recomputing_norms() if torch.is_grad_enabled() else nullcontext():
            return super().run(*args, **kwargs)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.values[target] if target in self.values else super().get_attr(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        from voxtune.kernels.gradients import RecomputedNorm, norm_before, recompute_later

        if n.target is not torch.ops.voxtune.norm_act.default or not torch.is_grad_enabled():
            return super().run_node(n)
        args, _ = self.fetch_args_kwargs_from_env(n)
        nodes: list[fx.Node] = n.args[0]  # type: ignore[assignment]
        # A source that occurs twice would be handed on twice: only the last one would be read.
        handed_on = [
            value.requires_grad and node in self.read_after[n] and nodes.count(node) == 1
            for node, value in zip(nodes, args[0], strict=True)
        ]
        y, affine, again = norm_before(handed_on, *args)
        # Sources; activation, slope, slopes, residual.
        recompute_later(y, RecomputedNorm(tuple(args[0]), affine, tuple(args[6:10])))
        self.env.update(zip((node for node, on in zip(nodes, handed_on, strict=True) if on), again, strict=True))
        return y


def _read_after(graph: fx.Graph) -> dict[fx.Node, set[fx.Node]]:
    """For each norm, those of its sources that other nodes read after it."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    norms = graph.find_nodes(op="call_function", target=torch.ops.voxtune.norm_act.default)
    return {n: {s for s in n.all_input_nodes if any(order[u] > order[n] for u in s.users)} for n in norms}


def _pack_in_one_step(captured: Captured) -> None:
    """Weights of convolutions are packed and cast by one kernel, and so are their gradients on the way back."""
    from voxtune.kernels import conv3d
    from voxtune.kernels.packing import pack_as

    derivations = captured.derived.derivations
    for name, derivation in list(derivations.items()):
        part = derivation.args[0] if derivation.args else None
        inner = derivations.get(part.name) if isinstance(part, Ref) else part
        functions = derivation.function, inner.function if isinstance(inner, Derivation) else None
        if inner is not None and functions == (torch.ops.aten.to.dtype, conv3d.pack):
            derivations[name] = Derivation(pack_as, (inner.args[0], derivation.args[1]), {})


def training_network(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any] | None, plan: Plan
) -> TrainingNetwork:
    """The network rewritten by a plan's passes, for these sizes of inputs; InputError if it cannot be."""
    differs = next((n for n, m in model.named_modules() if isinstance(m, _DIFFERS) and getattr(m, "p", 1) != 0), None)
    if differs is not None:
        raise InputError(
            f"{differs} computes something else in training mode: dropout and batch norm are not supported"
        )
    target = PlanTarget(model, (tuple(args), kwargs or {}))
    captured = target.captured()
    if isinstance(captured, str):
        raise InputError(f"the network cannot be captured: {captured}")
    from voxtune.kernels.gradients import differentiable, register_gradients

    register_gradients()
    notes = rewrite(captured, plan, Context(target.device, plan.names, twin=target.device.type != "cuda"))
    for node in captured.graph.nodes:
        if node.op == "call_function" and not differentiable(node.target):
            raise InputError(f"{node.target} has no gradient")
    _pack_in_one_step(captured)
    return TrainingNetwork(model, captured, notes)

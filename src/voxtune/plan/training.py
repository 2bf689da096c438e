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
from voxtune.plan.derivation import LiveWeights, Ref, named_weights
from voxtune.plan.graph import Captured
from voxtune.plan.passes import Context
from voxtune.plan.plan import Plan

# Their results depend on the batch, or on chance, in training mode: an inference graph computes something else.
_DIFFERS = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd, nn.AlphaDropout)


class TrainingNetwork(nn.Module):
    """Computes what the network computes, with the plan's operators; gradients go to the network's parameters.

    It shares the network's parameters and buffers.
    """

    def __init__(self, original: nn.Module, captured: Captured, notes: dict[str, str]):
        super().__init__()
        for shared in ("_parameters", "_buffers", "_modules"):
            self.__dict__[shared] = original.__dict__[shared]
        self.__dict__.update(original=original, graph=captured.module, derived=captured.derived, notes=notes)
        # Not as submodules: they hold no parameters of their own.
        self.__dict__["runner"] = _Forgetting(captured.module)
        self.__dict__["weights"] = [n for n in captured.graph.nodes if n.op == "get_attr"]
        self.__dict__["live"] = LiveWeights(original, captured.module, captured.derived)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves = tree_flatten((args, kwargs))[0]
        self.runner.values = self._weights()
        try:
            result = self.runner.run(*leaves, enable_io_processing=False)
        finally:
            self.runner.values = {}
        return self.graph.graph.process_outputs(result)

    def _weights(self) -> dict[str, Tensor]:
        """The graph's weights as functions of the parameters."""
        known = {**self.derived.fixed, **dict(named_weights(self.original))}
        results: dict[Any, Any] = {}
        names = {str(node.target) for node in self.weights}
        ours = {n for n in names if n in known or n in self.derived.derivations}
        return {name: self.live._value(Ref(name), known, results) for name in ours}


class _Forgetting(fx.Interpreter):
    """Runs the graph with given weights; results of norms are computed again in the backward pass."""

    def __init__(self, module: fx.GraphModule):
        super().__init__(module)
        self.values: dict[str, Tensor] = {}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        from voxtune.kernels.gradients import forgetting

        with forgetting() if torch.is_grad_enabled() else nullcontext():
            return super().run(*args, **kwargs)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.values[target] if target in self.values else super().get_attr(target, args, kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        from voxtune.kernels.gradients import NormAgain, forget

        if target is not torch.ops.voxtune.norm_act.default or not torch.is_grad_enabled():
            return super().call_function(target, args, kwargs)
        sources, *between, _ = args
        y, _ = torch.ops.voxtune.norm_act_kept(*args)
        forget(y, NormAgain(tuple(sources), tuple(between)))
        return y


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
    return TrainingNetwork(model, captured, notes)

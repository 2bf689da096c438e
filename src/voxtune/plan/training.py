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
from voxtune.plan.derivation import LiveWeights
from voxtune.plan.graph import Captured
from voxtune.plan.passes import Context, PassStage, Precision, select
from voxtune.plan.plan import Plan

# Their results depend on the batch, or on chance, in training mode: an inference graph computes something else.
_DIFFERS = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd, nn.AlphaDropout)


# Those with passes whose operators have gradients, and the passes of these that have none.
_STAGES = (
    PassStage.LAYOUT,
    PassStage.CLEANUP,
    PassStage.SHARING,
    PassStage.NORM,
    PassStage.FUSION,
    PassStage.EDGES,
    PassStage.CONVOLUTION,
)
_WITHOUT_GRADIENTS = ("elementwise", "small_images")


def training_passes(precision: Precision) -> tuple[str, ...]:
    """The passes of a network that is trained in this precision."""
    return tuple(name for name in select(precision, *_STAGES) if name not in _WITHOUT_GRADIENTS)


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

    def run(self, *args: Any, **kwargs: Any) -> Any:
        from voxtune.kernels.gradients import recomputing_norms

        with recomputing_norms() if torch.is_grad_enabled() else nullcontext():
            return super().run(*args, **kwargs)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.values[target] if target in self.values else super().get_attr(target, args, kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        from voxtune.kernels.gradients import RecomputedNorm, recompute_later

        if target is not torch.ops.voxtune.norm_act.default or not torch.is_grad_enabled():
            return super().call_function(target, args, kwargs)
        y, affine = torch.ops.voxtune.norm_act_kept(*args)
        # Sources; activation, slope, slopes, residual.
        recompute_later(y, RecomputedNorm(tuple(args[0]), affine, tuple(args[6:10])))
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

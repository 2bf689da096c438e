"""Which module of a network computes the first value that is not finite, in its output or in its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from voxtune.training.plan_step import StepInputs


def first_not_finite(
    network: nn.Module,
    parts: Sequence[StepInputs],
    loss_of: Callable[[StepInputs], Tensor],
) -> str | None:
    """A sentence about the first NaN or infinity of a step, computed again by the original network; None if there is none.

    The order is that of the computation: images and masks, outputs of modules, the loss, gradients from the loss to the inputs.
    """
    names = {module: name or "the whole network" for name, module in network.named_modules()}
    events: list[str] = []

    def hook(module: nn.Module, _args: Any, output: Any) -> None:
        # A module is done after those inside it: the first to report is the innermost.
        for x in tree_flatten(output)[0]:
            if not isinstance(x, Tensor) or not x.is_floating_point():
                continue
            if not _finite(x):
                events.append(f"the first value that is not finite is in the output of {names[module]}")
            elif x.requires_grad:
                x.register_hook(lambda gradient, m=module: _watch(gradient, m))

    def _watch(gradient: Tensor, module: nn.Module) -> None:
        if not _finite(gradient):
            events.append(f"the first gradient that is not finite is that of the output of {names[module]}")

    handles = [module.register_forward_hook(hook) for module in names]
    try:
        for part in parts:
            for name, x in (("an image", part.images), ("a mask", part.conds)):
                if x is not None and not _finite(x):
                    return f"{name} of the batch has a value that is not finite"
            loss = loss_of(part)
            if not events and not _finite(loss):
                events.append("the first value that is not finite is the loss")
            if not events:
                loss.backward()
            if not events:
                events += [
                    f"the first gradient that is not finite is that of the parameter {name}"
                    for name, p in network.named_parameters()
                    if p.grad is not None and not _finite(p.grad)
                ]
            if events:
                return events[0]
    except torch.OutOfMemoryError:
        return "there is not enough memory to find the module"
    finally:
        for handle in handles:
            handle.remove()
        for p in network.parameters():
            p.grad = None
    return None


def _finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())

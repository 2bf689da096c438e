"""From a network and a plan to the rewritten network, with a record of what each pass did or why it did not apply."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from voxtune.files import one_line
from voxtune.plan.graph import Captured, capture
from voxtune.plan.measure import clocked
from voxtune.plan.passes import PASSES, Context
from voxtune.plan.passes.layout import lasting
from voxtune.plan.plan import Plan
from voxtune.plan.run import Inputs, Optimized, Runner, Signature

log = logging.getLogger("voxtune")


def rewrite(captured: Captured | None, plan: Plan, context: Context) -> dict[str, str]:
    """Runs the plan's passes in the house's order; gives a line for each."""
    notes = {}
    for one in PASSES:
        if one.name not in plan.names:
            continue
        reason = one.why_not(context)
        if reason is not None:
            notes[one.name] = f"does not apply: {reason}"
        elif one.rewrite is None:
            notes[one.name] = "in force"
        else:
            assert captured is not None, "a pass that applies was not expected to"
            outcome = one.rewrite(captured, context, plan.options(one.name))
            notes[one.name] = f"applied {outcome.applied} x" if outcome.applied else f"no effect: {outcome.reason}"
            if outcome.applied and outcome.notes:
                notes[one.name] += " (" + "; ".join(outcome.notes) + ")"
    return notes


class Subject:
    """A network and the inputs that plans are made for; captured once, however many plans are tried."""

    def __init__(self, model: nn.Module, inputs: Inputs):
        self.model, self.inputs = model, inputs
        self.signature = Signature.of(*inputs)
        self._captured: Captured | str | None = None

    @property
    def device(self) -> torch.device:
        return self.signature.device

    def captured(self) -> Captured | str:
        """A graph to rewrite, or why there is none."""
        if self._captured is None:
            try:
                with clocked("captured"):
                    self._captured = capture(self.model, *self.inputs)
            except Exception as error:  # torch.export raises of many families for what it cannot capture
                self._captured = f"{type(error).__name__}: {one_line(error)}"
        return self._captured if isinstance(self._captured, str) else self._captured.clone()

    def build(self, plan: Plan, *, twin: bool = False) -> Optimized:
        """The network rewritten for the inputs' shapes, types and device. Neither gated nor measured here.

        A `twin` applies every rewriting there is, kernel or not: for the gate, which asks if the graph is still the same.
        """
        context = Context(self.device, plan.names, twin)
        if any(p.rewrite is not None and p.name in plan.names and p.why_not(context) is None for p in PASSES):
            captured = self.captured()
            if isinstance(captured, str):
                return _uncaptured(self.model, plan, context, self.signature, captured)
            with clocked("rewritten"):
                notes: dict[str, str] = rewrite(captured, plan, context)
            inner: nn.Module = captured.module
        else:
            notes, inner = rewrite(None, plan, context), self.model
        return self._wrap(inner, plan, notes, context)

    def restore(self, plan: Plan, inner: nn.Module, notes: dict[str, str]) -> Optimized:
        """A network that `build` made in an earlier process."""
        return self._wrap(inner, plan, notes, Context(self.device, plan.names, False))

    def _wrap(self, inner: nn.Module, plan: Plan, notes: dict[str, str], context: Context) -> Optimized:
        return Optimized(self.model, Runner(inner, _in_force(plan, notes), context), plan, notes, self.signature)


def build(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any] | None, plan: Plan, *, twin: bool = False
) -> Optimized:
    """One plan for one network; see `Subject.build`."""
    return Subject(model, (tuple(args), kwargs or {})).build(plan, twin=twin)


def _uncaptured(model: nn.Module, plan: Plan, context: Context, signature: Signature, why: str) -> Optimized:
    """A network that is no static graph still has what needs no graph: its layout, its type, TF32."""
    notes = {p.name: "no effect: the network could not be captured" for p in PASSES if p.name in plan.names}
    log.warning("the network could not be captured as a graph (%s): only passes on whole modules apply", why)
    network = model
    casting = context.dtype if context.dtype != torch.float32 else None
    if context.channels_last:
        network = copy.deepcopy(model)
        for parameter in network.parameters():
            parameter.data = lasting(parameter.data)
        notes["channels_last"] = "applied to the weights"
    for name in ("strict", "tf32", "cudnn_benchmark", "compile", "cuda_graph", "heap"):
        if name in plan.names:
            reason = next(p for p in PASSES if p.name == name).why_not(context)
            notes[name] = "in force" if reason is None else f"does not apply: {reason}"
    if casting is not None:
        notes["bf16" if casting == torch.bfloat16 else "fp16"] = "by autocast"
    notes["capture"] = f"failed: {why}"
    runner = Runner(network, _in_force(plan, notes), context, autocast=casting)
    return Optimized(model, runner, plan, notes, signature)


def _in_force(plan: Plan, notes: dict[str, str]) -> frozenset[str]:
    return frozenset(n for n in plan.names if notes.get(n) == "in force")

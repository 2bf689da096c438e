"""Builds the rewritten network from a network and a plan, and records what each pass did or why it did not apply."""

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
from voxtune.plan.passes import PASSES, Context, Pass
from voxtune.plan.passes.base import HALF
from voxtune.plan.plan import Plan
from voxtune.plan.run import Inputs, Optimized, Runner, Signature

log = logging.getLogger("voxtune")
# The note of a pass that acts when the plan runs.
IN_FORCE = "in force"


def rewrite(captured: Captured | None, plan: Plan, context: Context) -> dict[str, str]:
    """Runs the plan's passes in the order of PASSES; returns a note for each."""
    notes = {}
    for step in _passes(plan):
        if step.rewrite is None or step.why_not(context) is not None:
            notes[step.name] = _note(step, context)
            continue
        assert captured is not None, "no graph was captured for a pass that rewrites it"
        outcome = step.rewrite(captured, context, plan.options(step.name))
        notes[step.name] = f"applied {outcome.applied} x" if outcome.applied else f"no effect: {outcome.reason}"
        if outcome.applied and outcome.notes:
            notes[step.name] += " (" + "; ".join(outcome.notes) + ")"
    return notes


def _passes(plan: Plan) -> list[Pass]:
    return [p for p in PASSES if p.name in plan.names]


def _note(step: Pass, context: Context) -> str:
    reason = step.why_not(context)
    return IN_FORCE if reason is None else f"does not apply: {reason}"


class PlanTarget:
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
            except Exception as error:  # torch.export raises many kinds of errors
                self._captured = f"{type(error).__name__}: {one_line(error)}"
        return self._captured if isinstance(self._captured, str) else self._captured.clone()

    def build(self, plan: Plan, *, twin: bool = False) -> Optimized:
        """The network rewritten for the inputs' shapes, types and device. It is neither gated nor measured.

        A `twin` applies every rewrite, with or without kernels on this device: the gate uses it to check the graph.
        """
        context = Context(self.device, plan.names, twin)
        if any(p.rewrite is not None and p.why_not(context) is None for p in _passes(plan)):
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
        """A network that `build` rewrote in an earlier process."""
        return self._wrap(inner, plan, notes, Context(self.device, plan.names, False))

    def _wrap(self, inner: nn.Module, plan: Plan, notes: dict[str, str], context: Context) -> Optimized:
        return Optimized(self.model, Runner(inner, _in_force(plan, notes), context), plan, notes, self.signature)


def build(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any] | None, plan: Plan, *, twin: bool = False
) -> Optimized:
    """One plan for one network; see `PlanTarget.build`."""
    return PlanTarget(model, (tuple(args), kwargs or {})).build(plan, twin=twin)


def _uncaptured(model: nn.Module, plan: Plan, context: Context, signature: Signature, why: str) -> Optimized:
    """A network without a static graph: only passes that need no graph apply (memory format, precision, run-time flags)."""
    log.warning("the network could not be captured as a graph (%s): only passes on whole modules apply", why)
    network, autocast = model, None
    notes = {}
    for step in _passes(plan):
        if step.rewrite is None:
            notes[step.name] = _note(step, context)
        elif step.precision in HALF:
            notes[step.name], autocast = "by autocast", HALF[step.precision]
        elif step.rewrite_module is not None:
            network = copy.deepcopy(model) if network is model else network
            step.rewrite_module(network)
            notes[step.name] = "applied to the weights"
        else:
            notes[step.name] = "no effect: the network could not be captured"
    notes["capture"] = f"failed: {why}"
    runner = Runner(network, _in_force(plan, notes), context, autocast=autocast)
    return Optimized(model, runner, plan, notes, signature)


def _in_force(plan: Plan, notes: dict[str, str]) -> frozenset[str]:
    return frozenset(n for n in plan.names if notes.get(n) == IN_FORCE)

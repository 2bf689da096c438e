"""Builds the rewritten network from a network and a plan, and records what each pass did or why it did not apply."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from voxtune.files import one_line
from voxtune.plan.derivation import Derived, LiveWeights
from voxtune.plan.graph import Captured, WritesInPlaceError, capture, raising_line
from voxtune.plan.measure import clocked
from voxtune.plan.optimized import Optimized, Variant
from voxtune.plan.passes import BY_NAME, PASSES, Context, Pass
from voxtune.plan.passes.base import EXCEPTED
from voxtune.plan.passes.execution import CUDA_GRAPH
from voxtune.plan.passes.layout import CHANNELS_LAST
from voxtune.plan.plan import Plan
from voxtune.plan.run import GraphPool, Inputs, Runner, Signature
from voxtune.plan.tiling import load_tiles
from voxtune.precision import HALF

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
        reason = outcome.reason or "nothing to change"
        notes[step.name] = f"applied {outcome.applied} x" if outcome.applied else f"no effect: {reason}"
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

    def __init__(self, model: nn.Module, inputs: Inputs, *, pool: GraphPool | None = None):
        self.model, self.inputs, self.pool = model, inputs, pool
        self.signature = Signature.of(*inputs)
        load_tiles(self.device)
        self._captured: Captured | str | None = None

    @property
    def device(self) -> torch.device:
        return self.signature.device

    @property
    def uncaptured(self) -> str | None:
        """Why the network could not be captured, if that was tried."""
        return self._captured if isinstance(self._captured, str) else None

    def captured(self) -> Captured | str:
        """A graph to rewrite, or why there is none."""
        if self._captured is None:
            try:
                # Autocast would become casts of the graph; the plan has a precision of its own.
                with clocked("captured"), torch.autocast(self.device.type, enabled=False):
                    self._captured = capture(self.model, *self.inputs)
            except Exception as error:  # torch.export raises many kinds of errors
                line = "" if isinstance(error, WritesInPlaceError) else raising_line(error)
                self._captured = f"{type(error).__name__}: {one_line(error)}{line}"
                log.warning(
                    "the network could not be captured as a graph (%s): only passes on whole modules apply",
                    self._captured,
                )
        return self._captured if isinstance(self._captured, str) else self._captured.clone()

    def build(self, plan: Plan, *, twin: bool = False) -> Optimized:
        """The network rewritten for the inputs' shapes, types and device. It is neither gated nor measured.

        A `twin` applies every rewrite, with or without kernels on this device: the gate uses it to check the graph.
        """
        context = Context(self.device, plan.names, twin)
        if not any(p.rewrite is not None and p.why_not(context) is None for p in _passes(plan)):
            notes = rewrite(None, plan, context)
            # A recorded graph reads the memory of its weights: those of a copy stay where they are.
            inner = copy.deepcopy(self.model) if CUDA_GRAPH.name in _in_force(plan, notes) else self.model
            return self._wrap(inner, plan, notes, context)
        captured = self.captured()
        if isinstance(captured, str):
            return self._uncaptured(plan, context, captured)
        with clocked("rewritten"), torch.autocast(self.device.type, enabled=False):
            notes = rewrite(captured, plan, context)
            captured.own_weights()
        return self._wrap(captured.module, plan, notes, context, captured.derived)

    def restore(self, plan: Plan, inner: nn.Module, notes: dict[str, str], derived: Derived) -> Optimized:
        """A network that `build` rewrote in an earlier process."""
        return self._wrap(inner, plan, notes, Context(self.device, plan.names, False), derived)

    def original(self, plan: Plan) -> Optimized:
        """The network as it is, called in the caller's precision; `plan` is empty but for its evidence."""
        return Optimized(self.model, Variant(None, plan, {}, self.signature))

    def _wrap(
        self,
        inner: nn.Module,
        plan: Plan,
        notes: dict[str, str],
        context: Context,
        derived: Derived | None = None,
        autocast: torch.dtype | None = None,
    ) -> Optimized:
        runner = Runner(
            inner,
            _in_force(plan, notes),
            context,
            weights=None if inner is self.model else LiveWeights(self.model, inner, derived),
            autocast=autocast,
            pool=self.pool,
        )
        names = _effective(plan, notes)
        effective = Plan(tuple(s for s in plan.steps if s.name in names), plan.made_for, plan.evidence)
        return Optimized(self.model, Variant(runner, effective, notes, self.signature))

    def _uncaptured(self, plan: Plan, context: Context, why: str) -> Optimized:
        """A network without a static graph: only passes that need no graph apply (memory format, precision, run-time flags)."""
        network, autocast = self.model, None
        notes = {}
        for step in _passes(plan):
            if step.rewrite is None:
                notes[step.name] = _note(step, context)
            elif step.precision in HALF:
                notes[step.name], autocast = "by autocast", HALF[step.precision]
            elif step.rewrite_module is not None:
                network = copy.deepcopy(self.model) if network is self.model else network
                step.rewrite_module(network)
                notes[step.name] = "applied to the weights"
            else:
                notes[step.name] = "no effect: the network could not be captured"
        if CUDA_GRAPH.name in _in_force(plan, notes) and network is self.model:
            network = copy.deepcopy(self.model)
        notes["capture"] = f"failed: {why}"
        return self._wrap(network, plan, notes, context, autocast=autocast)


def build(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any] | None, plan: Plan, *, twin: bool = False
) -> Optimized:
    """One plan for one network; see `PlanTarget.build`."""
    return PlanTarget(model, (tuple(args), kwargs or {})).build(plan, twin=twin)


def _effective(plan: Plan, notes: dict[str, str]) -> set[str]:
    """The passes that are in force; one that selects a precision is, also where it finds nothing to cast.

    One whose every convolution the plan excepts stays: it applies at other sizes. So does the memory format that the kernels of
    another one read, also where these take every convolution.
    """

    def in_force(name: str) -> bool:
        idle = notes[name].startswith(("no effect", "does not apply")) and notes[name] != f"no effect: {EXCEPTED}"
        return BY_NAME[name].precision is not None or not idle

    names = {name for name in plan.names if in_force(name)}
    if any(BY_NAME[name].needs_channels_last for name in names):
        names |= {CHANNELS_LAST.name} & set(plan.names)
    return names


def _in_force(plan: Plan, notes: dict[str, str]) -> frozenset[str]:
    return frozenset(n for n in plan.names if notes.get(n) == IN_FORCE)

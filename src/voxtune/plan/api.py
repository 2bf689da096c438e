"""`optimize`: a network, example inputs and a plan in; a faster network that passed the gate out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from voxtune.errors import InputError
from voxtune.plan.build import Subject, build
from voxtune.plan.cache import graph_place, identity, remember, remembered, unlike
from voxtune.plan.gate import Trajectory
from voxtune.plan.hazards import refuses_half
from voxtune.plan.measure import clocked
from voxtune.plan.passes.base import HALF
from voxtune.plan.plan import Plan
from voxtune.plan.run import Inputs, Optimized, kernels_ready
from voxtune.plan.saved_graph import keep, kept
from voxtune.plan.tuner import Tuned, first_admitted, gate_for, judge, precision_of, tune

log = logging.getLogger("voxtune")

BASELINE = Plan.of("strict")
FUSED = (
    "channels_last",
    "cleanup",
    "sdpa",
    "time",
    "fuse_norm",
    "epilogue",
    "pointwise",
    "upsample",
    "cudnn_benchmark",
)
# What a GPU is given without a search, the fastest first; the first that the gate lets through is taken.
READY = (
    Plan.of("bf16", *FUSED, "edges", "conv3d", "cuda_graph"),
    Plan.of("bf16", *FUSED, "cuda_graph"),
    Plan.of("bf16", *FUSED),
    Plan.of("tf32", *FUSED),
    Plan.of("tf32"),
)
# Exact, and without a search.
CPU_READY = (Plan.of("cleanup", "sdpa", "time", "channels_last"),)


def optimize(
    model: nn.Module,
    example_inputs: Sequence[Any] | torch.Tensor,
    plan: str | Path | Plan = "auto",
    *,
    example_kwargs: dict[str, Any] | None = None,
    trajectory: Trajectory | None = None,
    cache: bool = True,
    search: bool = True,
    say: Callable[[str], None] = lambda _line: None,
) -> Optimized:
    """The network rewritten by a plan, gated against itself. Inference only.

    `plan` is "auto" (the cached one; else on a GPU the fastest known that passes the gate, on a CPU the fastest of those
    measured), "baseline" (float32, nothing rewritten), a Plan, or a plan's file. A plan whose evidence is of another model,
    shape, card or version is gated again, and refused with an InputError if it fails. Without `search`, "auto" on a CPU is
    the cached plan or the baseline, and measures nothing.
    """
    args = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else tuple(example_inputs)
    with torch.inference_mode(False):
        plainly = lambda x: x.clone() if x.is_inference() else x  # noqa: E731
        inputs: Inputs = tree_map_only(torch.Tensor, plainly, (args, example_kwargs or {}))
        return _optimize(model, inputs, plan, trajectory, cache=cache, search=search, say=say)


def _optimize(
    model: nn.Module,
    inputs: Inputs,
    plan: str | Path | Plan,
    trajectory: Trajectory | None,
    *,
    cache: bool,
    search: bool,
    say: Callable[[str], None],
) -> Optimized:
    args = inputs[0]
    if not any(isinstance(a, torch.Tensor) for a in (*args, *inputs[1].values())):
        raise InputError("example_inputs hold no tensor")
    if model.training:
        raise InputError("the network is in training mode: call .eval() first; a plan is for inference")
    if isinstance(plan, Plan):
        return _given(Subject(model, inputs), plan, "the plan", trajectory)
    if str(plan) == "baseline":
        return build(model, *inputs, BASELINE)
    if str(plan) != "auto":
        path = Path(plan)
        return _given(Subject(model, inputs), Plan.load(path), str(path), trajectory)
    return _auto(model, inputs, trajectory, cache=cache, search=search, say=say)


def _given(subject: Subject, plan: Plan, where: str, trajectory: Trajectory | None) -> Optimized:
    here = identity(subject.model, subject.inputs)
    # Evidence counts only where it was measured, and only if it says that the plan passed.
    reason = unlike(plan.made_for, here) if plan.evidence.get("gate") else "it carries no evidence"
    network = subject.build(plan)
    if reason is None:
        return network
    log.info("%s is gated again: %s", where, reason)
    half = refuses_half(network.signature.device) if precision_of(plan) in HALF else None
    if half is not None:
        raise InputError(f"{where}: refused: {half}")
    verdict = judge(subject, network, gate_for(subject, trajectory))
    if not verdict.passed:
        raise InputError(f"{where}: refused by the gate: {verdict.reason}; use --plan auto, or tune one here")
    network.plan = Plan(plan.steps, here, {"gate": verdict.figures})
    return network


def _auto(
    model: nn.Module,
    inputs: Inputs,
    trajectory: Trajectory | None,
    *,
    cache: bool,
    search: bool,
    say: Callable[[str], None],
) -> Optimized:
    with clocked("identified"):
        here = identity(model, inputs)
    known = remembered(here) if cache else None
    if known is not None:
        return _known(Subject(model, inputs), known)
    if next(model.parameters()).device.type == "cuda":
        network = _ready(Subject(model, inputs), here, trajectory)
    elif search:
        network = _tuned(model, inputs, trajectory, say)
    else:
        say("no plan was tuned for this model and size on this CPU: it runs as it is; `voxtune tune` finds one, once")
        return build(model, *inputs, BASELINE)
    if cache:
        remember(network.plan)
        keep(graph_place(network.plan), network.runner.inner, network.notes, network.signature.device)
    return network


def _known(subject: Subject, plan: Plan) -> Optimized:
    """By a plan that passed the gate here: from the graph that it left, else rewritten once more."""
    place = graph_place(plan)
    with clocked("read back"):
        found = kept(place, subject.device)
    if found is None:
        network = subject.build(plan)
        keep(place, network.runner.inner, network.notes, subject.device)
    else:
        network = subject.restore(plan, *found)
    with clocked("kernels ready"), kernels_ready(network, subject.inputs):
        pass
    return network


def _tuned(model: nn.Module, inputs: Inputs, trajectory: Trajectory | None, say: Callable[[str], None]) -> Optimized:
    found: Tuned = tune(model, *inputs, trajectory=trajectory, say=say)
    found.network.plan = found.plan
    return found.network


def _ready(subject: Subject, here: dict[str, Any], trajectory: Trajectory | None) -> Optimized:
    found = first_admitted(subject, READY, gate_for(subject, trajectory))
    if found is None:
        network = subject.build(BASELINE)
        network.plan = Plan(BASELINE.steps, here, {})
        return network
    network, verdict = found
    network.plan = Plan(network.plan.steps, here, {"gate": verdict.figures})
    return network

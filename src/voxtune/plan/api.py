"""`optimize`: takes a network, example inputs and a plan; returns a faster network that passed the gate."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from voxtune.errors import InputError
from voxtune.plan.build import PlanTarget, build
from voxtune.plan.cache import graph_path, identity, mismatch, remember, remembered
from voxtune.plan.gate import Trajectory
from voxtune.plan.hazards import refuses_half
from voxtune.plan.measure import clocked
from voxtune.plan.passes import PassStage, precision_of, select
from voxtune.plan.passes.base import HALF
from voxtune.plan.plan import Plan
from voxtune.plan.run import Inputs, Optimized, kernels_ready
from voxtune.plan.saved_graph import load_graph, save_graph
from voxtune.plan.tuner import BASELINE, SHARED, Tuned, first_admitted, gate_for, judge, tune

log = logging.getLogger("voxtune")

_FUSED = (PassStage.LAYOUT, *SHARED, PassStage.NORM, PassStage.FUSION, PassStage.AUTOTUNING)
FUSED = select(*_FUSED)
# Plans for a GPU without a search, fastest first; the first one that passes the gate is used.
READY = (
    Plan.of(*select("bf16", *_FUSED, PassStage.EDGES, PassStage.CONVOLUTION, PassStage.CUDA_GRAPH)),
    Plan.of(*select("bf16", *_FUSED, PassStage.CUDA_GRAPH)),
    Plan.of(*select("bf16", *_FUSED)),
    Plan.of(*select("tf32", *_FUSED)),
    Plan.of(*select("tf32")),
)
# Exact, and without a search.
CPU_READY = (Plan.of(*select(*SHARED, PassStage.LAYOUT)),)


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
    """Rewrites a network by a plan and compares the result with the original. Inference only.

    `plan` is "auto", "baseline" (float32, nothing rewritten), a Plan, or the path of a plan file. "auto" uses the cached plan
    if there is one; otherwise on a GPU the first ready-made plan that passes the gate, on a CPU the fastest one the tuner
    finds. Without `search`, "auto" on a CPU uses the cached plan or the baseline and measures nothing. A plan whose evidence
    is for another model, input shape, device or version is gated again; InputError is raised if it fails.
    """
    args = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else tuple(example_inputs)
    with torch.inference_mode(False):
        usable = lambda x: x.clone() if x.is_inference() else x  # noqa: E731
        inputs: Inputs = tree_map_only(torch.Tensor, usable, (args, example_kwargs or {}))
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
        raise InputError("example_inputs contain no tensor")
    if model.training:
        raise InputError("the network is in training mode; plans are for inference: call .eval() first")
    if isinstance(plan, Plan):
        return _from_plan(PlanTarget(model, inputs), plan, "the plan", trajectory)
    if str(plan) == "baseline":
        return build(model, *inputs, BASELINE)
    if str(plan) != "auto":
        path = Path(plan)
        return _from_plan(PlanTarget(model, inputs), Plan.load(path), str(path), trajectory)
    return _auto(model, inputs, trajectory, cache=cache, search=search, say=say)


def _from_plan(target: PlanTarget, plan: Plan, where: str, trajectory: Trajectory | None) -> Optimized:
    here = identity(target.model, target.inputs)
    # Evidence is valid only for what it was measured on, and only if the plan passed.
    reason = mismatch(plan.made_for, here) if plan.evidence.get("gate") else "it has no evidence"
    network = target.build(plan)
    if reason is None:
        return network
    log.info("%s is gated again: %s", where, reason)
    no_half = refuses_half(network.signature.device) if precision_of(plan.names) in HALF else None
    if no_half is not None:
        raise InputError(f"{where}: refused: {no_half}")
    verdict = judge(target, network, gate_for(target, trajectory))
    if not verdict.passed:
        raise InputError(f"{where}: refused by the gate: {verdict.reason}; use --plan auto, or run voxtune tune here")
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
    with clocked("network hashed"):
        here = identity(model, inputs)
    cached = remembered(here) if cache else None
    if cached is not None:
        return _from_cache(PlanTarget(model, inputs), cached)
    if next(model.parameters()).device.type == "cuda":
        network = _ready(PlanTarget(model, inputs), here, trajectory)
    elif search:
        network = _tuned(model, inputs, trajectory, say)
    else:
        say(
            "no tuned plan for this model and size on this CPU; running the original network (`voxtune tune` finds a plan)"
        )
        return build(model, *inputs, BASELINE)
    if cache:
        remember(network.plan)
        save_graph(graph_path(network.plan), network.runner.inner, network.notes, network.signature.device)
    return network


def _from_cache(target: PlanTarget, plan: Plan) -> Optimized:
    """A plan that passed the gate here: uses its saved graph, or rewrites the network again."""
    path = graph_path(plan)
    with clocked("graph loaded"):
        saved = load_graph(path, target.device)
    if saved is None:
        network = target.build(plan)
        save_graph(path, network.runner.inner, network.notes, target.device)
    else:
        network = target.restore(plan, *saved)
    with clocked("kernels ready"), kernels_ready(network, target.inputs):
        pass
    return network


def _tuned(model: nn.Module, inputs: Inputs, trajectory: Trajectory | None, say: Callable[[str], None]) -> Optimized:
    tuned: Tuned = tune(model, *inputs, trajectory=trajectory, say=say)
    tuned.network.plan = tuned.plan
    return tuned.network


def _ready(target: PlanTarget, here: dict[str, Any], trajectory: Trajectory | None) -> Optimized:
    admitted = first_admitted(target, READY, gate_for(target, trajectory))
    if admitted is None:
        network = target.build(BASELINE)
        network.plan = Plan(BASELINE.steps, here, {})
        return network
    network, verdict = admitted
    network.plan = Plan(network.plan.steps, here, {"gate": verdict.figures})
    return network

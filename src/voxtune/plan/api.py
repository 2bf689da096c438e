"""`optimize`: takes a network, example inputs and a plan; returns a faster network that passed the gate."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from voxtune.errors import InputError
from voxtune.plan.build import PlanTarget
from voxtune.plan.cache import graph_path, identity, mismatch, remember, remembered
from voxtune.plan.gains import GAIN_SECONDS, gains
from voxtune.plan.gate import Trajectory
from voxtune.plan.hazards import refuses_half
from voxtune.plan.measure import clocked
from voxtune.plan.optimized import Optimized, Variant, precision_in_force, weights_type
from voxtune.plan.passes import Precision, precision_of
from voxtune.plan.plan import Plan
from voxtune.plan.run import GraphPool, Inputs, kernels_ready
from voxtune.plan.saved_graph import load_graph, save_graph
from voxtune.plan.search import CPU_READY, READY, Search, fastest, ready_plans
from voxtune.plan.tuner import BASELINE, first_admitted, gate_for, judge
from voxtune.precision import HALF

__all__ = ["CPU_READY", "READY", "Request", "RequestedPrecision", "optimize", "ready_plans", "to_stderr"]

log = logging.getLogger("voxtune")
# "same": as plain PyTorch computes when the network is called; "auto": whatever the gate accepts.
RequestedPrecision = Literal["same", "auto", "fp32", "tf32", "bf16", "fp16"]


def to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the caller of `optimize` requested, apart from the network and its inputs."""

    precision: RequestedPrecision = "same"
    search: Search = "quick"
    trajectory: Trajectory | None = None
    cache: bool = True
    say: Callable[[str], None] = to_stderr

    def __post_init__(self) -> None:
        if self.precision not in get_args(RequestedPrecision):
            raise InputError(f"precision {self.precision!r}: choose from {', '.join(get_args(RequestedPrecision))}")
        if self.search not in ("quick", "full", False):
            raise InputError(f"search {self.search!r}: choose 'quick', 'full' or False")

    def precisions(self, model: nn.Module, device: torch.device) -> tuple[Precision, ...]:
        """The precisions of the candidates, in the order in which they are tried."""
        if self.precision == "auto":
            return ("bf16", "tf32", "fp32") if device.type == "cuda" else ("fp32", "bf16")
        if self.precision == "same":
            return (precision_in_force(weights_type(model), device),)
        if self.precision == "tf32" and device.type == "cpu":
            return ("fp32",)
        return (self.precision,)

    def key(self, model: nn.Module, device: torch.device) -> dict[str, str]:
        """What a cached plan depends on, apart from the network, the inputs and the machine."""
        return {"precision": f"{self.precision}: {', '.join(self.precisions(model, device))}"}


def optimize(
    model: nn.Module,
    example_inputs: Sequence[Any] | torch.Tensor,
    plan: str | Path | Plan = "auto",
    *,
    precision: RequestedPrecision = "same",
    search: Search | bool = "quick",
    example_kwargs: dict[str, Any] | None = None,
    trajectory: Trajectory | None = None,
    cache: bool = True,
    memory_limit: int | None = None,
    say: Callable[[str], None] | None = None,
    pool: GraphPool | None = None,
) -> Optimized:
    """A network with the same parameters that runs faster, compared with the original by the gate. Inference only.

    `plan` is "auto", "baseline" (float32, nothing rewritten), a Plan, or the path of a plan file. A plan whose evidence is for
    another network, input shape, device or version is gated again; InputError is raised if it fails.

    For "auto", `search="quick"` times a few plans against the original network, as the caller runs it, and returns the fastest
    that passes the gate, which may be the original; `search="full"` also tries torch.compile; `search=False` measures nothing:
    the cached plan, or on a GPU the first ready-made plan that passes the gate, else the original. A cached plan is used at once.

    `precision="same"` computes as the network would without a plan: in float32 within 1e-4, with TF32 if PyTorch's flag for
    convolutions allows it, in half precision if the weights are, or autocast is on when the network is called. "fp32", "tf32",
    "bf16" and "fp16" are as named; "auto" is the fastest of these that the gate accepts.

    `memory_limit` (bytes): the graphs of other input sizes are dropped if they need more. `say` receives the progress.
    """
    args = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else tuple(example_inputs)
    searched: Search = ("quick" if search else False) if isinstance(search, bool) else search
    with torch.inference_mode(False):
        usable = lambda x: x.clone() if x.is_inference() else x  # noqa: E731
        inputs: Inputs = tree_map_only(torch.Tensor, usable, (args, example_kwargs or {}))
        if not any(isinstance(a, torch.Tensor) for a in (*inputs[0], *inputs[1].values())):
            raise InputError("example_inputs contain no tensor")
        if model.training:
            raise InputError("the network is in training mode: call .eval() first, or pass train=True to train it")
        on_cpu = PlanTarget(model, inputs).device.type == "cpu"
        request = Request(
            precision=precision,
            search=searched,
            trajectory=trajectory,
            cache=cache,
            say=say or (to_stderr if on_cpu else log.info),
        )
        network = _optimize(PlanTarget(model, inputs, pool=pool), plan, request)
    network.memory_limit = memory_limit
    return network


def _optimize(target: PlanTarget, plan: str | Path | Plan, request: Request) -> Optimized:
    if str(plan) == "baseline":
        return target.build(BASELINE)
    if str(plan) == "auto":
        network = _auto(target, request)
        follows = request.precision == "same"
        return network.following(Variants(request, None), follows_precision=follows)
    given = plan if isinstance(plan, Plan) else Plan.load(Path(plan))
    network = _from_plan(target, given, "the plan" if isinstance(plan, Plan) else str(plan), request.trajectory)
    return network.following(Variants(request, given))


@dataclass(frozen=True)
class Variants:
    """Makes variants of an optimized network: for other sizes of inputs from its plan, in other precisions by a search."""

    request: Request
    plan: Plan | None

    def __call__(self, network: Optimized, inputs: Inputs, precision: Precision | None) -> Variant:
        with torch.inference_mode(False):
            usable = lambda x: x.clone() if x.is_inference() else x  # noqa: E731
            pool = network.pool or GraphPool()
            target = PlanTarget(network.original, tree_map_only(torch.Tensor, usable, inputs), pool=pool)
            plan = self.plan
            if plan is None and precision == network.precision:
                plan = network.plan
            if plan is None:
                return _auto(target, self.request).variant
            if not plan.steps:
                return target.original(plan).variant
            return _from_plan(target, plan, "the plan", None).variant

    def __reduce__(self) -> Any:
        # Functions of the caller cannot be pickled.
        request = Request(precision=self.request.precision, search=self.request.search, cache=self.request.cache)
        return Variants, (request, self.plan)


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
    with _no_autocast(target):
        verdict = judge(target, network, gate_for(target, trajectory))
    if not verdict.passed:
        raise InputError(f"{where}: refused by the gate: {verdict.reason}; use --plan auto, or run voxtune tune here")
    network.plan = Plan(network.plan.steps, here, {"gate": verdict.figures})
    return network


def _no_autocast(target: PlanTarget) -> Any:
    return torch.autocast(target.device.type, enabled=False)


def _auto(target: PlanTarget, request: Request) -> Optimized:
    precisions = request.precisions(target.model, target.device)
    with clocked("network hashed"):
        here = identity(target.model, target.inputs) | request.key(target.model, target.device)
    cached = remembered(here) if request.cache else None
    if cached is not None and (request.search != "full" or cached.evidence.get("search") == "full"):
        return _from_cache(target, cached)
    if not request.search:
        network = _unsearched(target, here, request, precisions)
        if network is None:
            return target.original(Plan(()))
    else:
        network = _searched(target, here, request, precisions)
    if request.cache:
        remember(network.plan)
        if network.plan.steps:
            save_graph(graph_path(network.plan), network)
    return network


def _searched(target: PlanTarget, here: dict[str, Any], request: Request, precisions: Sequence[Precision]) -> Optimized:
    autocast = torch.is_autocast_enabled(target.device.type)
    half = torch.get_autocast_dtype(target.device.type) if autocast else None

    def as_called(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(target.device.type, half) if autocast else nullcontext():
            return target.model(*args, **kwargs)

    with _no_autocast(target):
        gate = gate_for(target, request.trajectory, same=request.precision == "same")
        result = fastest(target, as_called, precisions, gate, request.search, request.say)
        gained = request.search == "full" and bool(result.network.plan.steps)
        evidence: dict[str, Any] = {"gains": gains(target, result.network, GAIN_SECONDS, request.say)} if gained else {}
    rows = [row.describe() for row in result.rows]
    verdict = next((r.verdict for r in result.rows if r.kept and r.verdict is not None), None)
    gated = {"original": True} if verdict is None else verdict.figures
    evidence |= {"gate": gated, "search": request.search, "waterfall": rows}
    if target.uncaptured is not None:
        evidence["uncaptured"] = target.uncaptured
    result.network.plan = Plan(result.network.plan.steps, here, evidence)
    return result.network


def _unsearched(
    target: PlanTarget, here: dict[str, Any], request: Request, precisions: Sequence[Precision]
) -> Optimized | None:
    """Without measuring: on a GPU the first ready-made plan that the gate accepts; None: the original."""
    if target.device.type != "cuda":
        request.say(
            "no tuned plan for this model and size on this CPU; running the original network (`voxtune tune` finds a plan)"
        )
        return None
    with _no_autocast(target):
        gate = gate_for(target, request.trajectory, same=request.precision == "same")
        admitted = first_admitted(target, ready_plans(precisions), gate)
    if admitted is None:
        return None
    network, verdict = admitted
    network.plan = Plan(network.plan.steps, here, {"gate": verdict.figures})
    return network


def _from_cache(target: PlanTarget, plan: Plan) -> Optimized:
    """A plan that passed the gate here: uses its saved graph, or rewrites the network again."""
    if not plan.steps:
        return target.original(plan)
    path = graph_path(plan)
    with clocked("graph loaded"):
        saved = load_graph(path, target.device)
    if saved is None:
        network = target.build(plan)
        network.plan = plan
        save_graph(path, network)
    else:
        network = target.restore(plan, *saved)
    with clocked("kernels ready"), kernels_ready(network, target.inputs):
        pass
    return network

"""The ways of a training step that gpu_unet3d_train.py compares: PyTorch, torch.compile, the plan, and the plan in parts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from networks import FOREIGN
from torch import Tensor, nn

import voxtune
from voxtune.plan.passes import BY_NAME, PASSES, PassStage
from voxtune.plan.plan import Plan
from voxtune.plan.training import training_network, training_passes
from voxtune.plan.weight_gradients import measure_weight_gradients

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
Forward = Callable[..., Any]


def last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=FORMATS[x.dim()]) if x.dim() in FORMATS else x


def plain(net: nn.Module, _xs: tuple[Tensor, ...]) -> Forward:
    return net


def autocast(net: nn.Module, _xs: tuple[Tensor, ...]) -> Forward:
    def forward(*xs: Tensor) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return net(*xs)

    return forward


def compiled(net: nn.Module, xs: tuple[Tensor, ...]) -> Forward:
    for p in net.parameters():
        p.data = last(p.data)
    return autocast(torch.compile(net, dynamic=False), xs)


def planned(plan: Plan) -> Callable[[nn.Module, tuple[Tensor, ...]], Forward]:
    def build(net: nn.Module, xs: tuple[Tensor, ...]) -> Forward:
        rewritten = training_network(net, xs, None, plan)
        measure_weight_gradients(rewritten, xs)
        return rewritten

    return build


def optimized(net: nn.Module, xs: tuple[Tensor, ...]) -> Forward:
    fast = voxtune.optimize(
        net, xs, precision="bf16", train=True, say=lambda line: print("   ", line, file=sys.stderr, flush=True)
    )
    print("   ", fast.report().replace("\n", "\n    "), file=sys.stderr, flush=True)
    return fast


def cudnn_weight_gradients(net: nn.Module, xs: tuple[Tensor, ...]) -> Forward:
    from voxtune.kernels import conv3d_weight_gradient

    conv3d_weight_gradient.METHOD = "cudnn"
    return planned(whole_plan())(net, xs)


def whole_plan() -> Plan:
    return Plan.of(*training_passes("bf16"))


@dataclass(frozen=True)
class Way:
    """How the network is computed. `graph`: the step is one CUDA graph. `chooses`: `build` measures and gates candidates."""

    build: Callable[[nn.Module, tuple[Tensor, ...]], Forward]
    tf32: bool = True
    channels_last: bool = True
    graph: bool = False
    chooses: bool = False


WAYS = {
    "baseline_fp32": Way(plain, tf32=False, channels_last=False),
    "tf32": Way(plain, channels_last=False),
    "autocast_bf16": Way(autocast, channels_last=False),
    "torch_compile_bf16": Way(compiled),
    "torch_compile_bf16_graph": Way(compiled, graph=True),
    "voxtune_eager": Way(planned(whole_plan())),
    "voxtune": Way(planned(whole_plan()), graph=True),
    "voxtune_ungated": Way(planned(whole_plan()), graph=True),
    "voxtune_cudnn_weight_gradients": Way(cudnn_weight_gradients, graph=True),
}
OF_OTHERS = {
    "voxtune": Way(optimized, graph=True, chooses=True),
    "voxtune_eager": Way(optimized, chooses=True),
}
WITHOUT, UP_TO = "voxtune_without_", "voxtune_up_to_"


def way_of(name: str, network_name: str) -> Way:
    if name in OF_OTHERS and network_name in FOREIGN:
        return OF_OTHERS[name]
    if name.startswith(WITHOUT):
        return Way(planned(whole_plan().without(known_pass(name.removeprefix(WITHOUT)))), graph=True)
    if name.startswith(UP_TO):
        return Way(planned(plan_up_to(known_pass(name.removeprefix(UP_TO)))), graph=True)
    if name not in WAYS:
        raise SystemExit(f"unknown way {name!r}; choose from {', '.join(WAYS)}, {WITHOUT}PASS, {UP_TO}PASS")
    return WAYS[name]


def known_pass(name: str) -> str:
    if name not in whole_plan().names:
        raise SystemExit(f"{name!r} is not a pass of the plan: {', '.join(whole_plan().names)}")
    return name


def basis(name: str) -> bool:
    """Whether the other passes require it: it chooses the precision or the memory format."""
    return BY_NAME[name].precision is not None or BY_NAME[name].stage == PassStage.LAYOUT


def plan_up_to(name: str) -> Plan:
    """Those that others require, and the further ones in the order in which they run, up to this one."""
    names = whole_plan().names
    order = [*(n for n in names if basis(n)), *(p.name for p in PASSES if p.name in names and not basis(p.name))]
    return Plan.of(*order[: order.index(name) + 1])


def ways_of_passes(applied: Sequence[str]) -> list[str]:
    """What each matching pass gains: the plan without it. Those that others require cannot be left out: all others are."""
    others = [name for name in applied if not basis(name)]
    base = [name for name in whole_plan().names if basis(name)]
    return [*(WITHOUT + name for name in others), UP_TO + base[-1]]

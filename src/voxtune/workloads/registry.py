"""Workloads by name: the networks as published, and the sizes and steps they are run with."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

from torch import nn

from voxtune.errors import InputError
from voxtune.workloads import convnext, med_ddpm

NetworkConfig = med_ddpm.MedDDPMConfig | convnext.ConvNeXtConfig


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A published network: `size` is its voxels or pixels in tensor order, `steps` the length of its diffusion."""

    name: str
    network: NetworkConfig
    size: tuple[int, ...]
    steps: int
    schedule: Literal["cosine", "linear"]


WORKLOADS: dict[str, Workload] = {
    w.name: w
    for w in (
        Workload(name="med-ddpm", network=med_ddpm.WHOLE_HEAD, size=(128, 128, 128), steps=250, schedule="cosine"),
        Workload(name="med-ddpm-brats", network=med_ddpm.BRATS, size=(144, 192, 192), steps=250, schedule="cosine"),
        Workload(name="convnext", network=convnext.ConvNeXtConfig(), size=(64, 64), steps=100, schedule="linear"),
    )
}


def workload(name: str) -> Workload:
    if name not in WORKLOADS:
        near = difflib.get_close_matches(name, WORKLOADS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"unknown workload {name!r}: known are {', '.join(WORKLOADS)}{hint}")
    return WORKLOADS[name]


def without_zeros(network: nn.Module) -> nn.Module:
    """Fills what is initialised to zero: such layers hide every error, and draw less power than trained ones."""
    for parameter in network.parameters():
        if parameter.dim() > 1 and not bool(parameter.any()):
            nn.init.normal_(parameter, std=0.02)
    return network


def build(config: NetworkConfig) -> nn.Module:
    """The network of a config, freshly initialised."""
    if isinstance(config, med_ddpm.MedDDPMConfig):
        return med_ddpm.MedDDPMUNet(config)
    return convnext.ConvNeXtUNet(config)


def split(network: nn.Module, depth: int) -> tuple[nn.Module, nn.Module]:
    """(full, shallow): `full(x, t, cond)` also gives the deep feature, `shallow(x, t, cond, deep)` runs only what lies around it.

    Whatever wraps a network (a plan, autocast) has a `split` of its own that wraps the parts.
    """
    parts = getattr(network, "split", None)
    if parts is None:
        raise InputError(
            f"features can be kept between steps with Med-DDPM's network; {type(network).__name__} has no outer levels "
            "that run alone: leave cache out"
        )
    found: tuple[nn.Module, nn.Module] = parts(depth)
    return found

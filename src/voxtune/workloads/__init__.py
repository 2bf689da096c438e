"""The networks in plain eager PyTorch, without custom kernels, and their registry.

A new network is a new file in this package (see `base.py`) and its entries in `WORKLOADS`.
"""

from __future__ import annotations

import difflib

from torch import nn

from voxtune.errors import InputError
from voxtune.workloads import convnext, med_ddpm
from voxtune.workloads.base import NetworkConfig, TrainingRecipe, Workload
from voxtune.workloads.convnext import ConvNeXtConfig, ConvNeXtUNet
from voxtune.workloads.med_ddpm import MedDDPMConfig, MedDDPMUNet

__all__ = [
    "DEFAULT_WORKLOAD",
    "FAMILIES",
    "WORKLOADS",
    "ConvNeXtConfig",
    "ConvNeXtUNet",
    "MedDDPMConfig",
    "MedDDPMUNet",
    "NetworkConfig",
    "TrainingRecipe",
    "Workload",
    "build",
    "closest_workload",
    "same_channels",
    "split",
    "without_zeros",
    "workload",
]

WORKLOADS: dict[str, Workload] = {w.name: w for w in (*med_ddpm.WORKLOADS, *convnext.WORKLOADS)}
DEFAULT_WORKLOAD = "med-ddpm"

# The "workload" key of config.json -> the configuration class.
FAMILIES: dict[str, type[NetworkConfig]] = {w.network.family: type(w.network) for w in WORKLOADS.values()}


def workload(name: str) -> Workload:
    if name not in WORKLOADS:
        matches = difflib.get_close_matches(name, WORKLOADS, n=1)
        hint = f"; did you mean {matches[0]!r}?" if matches else ""
        raise InputError(f"unknown workload {name!r}; choose from {', '.join(WORKLOADS)}{hint}")
    return WORKLOADS[name]


def closest_workload(network: NetworkConfig) -> Workload:
    """The workload of the same family that equals `network`, else one with the same channels, else the first."""

    def similarity(entry: Workload) -> tuple[bool, bool]:
        return entry.network == network, same_channels(entry.network, network)

    return max((w for w in WORKLOADS.values() if w.network.family == network.family), key=similarity)


def same_channels(a: NetworkConfig, b: NetworkConfig) -> bool:
    return (a.mask_channels, a.out_channels) == (b.mask_channels, b.out_channels)


def without_zeros(network: nn.Module) -> nn.Module:
    """Fills layers that are initialised to zero: they hide every error, and draw less power than trained ones."""
    for parameter in network.parameters():
        if parameter.dim() > 1 and not bool(parameter.any()):
            nn.init.normal_(parameter, std=0.02)
    return network


def build(config: NetworkConfig) -> nn.Module:
    """The network of a config, freshly initialised."""
    return config.build()


def split(network: nn.Module, depth: int) -> tuple[nn.Module, nn.Module]:
    """(full, shallow): `full(x, t, cond)` also returns the deep feature; `shallow(x, t, cond, deep)` runs only the outer levels.

    A module that wraps a network (a plan, autocast) has a `split` method that wraps both parts.
    """
    method = getattr(network, "split", None)
    if method is None:
        raise InputError(f"{type(network).__name__} does not support the feature cache; omit cache")
    parts: tuple[nn.Module, nn.Module] = method(depth)
    return parts

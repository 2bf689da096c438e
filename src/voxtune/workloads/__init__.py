"""The networks in plain eager PyTorch, without custom kernels, and their registry."""

from __future__ import annotations

from voxtune.workloads.base import NetworkConfig, TrainingRecipe, Workload
from voxtune.workloads.convnext import ConvNeXtConfig, ConvNeXtUNet
from voxtune.workloads.med_ddpm import MedDDPMConfig, MedDDPMUNet
from voxtune.workloads.registry import (
    DEFAULT_WORKLOAD,
    FAMILIES,
    WORKLOADS,
    build,
    closest_workload,
    same_channels,
    split,
    without_zeros,
    workload,
)

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

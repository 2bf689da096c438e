"""The networks in plain eager PyTorch: what is computed, with no kernel and no flag."""

from __future__ import annotations

from voxtune.workloads.convnext import ConvNeXtConfig, ConvNeXtUNet
from voxtune.workloads.med_ddpm import MedDDPMConfig, MedDDPMUNet
from voxtune.workloads.registry import WORKLOADS, NetworkConfig, Workload, build, split, without_zeros, workload

__all__ = [
    "WORKLOADS",
    "ConvNeXtConfig",
    "ConvNeXtUNet",
    "MedDDPMConfig",
    "MedDDPMUNet",
    "NetworkConfig",
    "Workload",
    "build",
    "split",
    "without_zeros",
    "workload",
]

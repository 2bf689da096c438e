"""Checks of this machine: versions, hardware, known defects. Each check states its consequence."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import functional as F

from voxtune.errors import install_command
from voxtune.versions import conv3d_without_cudnn, cudnn_parts, wrong_half_conv3d

Level = Literal["ok", "note", "warning", "error"]

# Package, purpose.
PACKAGES = (
    ("nibabel", "reading and writing NIfTI"),
    ("nilearn", "the embedded cohort, `voxtune demo`"),
    ("safetensors", "models on disk"),
    ("pyarrow", "profiles"),
    ("tensorboard", "TensorBoard logs of training"),
    ("triton", "fused kernels on a GPU"),
)


@dataclass(frozen=True, kw_only=True)
class Check:
    name: str
    level: Level
    value: str
    consequence: str = ""

    def to_dict(self) -> dict[str, str]:
        return {"name": self.name, "level": self.level, "found": self.value, "follows": self.consequence}


def examine() -> list[Check]:
    """Runs all checks, in a few seconds."""
    return [*_software(), *_processor(), *_gpus(), *_hazards(), *_arithmetic(), *_profiling()]


def _software() -> Iterator[Check]:
    from voxtune.versions import __version__

    yield Check(name="voxtune", level="ok", value=__version__)
    yield Check(name="python", level="ok", value=platform.python_version())
    yield Check(name="torch", level="ok", value=torch.__version__)
    for package, use in PACKAGES:
        try:
            yield Check(name=package, level="ok", value=importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Check(
                name=package,
                level="note",
                value="not installed",
                consequence=f"needed for {use}: {install_command(package)}",
            )


def _processor() -> Iterator[Check]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Check(name="cpu", level="ok", value=f"{cores} cores, {torch.get_num_threads()} torch threads")
    features = torch.backends.cpu.get_cpu_capability()
    amx = bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())
    consequence = "" if amx else "this CPU has no matrix units for BF16: float32 is faster"
    yield Check(
        name="cpu features",
        level="ok" if amx else "note",
        value=f"{features}, AMX {'yes' if amx else 'no'}",
        consequence=consequence,
    )


def _gpus() -> Iterator[Check]:
    if not torch.cuda.is_available():
        built = torch.version.cuda or "without CUDA"
        yield Check(
            name="gpu",
            level="note",
            value=f"none (torch built {built})",
            consequence="sampling and training run on the CPU; hardware counters and Triton kernels are not available",
        )
        return
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        capability = (properties.major, properties.minor)
        consequence = "" if capability >= (8, 0) else "no TF32 or BF16 tensor cores: use FP32 or FP16"
        yield Check(
            name=f"gpu {i}",
            level="ok" if capability >= (8, 0) else "warning",
            value=f"{properties.name}, sm_{capability[0]}{capability[1]}, {properties.total_memory / 2**30:.0f} GiB",
            consequence=consequence,
        )
    yield Check(name="cuda", level="ok", value=str(torch.version.cuda))


def _hazards() -> Iterator[Check]:
    """Known defects of torch and cuDNN versions, with issue numbers of pytorch/pytorch."""
    if not torch.cuda.is_available():
        return
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    if cudnn is None:
        yield Check(
            name="cudnn",
            level="error",
            value="missing",
            consequence="3D convolutions fall back to slow kernels: install cuDNN",
        )
        return
    major, minor = cudnn_parts(cudnn)
    wrong = wrong_half_conv3d(cudnn)
    yield Check(
        name="cudnn",
        level="error" if wrong else "ok",
        value=f"{major}.{minor} ({cudnn})",
        consequence="BF16 3D convolutions can be wrong with cuDNN 9.8 to 9.10 (#163539): upgrade nvidia-cudnn"
        if wrong
        else "",
    )
    if conv3d_without_cudnn(torch.__version__):
        yield Check(
            name="torch 2.9",
            level="error",
            value=torch.__version__,
            consequence="3D convolutions may run without cuDNN, slowly and in much memory (#166122, #166643): change torch",
        )


def _arithmetic() -> Iterator[Check]:
    """Compares a 3D convolution with float64: finds defects that are not in the version tables."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(1, 32, 12, 12, 12, generator=generator), torch.randn(32, 32, 3, 3, 3, generator=generator) / 30
    reference = F.conv3d(x.double(), w.double(), padding=1)
    for dtype, tolerance in ((torch.float32, 1e-2), (torch.bfloat16, 2e-2)):
        y = F.conv3d(x.to(device, dtype), w.to(device, dtype), padding=1).double().cpu()
        error = ((y - reference).norm() / reference.norm()).item()
        good = error < tolerance
        yield Check(
            name=f"conv3d {str(dtype).removeprefix('torch.')}",
            level="ok" if good else "error",
            value=f"relative error {error:.1e} on {device}",
            consequence=""
            if good
            else "3D convolutions are wrong with this torch on this machine: do not use volumes generated with it",
        )


def _profiling() -> Iterator[Check]:
    ncu = shutil.which("ncu")
    consequence = "" if ncu else "`voxtune profile` records the timeline without hardware counters"
    yield Check(name="nsight compute", level="ok" if ncu else "note", value=ncu or "not found", consequence=consequence)


def verdict(checks: list[Check]) -> dict[str, Any]:
    levels = [c.level for c in checks]
    worst: Level = "error" if "error" in levels else "warning" if "warning" in levels else "ok"
    return {"verdict": worst, "checks": [c.to_dict() for c in checks]}

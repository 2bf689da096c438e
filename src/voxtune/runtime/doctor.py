"""What this machine can and cannot do, and the known hazards of its versions. Each check says what follows from it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch.nn import functional as F

from voxtune.versions import conv3d_without_cudnn, cudnn_parts, wrong_half_conv3d

Level = Literal["ok", "note", "warning", "error"]

# Package, what it is needed for.
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
    found: str
    follows: str = ""

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def examine() -> list[Check]:
    """All checks, quick ones: under a few seconds."""
    return [*_software(), *_processor(), *_gpus(), *_hazards(), *_arithmetic(), *_profiling()]


def _software() -> Iterator[Check]:
    from voxtune.versions import __version__

    yield Check(name="voxtune", level="ok", found=__version__)
    yield Check(name="python", level="ok", found=platform.python_version())
    yield Check(name="torch", level="ok", found=torch.__version__)
    for package, use in PACKAGES:
        try:
            yield Check(name=package, level="ok", found=importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Check(
                name=package, level="note", found="not installed", follows=f"needed for {use}: pip install {package}"
            )


def _processor() -> Iterator[Check]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Check(name="cpu", level="ok", found=f"{cores} cores, {torch.get_num_threads()} torch threads")
    features = torch.backends.cpu.get_cpu_capability()
    amx = bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())
    follows = "" if amx else "BF16 has no matrix units on this CPU: float32 is faster"
    yield Check(name="cpu features", level="ok" if amx else "note", found=f"{features}, AMX {amx}", follows=follows)


def _gpus() -> Iterator[Check]:
    if not torch.cuda.is_available():
        built = torch.version.cuda or "without CUDA"
        yield Check(
            name="gpu",
            level="note",
            found=f"none (torch built {built})",
            follows="sampling and training run on the CPU; counters and Triton kernels will not",
        )
        return
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        capability = (properties.major, properties.minor)
        follows = "" if capability >= (8, 0) else "no TF32 or BF16 tensor cores: use FP32 or FP16"
        yield Check(
            name=f"gpu {i}",
            level="ok" if capability >= (8, 0) else "warning",
            found=f"{properties.name}, sm_{capability[0]}{capability[1]}, {properties.total_memory / 2**30:.0f} GiB",
            follows=follows,
        )
    yield Check(name="cuda", level="ok", found=str(torch.version.cuda))


def _hazards() -> Iterator[Check]:
    """Known defects of torch and cuDNN versions (issue numbers of pytorch/pytorch)."""
    if not torch.cuda.is_available():
        return
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    if cudnn is None:
        yield Check(
            name="cudnn",
            level="error",
            found="missing",
            follows="3D convolutions fall back to slow kernels: install cuDNN",
        )
        return
    major, minor = cudnn_parts(cudnn)
    wrong = wrong_half_conv3d(cudnn)
    yield Check(
        name="cudnn",
        level="error" if wrong else "ok",
        found=f"{major}.{minor} ({cudnn})",
        follows="BF16 3D convolutions can be wrong with cuDNN 9.8 to 9.10 (#163539): upgrade nvidia-cudnn"
        if wrong
        else "",
    )
    if conv3d_without_cudnn(torch.__version__):
        yield Check(
            name="torch 2.9",
            level="error",
            found=torch.__version__,
            follows="3D convolutions may run without cuDNN, slowly and in much memory (#166122, #166643): change torch",
        )


def _arithmetic() -> Iterator[Check]:
    """A 3D convolution and a norm, held against float64: what the version tables cannot know."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(1, 32, 12, 12, 12, generator=generator), torch.randn(32, 32, 3, 3, 3, generator=generator) / 30
    truth = F.conv3d(x.double(), w.double(), padding=1)
    for dtype, bar in ((torch.float32, 1e-2), (torch.bfloat16, 2e-2)):
        y = F.conv3d(x.to(device, dtype), w.to(device, dtype), padding=1).double().cpu()
        error = ((y - truth).norm() / truth.norm()).item()
        good = error < bar
        yield Check(
            name=f"conv3d {str(dtype).removeprefix('torch.')}",
            level="ok" if good else "error",
            found=f"relative error {error:.1e} on {device}",
            follows="" if good else "this torch gives wrong 3D convolutions here: do not trust any volume made with it",
        )


def _profiling() -> Iterator[Check]:
    ncu = shutil.which("ncu")
    follows = "" if ncu else "`voxtune profile` gives the timeline, without hardware counters"
    yield Check(name="nsight compute", level="ok" if ncu else "note", found=ncu or "not found", follows=follows)


def verdict(checks: list[Check]) -> dict[str, Any]:
    levels = [c.level for c in checks]
    worst: Level = "error" if "error" in levels else "warning" if "warning" in levels else "ok"
    return {"verdict": worst, "checks": [c.to_dict() for c in checks]}

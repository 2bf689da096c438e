"""Known hazards, checked before anything is measured: missing compilers, versions with wrong results."""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from voxtune.plan.measure import measure
from voxtune.versions import conv3d_without_cudnn, wrong_half_conv3d


def why_no_compiler(device: torch.device) -> str | None:
    """Why torch.compile cannot generate code for this device, or None."""
    if device.type == "cpu":
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None and shutil.which("clang++") is None:
            return f"torch.compile requires a C++ compiler on a CPU; {compiler} was not found"
        return None
    if importlib.util.find_spec("triton") is None:
        return "torch.compile requires Triton on a GPU: pip install triton"
    # Triton compiles a small C file for each launcher.
    if not any(shutil.which(c) for c in (os.environ.get("CC", "cc"), "gcc", "clang")):
        return "torch.compile requires a C compiler for Triton's launchers; none was found"
    return None


@dataclass(frozen=True)
class Hazard:
    name: str
    observed: str
    consequence: str


@cache
def hazards(device: torch.device) -> tuple[Hazard, ...]:
    """Known defects of the installed versions, and the result of one BF16 convolution that must be exact."""
    known = []
    if device.type == "cuda":
        version = torch.backends.cudnn.version() or 0
        if wrong_half_conv3d(version):
            known.append(Hazard("cudnn", str(version), "its BF16 conv3d may be wrong: half precision is refused"))
        if conv3d_without_cudnn(torch.__version__):
            known.append(
                Hazard("torch", torch.__version__, "its conv3d may run without cuDNN: expect slow convolutions")
            )
    wrong = _wrong_convolution(device)
    if wrong is not None:
        known.append(
            Hazard("conv3d", f"relative error {wrong:.1e}", "BF16 conv3d is wrong here: half precision is refused")
        )
    return tuple(known)


def refuses_half(device: torch.device) -> str | None:
    """Why half precision is not used on this device, or None."""
    for hazard in hazards(device):
        if "half precision is refused" in hazard.consequence:
            return f"{hazard.name} {hazard.observed}: {hazard.consequence}"
    return None


# On CPUs without AVX-512 PyTorch only has a reference BF16 convolution, which takes 50 to 190 times as long as float32.
SLOW = 8.0


@cache
def slow_half(device_type: str) -> str | None:
    """Why half precision is not worth trying on this CPU, or None."""
    if device_type != "cpu":
        return None
    x, w = torch.zeros(1, 32, 8, 8, 8), torch.zeros(32, 32, 3, 3, 3)
    ratio = _convolution_ms(x.bfloat16(), w.bfloat16()) / _convolution_ms(x, w)
    return None if ratio < SLOW else f"BF16 convolutions take {ratio:.0f} times as long as float32 on this CPU"


def _convolution_ms(x: Tensor, w: Tensor) -> float:
    with torch.no_grad():
        return measure(lambda: F.conv3d(x, w, padding=1), x.device, seconds=0.1).p20_ms


def _wrong_convolution(device: torch.device) -> float | None:
    """Relative error of a BF16 convolution of integers, which must be exact; None if it is."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-2, 3, (1, 16, 5, 8, 8), generator=generator).float()
    w = torch.randint(-1, 2, (16, 16, 3, 3, 3), generator=generator).float()
    with torch.no_grad():
        # Integers up to 256 are exact in BF16; a larger sum is rounded once in both: any other error is a defect.
        expected = F.conv3d(x.double(), w.double(), padding=1).bfloat16().double()
        for form in (torch.contiguous_format, torch.channels_last_3d):
            xs, ws = (v.to(device, torch.bfloat16).contiguous(memory_format=form) for v in (x, w))
            result = F.conv3d(xs, ws, padding=1).double().cpu()
            error = float((result - expected).norm() / expected.norm())
            if error > 1e-6:
                return error
    return None

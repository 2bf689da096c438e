"""Configurations of a step by name. Parts are joined by "+": tf32+channels_last, bf16+compile.

A configuration without tf32 or bf16 enforces FP32: by default, PyTorch allows cuDNN to use TF32. Process-wide flags are
restored when the context ends.
"""

from __future__ import annotations

import difflib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from voxtune.errors import InputError
from voxtune.precision import tf32_allowed

PARTS = ("tf32", "bf16", "channels_last", "compile", "plan")
BASELINE = "baseline"


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    tf32: bool = False
    bf16: bool = False  # by autocast
    channels_last: bool = False
    compile: bool = False
    plan: bool = False  # Voxtune's plan for sampling, or for training, without its CUDA graph

    def __post_init__(self) -> None:
        if self.plan and (self.tf32 or self.bf16 or self.channels_last or self.compile):
            raise InputError("configuration 'plan' cannot be combined with others: it sets precision and layout itself")

    @property
    def name(self) -> str:
        return "+".join(p for p in PARTS if getattr(self, p)) or BASELINE

    @property
    def fp32(self) -> bool:
        """Whether the configuration claims to compute in FP32 only."""
        return not (self.tf32 or self.bf16 or self.plan)

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.bfloat16) if self.bf16 else nullcontext()

    def place(self, tensor: Tensor) -> Tensor:
        """The tensor in the configuration's memory format."""
        memory_format = _FORMATS.get(tensor.dim()) if self.channels_last else None
        return tensor.contiguous(memory_format=memory_format) if memory_format else tensor

    def prepare(self, network: nn.Module) -> nn.Module:
        """The network in the configuration's memory format, compiled if requested."""
        if self.channels_last:
            for parameter in network.parameters():
                parameter.data = self.place(parameter.data)
        return cast(nn.Module, torch.compile(network, dynamic=False)) if self.compile else network


_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def parse_config(text: str) -> StepConfig:
    """The configuration of "baseline", or of parts joined by "+" in any order."""
    if text.strip() == BASELINE:
        return StepConfig()
    parts = [p.strip() for p in text.split("+")]
    for part in parts:
        if part not in PARTS:
            near = difflib.get_close_matches(part, [BASELINE, *PARTS], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InputError(
                f"configuration {text!r}: unknown part {part!r}; choose from {BASELINE}, {', '.join(PARTS)}{hint}"
            )
    return StepConfig(**dict.fromkeys(parts, True))


def parse_configs(text: str) -> list[StepConfig]:
    configs = [parse_config(t) for t in text.split(",") if t.strip()]
    if not configs:
        raise InputError(f"no configuration in {text!r}; give a comma-separated list of {BASELINE}, {', '.join(PARTS)}")
    return list(dict.fromkeys(configs))


def precision_flags(config: StepConfig) -> AbstractContextManager[dict[str, Any]]:
    """Allows or forbids TF32 as configured; the flags are restored when the context ends."""
    return tf32_allowed(config.tf32)

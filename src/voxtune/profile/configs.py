"""Configurations by name: what a step is computed with. Parts are joined by "+": tf32+channels_last, bf16+compile.

Without tf32 or bf16 a configuration is FP32, and forced to be: PyTorch lets cuDNN use TF32 unless told not to. What is
changed for the whole process is put back when the context ends.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from voxtune.errors import InputError

PARTS = ("tf32", "bf16", "channels_last", "compile")
BASELINE = "baseline"


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    tf32: bool = False
    bf16: bool = False  # by autocast
    channels_last: bool = False
    compile: bool = False

    @property
    def name(self) -> str:
        return "+".join(p for p in PARTS if getattr(self, p)) or BASELINE

    @property
    def fp32(self) -> bool:
        """Whether it claims to compute in FP32 alone."""
        return not (self.tf32 or self.bf16)

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.bfloat16) if self.bf16 else nullcontext()

    def place(self, tensor: Tensor) -> Tensor:
        """A batch in the configuration's memory format."""
        memory_format = _FORMATS.get(tensor.dim()) if self.channels_last else None
        return tensor.contiguous(memory_format=memory_format) if memory_format else tensor

    def prepare(self, network: nn.Module) -> nn.Module:
        """The network in the configuration's memory format, compiled if it says so."""
        if self.channels_last:
            for parameter in network.parameters():
                parameter.data = self.place(parameter.data)
        return cast(nn.Module, torch.compile(network, dynamic=False)) if self.compile else network


_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def parse_config(text: str) -> StepConfig:
    """ "baseline", or parts joined by "+" in any order."""
    if text.strip() == BASELINE:
        return StepConfig()
    parts = [p.strip() for p in text.split("+")]
    for part in parts:
        if part not in PARTS:
            near = difflib.get_close_matches(part, [BASELINE, *PARTS], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InputError(f"configuration {text!r}: {part!r} is not one of {BASELINE}, {', '.join(PARTS)}{hint}")
    return StepConfig(**dict.fromkeys(parts, True))


def parse_configs(text: str) -> list[StepConfig]:
    configs = [parse_config(t) for t in text.split(",") if t.strip()]
    if not configs:
        raise InputError(f"no configuration in {text!r}; give some of {BASELINE}, {', '.join(PARTS)}, joined by commas")
    return list(dict.fromkeys(configs))


# Where PyTorch from 2.9 on keeps each precision; the parent's counts where a child says "none".
_Place = tuple[str, ...]
_PRECISIONS: tuple[_Place, ...] = (("cuda", "matmul"), ("cudnn", "conv"), ("cudnn", "rnn"))
_PARENTS: dict[_Place, tuple[_Place, ...]] = {
    ("cuda", "matmul"): ((),),
    ("cudnn", "conv"): (("cudnn",), ()),
    ("cudnn", "rnn"): (("cudnn",), ()),
}


@contextmanager
def precision_flags(config: StepConfig) -> Iterator[dict[str, Any]]:
    """Sets TF32 on or off for products and convolutions, gives the flags as PyTorch reads them, puts them back."""
    saved_flags, saved_precisions = _read_flags(), _read_precisions()
    try:
        _set_tf32(config.tf32)
        yield read_precision()
    finally:
        _restore(saved_flags, saved_precisions)


def read_precision() -> dict[str, Any]:
    """Every flag that decides on TF32, as this version of PyTorch knows them."""
    flags: dict[str, Any] = {f"{place}.allow_tf32": value for place, value in _read_flags().items()}
    flags |= {f"{'.'.join(p)}.fp32_precision": value for p, value in _read_precisions().items()}
    flags["cudnn.benchmark"] = torch.backends.cudnn.benchmark
    flags["cudnn.deterministic"] = torch.backends.cudnn.deterministic
    return flags


def _set_tf32(on: bool) -> None:
    """By the old flags, which torch.compile still reads; by the new ones only where those would overrule them.

    From 2.9 on, reading an old flag after a new one was set differently raises: so the new are touched last and least.
    """
    for place in (("cuda", "matmul"), ("cudnn",)):
        try:
            _backend(place).allow_tf32 = on
        except RuntimeError:  # someone mixed both kinds before us: only the new kind can be set
            continue
    for where in _PRECISIONS:
        told = _effective(where)
        if told is not None and (told == "tf32") != on:
            _backend(where).fp32_precision = "tf32" if on else "ieee"


def _effective(place: tuple[str, ...]) -> str | None:
    """The precision that counts at `place`; None where this version has no such setting."""
    for where in (place, *_PARENTS[place]):
        told = getattr(_backend(where), "fp32_precision", None)
        if told is None or told != "none":
            return told
    return "ieee"


def _backend(place: tuple[str, ...]) -> Any:
    found: Any = torch.backends
    for name in place:
        found = getattr(found, name, None)
    return found


def _read_flags() -> dict[str, bool | None]:
    """The old flags; None where they cannot be read because both kinds were mixed."""
    flags: dict[str, bool | None] = {}
    for name, backend in (("cuda.matmul", torch.backends.cuda.matmul), ("cudnn", torch.backends.cudnn)):
        try:
            flags[name] = bool(backend.allow_tf32)
        except RuntimeError:
            flags[name] = None
    return flags


def _read_precisions() -> dict[tuple[str, ...], str]:
    told = {place: getattr(_backend(place), "fp32_precision", None) for place in _PRECISIONS}
    return {place: value for place, value in told.items() if value is not None}


def _restore(flags: dict[str, bool | None], precisions: dict[tuple[str, ...], str]) -> None:
    for name, value in flags.items():
        if value is not None:
            _backend(tuple(name.split("."))).allow_tf32 = value
    for place, told in precisions.items():
        if _backend(place).fp32_precision != told:
            _backend(place).fp32_precision = told

"""TF32 on or off for the whole process, as long as a context lasts: PyTorch lets cuDNN use TF32 unless told not to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Where PyTorch from 2.9 on keeps each precision; the parent's counts where a child says "none".
_Place = tuple[str, ...]
_PRECISIONS: tuple[_Place, ...] = (("cuda", "matmul"), ("cudnn", "conv"), ("cudnn", "rnn"))
_PARENTS: dict[_Place, tuple[_Place, ...]] = {
    ("cuda", "matmul"): ((),),
    ("cudnn", "conv"): (("cudnn",), ()),
    ("cudnn", "rnn"): (("cudnn",), ()),
}


@contextmanager
def tf32_allowed(on: bool) -> Iterator[dict[str, Any]]:
    """Sets TF32 on or off for products and convolutions, gives the flags as PyTorch reads them, puts them back."""
    saved_flags, saved_precisions = _read_flags(), _read_precisions()
    try:
        _set_tf32(on)
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

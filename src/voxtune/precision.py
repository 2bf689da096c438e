"""TF32, and deterministic algorithms, on or off within a context, for the whole process.

PyTorch allows TF32 in cuDNN by default, and kernels that sum in no fixed order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

HALF: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}

# Where PyTorch >= 2.9 stores each precision; a backend set to "none" inherits from its parent.
_Place = tuple[str, ...]
_PRECISIONS: tuple[_Place, ...] = (("cuda", "matmul"), ("cudnn", "conv"), ("cudnn", "rnn"))
_PARENTS: dict[_Place, tuple[_Place, ...]] = {
    ("cuda", "matmul"): ((),),
    ("cudnn", "conv"): (("cudnn",), ()),
    ("cudnn", "rnn"): (("cudnn",), ()),
}


@contextmanager
def tf32_allowed(on: bool) -> Iterator[dict[str, Any]]:
    """Switches TF32 on or off for matrix products and convolutions; yields the flags in force; restores them afterwards."""
    saved_flags, saved_precisions = _read_flags(), _read_precisions()
    try:
        _set_tf32(on)
        yield read_precision()
    finally:
        _restore(saved_flags, saved_precisions)


# cuBLAS sums in a fixed order only with a workspace of fixed size; it reads the setting at its first use.
_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def deterministic_algorithms(on: bool) -> Iterator[None]:
    """Within the context, if `on`, the same input gives the same bits: PyTorch raises for an operator that cannot do so."""
    if not on:
        yield
        return
    cudnn, filling = torch.backends.cudnn, torch.utils.deterministic
    before = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    flags = (cudnn.deterministic, cudnn.benchmark, filling.fill_uninitialized_memory)  # type: ignore[attr-defined]
    variable, workspace = _WORKSPACE
    was_set = variable in os.environ
    os.environ.setdefault(variable, workspace)
    torch.use_deterministic_algorithms(True)
    # Timings of algorithms choose one of several, which differ in their last bits. Filling new memory costs time, and helps
    # only with operators that read memory before they write it.
    cudnn.deterministic, cudnn.benchmark, filling.fill_uninitialized_memory = True, False, False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.deterministic, cudnn.benchmark, filling.fill_uninitialized_memory = flags  # type: ignore[attr-defined]
        if not was_set:
            os.environ.pop(variable, None)


def read_precision() -> dict[str, Any]:
    """Every flag of this PyTorch version that controls TF32 and cuDNN's choice of algorithms."""
    flags: dict[str, Any] = {f"{place}.allow_tf32": value for place, value in _read_flags().items()}
    flags |= {f"{'.'.join(p)}.fp32_precision": value for p, value in _read_precisions().items()}
    flags["cudnn.benchmark"] = torch.backends.cudnn.benchmark
    flags["cudnn.deterministic"] = torch.backends.cudnn.deterministic
    return flags


def _set_tf32(on: bool) -> None:
    """Sets the old flags, which torch.compile still reads, and the new ones only where they would override the old.

    PyTorch >= 2.9 raises when an old flag is read after a new one was set to another value: the new ones are set last.
    """
    for place in (("cuda", "matmul"), ("cudnn",)):
        try:
            _backend(place).allow_tf32 = on
        except RuntimeError:  # both kinds were mixed before: only the new kind can be set
            continue
    for where in _PRECISIONS:
        precision = _effective(where)
        if precision is not None and (precision == "tf32") != on:
            _backend(where).fp32_precision = "tf32" if on else "ieee"


def _effective(place: tuple[str, ...]) -> str | None:
    """The precision in force at `place`; None if this version has no such setting."""
    for where in (place, *_PARENTS[place]):
        precision = getattr(_backend(where), "fp32_precision", None)
        if precision is None or precision != "none":
            return precision
    return "ieee"


def _backend(place: tuple[str, ...]) -> Any:
    backend: Any = torch.backends
    for name in place:
        backend = getattr(backend, name, None)
    return backend


def _read_flags() -> dict[str, bool | None]:
    """The old flags; None for those that cannot be read because both kinds were mixed."""
    flags: dict[str, bool | None] = {}
    for name, backend in (("cuda.matmul", torch.backends.cuda.matmul), ("cudnn", torch.backends.cudnn)):
        try:
            flags[name] = bool(backend.allow_tf32)
        except RuntimeError:
            flags[name] = None
    return flags


def _read_precisions() -> dict[tuple[str, ...], str]:
    precisions = {place: getattr(_backend(place), "fp32_precision", None) for place in _PRECISIONS}
    return {place: value for place, value in precisions.items() if value is not None}


def _restore(flags: dict[str, bool | None], precisions: dict[tuple[str, ...], str]) -> None:
    for name, value in flags.items():
        if value is not None:
            _backend(tuple(name.split("."))).allow_tf32 = value
    for place, precision in precisions.items():
        if _backend(place).fp32_precision != precision:
            _backend(place).fp32_precision = precision

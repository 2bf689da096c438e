"""Runs chosen operators of a step one by one, each alone on the device, with counting on around it.

Nsight Compute replays a kernel once for each group of counters, and before each replay puts back all memory that the
process holds: 7 GB for each of 23 replays of a kernel of three microseconds, and 25 GB of a training step. So the chosen
operators are noted down in one step (shapes, strides, types), the network is let go, and each operator runs on
tensors of its own, made like those it had. They need not keep the step's order: the costliest comes first.

Floating-point values are random: what a kernel does depends on shapes, not on them. Integers, which may be indices, are kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from voxtune.profile.op_numbering import Counting, NumberedOperators

_KEPT_VALUES = 1 << 20


@dataclass(frozen=True)
class TensorLike:
    """A tensor's form. `storage` says which arguments of an operator share memory; `values` only of integers."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    values: Tensor | None = None

    @property
    def extent(self) -> int:
        """Bytes of storage that it reaches."""
        reach = 0 if 0 in self.size else 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        return (self.offset + reach) * self.dtype.itemsize


def tensor_like(tensor: Tensor) -> TensorLike:
    keep = not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() <= _KEPT_VALUES
    return TensorLike(
        storage=tensor.untyped_storage()._cdata,
        size=tuple(tensor.shape),
        stride=tensor.stride(),
        offset=int(tensor.storage_offset()),
        dtype=tensor.dtype,
        device=tensor.device,
        values=tensor.detach().to("cpu", copy=True) if keep else None,
    )


@dataclass
class Noted:
    """An operator and the form of what it was called with."""

    function: Any
    args: Any
    kwargs: Any
    likes: list[TensorLike] = field(default_factory=list)

    def arguments(self) -> tuple[Any, Any]:
        """New tensors of the noted form; those that shared memory share it again."""
        bytes_of: dict[int, int] = {}
        for like in self.likes:
            bytes_of[like.storage] = max(bytes_of.get(like.storage, 0), like.extent)
        made: dict[int, Tensor] = {}

        def make(leaf: Any) -> Any:
            if not isinstance(leaf, TensorLike):
                return leaf
            if leaf.storage not in made:
                made[leaf.storage] = _filled(bytes_of[leaf.storage], leaf)
            storage = made[leaf.storage].untyped_storage()
            tensor = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
            tensor.set_(storage, leaf.offset, leaf.size, leaf.stride)
            if leaf.values is not None:
                tensor.copy_(leaf.values)
            return tensor

        return tree_map(make, (self.args, self.kwargs))


def _filled(size: int, like: TensorLike) -> Tensor:
    flat = torch.empty(max(1, -(-size // like.dtype.itemsize)), dtype=like.dtype, device=like.device)
    return flat.normal_() if like.dtype.is_floating_point and like.dtype.itemsize > 1 else flat.zero_()


class _Noting(NumberedOperators):
    def __init__(self, wanted: Iterable[int]):
        super().__init__(lambda _number: nullcontext())
        self.wanted, self.noted = set(wanted), dict[int, Noted]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number = self.count
        if number in self.wanted and number not in self.noted and getattr(func, "namespace", "") != "profiler":
            likes: list[TensorLike] = []

            def note(leaf: Any) -> Any:
                if not isinstance(leaf, Tensor):
                    return leaf
                likes.append(tensor_like(leaf))
                return likes[-1]

            noted_args, noted_kwargs = tree_map(note, (args, kwargs or {}))
            self.noted[number] = Noted(func, noted_args, noted_kwargs, likes)
        return super().__torch_dispatch__(func, types, args, kwargs)


def note_operators(step: Callable[[], Any], wanted: Iterable[int]) -> dict[int, Noted]:
    """Runs one step and notes the operators of these numbers."""
    mode = _Noting(wanted)
    with mode:
        step()
    return mode.noted


def count_alone(
    order: Sequence[int], noted: dict[int, Noted], counting: Counting, deadline: float | None, device: torch.device
) -> dict[str, Any]:
    """Counts the operators in this order until the deadline; gives what was counted and what failed, with the reason."""
    done, failed = 0, dict[str, str]()
    for number in order:
        if deadline is not None and time.monotonic() >= deadline:
            return {"operators": done, "of_operators": len(order), "failed": failed, "expired": True}
        try:
            if number not in noted:
                raise LookupError("the step has no operator of this number")
            _count_one(noted[number], counting, device)
            done += 1
        except torch.OutOfMemoryError as error:
            failed[str(number)] = str(error).splitlines()[0][:200]
        except (RuntimeError, TypeError, ValueError, LookupError) as error:
            # One operator that cannot run alone costs its own launches; their share is missing in the coverage.
            failed[str(number)] = f"{type(error).__name__}: {error}"[:200]
    return {"operators": done, "of_operators": len(order), "failed": failed, "expired": False}


def _count_one(noted: Noted, counting: Counting, device: torch.device) -> None:
    with torch.no_grad():
        args, kwargs = noted.arguments()
        _settle(device)
        with counting:
            noted.function(*args, **kwargs)
            _settle(device)
    del args, kwargs
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory that is held is memory that every replay puts back


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

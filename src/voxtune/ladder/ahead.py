"""Compiling a program's kernels side by side: a step is some sixty different ones, and a compiler runs on one core."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from voxtune.kernels.ahead import compiled_ahead
from voxtune.kernels.convnext.launch import Launch


def compile_ahead(launches: Iterable[Launch]) -> int:
    """Compiles each different launch once, without running any; how many there were. On a CPU there is nothing to do."""
    different: dict[str, Launch] = {}
    for launch in launches:
        tensors = [a for a in launch.arguments if isinstance(a, Tensor)]
        if tensors and tensors[0].is_cuda:
            types = [str(a.dtype) if isinstance(a, Tensor) else "" for a in launch.arguments]
            key = (launch.name, types, sorted(launch.constants.items()), launch.warps, launch.stages, launch.options)
            different[repr(key)] = launch

    def rehearse() -> None:
        for launch in different.values():
            launch()

    if different:
        with compiled_ahead(rehearse):
            pass
    return len(different)

"""NVTX ranges per module, for Nsight Systems and Nsight Compute.

The forward pass of a module is a pushed range of its thread. The backward pass runs on another thread and does not nest by
module, so its ranges are started and ended by number: from the gradient of the output to that of an input.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from voxtune.profile.census import is_compiled

BACKWARD = " (backward)"


@contextmanager
def nvtx_ranges(network: nn.Module | None, nvtx: Any = None) -> Iterator[None]:
    """Marks the modules of the network in NVTX; a compiled network has none. `nvtx` replaces torch.cuda.nvtx."""
    nvtx = nvtx or torch.cuda.nvtx
    if network is None or is_compiled(network):
        yield
        return
    runner: Any = getattr(network, "runner", None)
    if hasattr(runner, "named"):  # a planned network: its operators know their module
        with runner.named(lambda path: _range(nvtx, path)):
            yield
        return
    handles: list[Any] = []
    try:
        for path, module in network.named_modules():
            handles += _Marks(nvtx, path or type(module).__name__).hook(module)
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _range(nvtx: Any, path: str) -> Iterator[None]:
    nvtx.range_push(path)
    try:
        yield
    finally:
        nvtx.range_pop()


class _Marks:
    def __init__(self, nvtx: Any, path: str):
        self.nvtx, self.path = nvtx, path
        self.running: list[int] = []

    def hook(self, module: nn.Module) -> list[Any]:
        return [
            module.register_forward_pre_hook(self.enter),
            module.register_forward_hook(self.leave, always_call=True),
        ]

    def enter(self, _module: nn.Module, _inputs: Any) -> None:
        self.nvtx.range_push(self.path)

    def leave(self, _module: nn.Module, inputs: Any, output: Any) -> None:
        self.nvtx.range_pop()
        outputs = _differentiable(output)
        sources = _differentiable(inputs)
        if not outputs or not torch.is_grad_enabled():
            return
        # A module whose inputs need no gradient, such as the first one, has no end: its start is marked.
        outputs[0].register_hook(self.start if sources else self.mark)
        if sources:
            sources[0].register_hook(self.end)

    def start(self, _gradient: Tensor) -> None:
        self.running.append(self.nvtx.range_start(self.path + BACKWARD))

    def end(self, _gradient: Tensor) -> None:
        if self.running:
            self.nvtx.range_end(self.running.pop())

    def mark(self, _gradient: Tensor) -> None:
        self.nvtx.mark(self.path + BACKWARD)


def _differentiable(values: Any) -> list[Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, Tensor) and t.requires_grad]

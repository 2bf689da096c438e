"""Names a network's modules in a trace, for as long as the context lasts and without a trace in the results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.autograd.profiler import record_function

from voxtune.profile.trace import MODULE


def is_compiled(network: nn.Module | None) -> bool:
    """Hooks inside a compiled region would break its graph: the capture must not change what it measures."""
    if network is None:
        return False
    return any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) for m in network.modules())


@contextmanager
def module_ranges(network: nn.Module | None) -> Iterator[dict[str, str]]:
    """Gives {dotted path: class} of the modules that are named; none for a compiled network."""
    if network is None or is_compiled(network):
        yield {}
        return
    runner: Any = getattr(network, "runner", None)
    if hasattr(runner, "named"):  # a network that a plan rewrote has operators that know their module, and no modules
        with runner.named(lambda path: record_function(MODULE + path)) as named:
            yield named
        return
    handles: list[Any] = []
    try:
        for path, module in network.named_modules():
            handles += _hook(module, path)
        yield {path: type(module).__name__ for path, module in network.named_modules()}
    finally:
        for handle in handles:
            handle.remove()


def _hook(module: nn.Module, path: str) -> list[Any]:
    running: list[record_function] = []  # a module may call itself

    def enter(_module: nn.Module, _inputs: Any) -> None:
        running.append(record_function(MODULE + path))
        running[-1].__enter__()

    def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        if running:
            running.pop().__exit__(None, None, None)

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]

"""The blocks of a network with their channels, FLOPs and bytes, and the skip connections between them.

Found by one forward pass on the meta device, so nothing is computed. A block is a child of the network, or a child of a
container such as a ModuleList. A skip connection is a block's output that is concatenated before a later block.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from voxtune.analysis.walk import ALLOCATIONS
from voxtune.workloads import NetworkConfig, build

CONTAINERS = (nn.ModuleList, nn.ModuleDict)


@dataclass(kw_only=True)
class NetworkBlock:
    """`shape` is that of the output, without batch: channels, then sides. `bytes` of all operands and results."""

    name: str
    kinds: str
    shape: tuple[int, ...] = ()
    parameters: int = 0
    flops: float = 0.0
    bytes: float = 0.0

    @property
    def channels(self) -> int:
        return self.shape[0] if self.shape else 0


@dataclass(kw_only=True)
class NetworkPlan:
    """Blocks in the order of their execution; `skips` are (place of the source, place of the block that reads it)."""

    blocks: list[NetworkBlock] = field(default_factory=list)
    skips: list[tuple[int, int]] = field(default_factory=list)
    # Operators outside of blocks, such as concatenations.
    rest: NetworkBlock = field(default_factory=lambda: NetworkBlock(name="between blocks", kinds=""))


def network_plan(network: NetworkConfig, size: tuple[int, ...], batch: int = 1) -> NetworkPlan:
    """The plan of one forward pass in float32."""
    with torch.device("meta"), torch.no_grad():
        module = build(network)
        x = torch.empty(batch, network.out_channels, *size)
        cond = torch.empty(batch, network.mask_channels, *size) if network.mask_channels else None
        recorder = _BlockRecorder()
        for name, block in _blocks(module):
            block.register_forward_pre_hook(recorder.enter(name, block))
            block.register_forward_hook(recorder.leave)
        with recorder:
            module(x, torch.zeros(batch, dtype=torch.int64), cond)
    return recorder.plan


def _blocks(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    out = []
    for name, child in module.named_children():
        inside = isinstance(child, CONTAINERS)
        out += _blocks(child, f"{prefix}{name}.") if inside else [(f"{prefix}{name}", child)]
    return out


def _kinds(block: nn.Module) -> str:
    """The classes of the direct children of a sequence, such as "ResidualBlock, Attention"; otherwise its own."""
    if not isinstance(block, nn.Sequential):
        return type(block).__name__
    names = dict.fromkeys(type(c).__name__ for c in block.children())
    return ", ".join(names)


class _BlockRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.plan = NetworkPlan()
        self.current: NetworkBlock | None = None
        # The block whose output a storage is, and the sources of a concatenation that no block has read yet.
        self.owner: dict[int, int] = {}
        self.waiting: list[int] = []

    def enter(self, name: str, block: nn.Module) -> Any:
        parameters, kinds = sum(p.numel() for p in block.parameters()), _kinds(block)

        def hook(_module: nn.Module, _inputs: Any) -> None:
            if self.current is not None:
                return  # a block inside another
            self.current = NetworkBlock(name=name, kinds=kinds, parameters=parameters)
            place = len(self.plan.blocks)
            self.plan.blocks.append(self.current)
            self.plan.skips += [(source, place) for source in self.waiting if source < place - 1]
            self.waiting = []

        return hook

    def leave(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
        if self.current is None or not tensors:
            return
        self.current.shape = tuple(tensors[0].shape[1:])
        place = len(self.plan.blocks) - 1
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.owner[storage._cdata] = place
            weakref.finalize(storage, self.owner.pop, storage._cdata, None)
        self.current = None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        inputs = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, Tensor)]
        outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        storages = [t.untyped_storage()._cdata for t in inputs]
        if name == "cat":
            self._cat(storages)
        view = not function._schema.is_mutable and any(t.untyped_storage()._cdata in storages for t in outputs)
        if not view and name not in ALLOCATIONS and outputs:
            block = self.current or self.plan.rest
            count = flop_registry.get(function.overloadpacket)
            block.flops += float(count(*args, **(kwargs or {}), out_val=out)) if count else 0.0
            block.bytes += float(sum(t.numel() * t.element_size() for t in inputs + outputs))
        return out

    def _cat(self, storages: list[int]) -> None:
        sources = [self.owner[s] for s in storages if s in self.owner]
        if self.current is None:
            self.waiting += sources
            return
        place = len(self.plan.blocks) - 1
        self.plan.skips += [(s, place) for s in sources if s < place - 1 and (s, place) not in self.plan.skips]

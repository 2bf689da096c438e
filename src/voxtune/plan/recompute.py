"""What a training step keeps for its backward pass, and what it computes again instead, to need less memory.

A graph is cut into pieces: a large operator with the norm before it. Of a group of consecutive pieces that is computed again
only the inputs are kept: the larger the groups, the less is kept, and the more is computed twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

# A tensor that is smaller than the largest one by this factor is not worth computing again.
SMALL = 64
# Pieces in a group, from the least memory saved to the most.
GROUP_SIZES = (2, 3, 4, 6, 8, 12)


@dataclass(frozen=True)
class Group:
    """Operators that are computed again in the backward pass: positions among the graph's nodes, `end` exclusive."""

    first: int
    end: int


@dataclass(frozen=True)
class Kept:
    """A tensor that an operator keeps for its gradient: positions of the operator and of the node that computed the tensor.

    `again`: what a norm returned, which is not kept but computed again from its sources.
    """

    by: int
    of: int
    bytes: int
    again: bool = False


def tensor_bytes(value: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tree_leaves(value) if isinstance(x, Tensor))


def _result_bytes(node: fx.Node) -> int:
    return tensor_bytes(node.meta.get("val")) if node.op == "call_function" else 0


def pieces(graph: fx.Graph) -> list[Group]:
    """The graph's large operators: each norm with the operators after it, up to the one that uses its result."""
    nodes = list(graph.nodes)
    sizes = [_result_bytes(node) for node in nodes]
    cuts: list[Group] = []
    first: int | None = None
    for i, node in enumerate(nodes):
        large = node.op == "call_function" and sizes[i] * SMALL >= max(sizes)
        if not large and node.op == "call_function" and first is not None:
            continue  # what belongs to large operators: their shifts and statistics
        if not large:
            first = None
            continue
        first = i if first is None else first
        parts = [user for user in node.users if user.target is getitem]
        if node.target is not torch.ops.voxtune.norm_act.default and not parts:
            cuts.append(Group(first, i + 1))
            first = None
    return cuts


def _own(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") == "voxtune"


def grouped(graph: fx.Graph, size: int) -> tuple[Group, ...]:
    """Groups of `size` consecutive pieces; a network's small levels, which lie between pieces, are in none."""
    parts = pieces(graph)
    nodes = list(graph.nodes)
    runs: list[list[Group]] = []
    for part in parts:
        if runs and not any(_own(node) for node in nodes[runs[-1][-1].end : part.first]):
            runs[-1].append(part)
        else:
            runs.append([part])
    return tuple(
        Group(run[i].first, run[min(i + size, len(run)) - 1].end) for run in runs for i in range(0, len(run), size)
    )


def kept_bytes(kept: Sequence[Kept], groups: Sequence[Group], needed: Mapping[int, int] | None = None) -> int:
    """What a step keeps: of a group only what comes from outside of it, and what computing it again needs (position: bytes)."""
    group_of = {i: group for group in groups for i in range(group.first, group.end)}
    tensors = dict(needed or {})
    for item in kept:
        group = group_of.get(item.by)
        if not item.again and (group is None or not group.first <= item.of < group.end):
            tensors[item.of] = max(tensors.get(item.of, 0), item.bytes)
    return sum(tensors.values())


def repeated_bytes(kept: Sequence[Kept], groups: Sequence[Group]) -> int:
    """The most that one group keeps while it is computed again."""
    return max((_bytes_inside(kept, group) for group in groups), default=0)


def _bytes_inside(kept: Sequence[Kept], group: Group) -> int:
    within = range(group.first, group.end)
    return sum(
        {item.of: item.bytes for item in kept if item.by in within and item.of in within and not item.again}.values()
    )


def computed_again(node: fx.Node) -> bool:
    """Whether an operator's result is never kept, but what it was computed from."""
    own = torch.ops.voxtune
    return node.target in (own.norm_act.default, own.upsample.default)


@dataclass(frozen=True)
class Recomputation:
    """A group's large results that only its own operators use, the operators that these need, and what those need in turn.

    `ends` are the nodes that an operator is the last one to use.
    """

    results: frozenset[fx.Node]
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    ends: dict[fx.Node, tuple[fx.Node, ...]]


def recomputation(nodes: Sequence[fx.Node], group: Group) -> Recomputation:
    members = dict.fromkeys(nodes[group.first : group.end])
    largest = max(map(_result_bytes, nodes))

    def kept_here(node: fx.Node) -> bool:
        single = isinstance(node.meta.get("val"), torch.Tensor) and bool(node.users)
        large = single and _result_bytes(node) * SMALL >= largest
        return large and not computed_again(node) and all(user in members for user in node.users)

    results = [node for node in members if node.op == "call_function" and kept_here(node)]
    needed: dict[fx.Node, None] = {}
    waiting = list(results)
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed[node] = None
            waiting += [n for n in node.all_input_nodes if n in members]
    order = [node for node in members if node in needed]
    inputs = dict.fromkeys(n for node in order for n in node.all_input_nodes if n not in needed)
    last = {used: node for node in order for used in node.all_input_nodes}
    ends: dict[fx.Node, list[fx.Node]] = {node: [] for node in order}
    for used, node in last.items():
        ends[node].append(used)
    return Recomputation(
        frozenset(results), tuple(order), tuple(inputs), {node: tuple(used) for node, used in ends.items()}
    )

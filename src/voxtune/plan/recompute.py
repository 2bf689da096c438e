"""What a training step keeps for its backward pass, and what it computes again instead, to need less memory.

A graph is cut into pieces: a large operator with the norm before it. Of a group of consecutive pieces that is computed again
only the inputs are kept: the larger the groups, the less is kept, and the more is computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

# A tensor that is smaller than the largest one by this factor is not worth computing again.
SMALL = 64
# Pieces from a result to the last operator that reads it.
LONGEST_WINDOW = 4


@dataclass(frozen=True)
class Group:
    """Operators that are computed again in the backward pass: positions among the graph's nodes, `end` exclusive."""

    first: int
    end: int


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


def window(nodes: Sequence[fx.Node], parts: Sequence[Group], node: fx.Node) -> Group | None:
    """The group that computes a kept result again: its piece, and those of all operators that read it. None if they are far."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
        return None
    position = {n: i for i, n in enumerate(nodes)}
    ends = [position[node], *(position[user] for user in node.users)]
    inside = [next((k for k, part in enumerate(parts) if part.first <= i < part.end), None) for i in ends]
    if None in inside or not node.users:
        return None
    first, last = inside[0], max(k for k in inside if k is not None)
    assert first is not None
    group = Group(parts[first].first, parts[last].end)
    if last - first >= LONGEST_WINDOW or node not in recomputation(nodes, group).results:
        return None
    return group


def merged(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Groups that overlap as one."""
    together: list[Group] = []
    for group in sorted(groups, key=lambda group: group.first):
        if together and group.first < together[-1].end:
            together[-1] = Group(together[-1].first, max(together[-1].end, group.end))
        else:
            together.append(group)
    return tuple(together)


def computed_again(node: fx.Node) -> bool:
    """Whether an operator's result is never kept, but what it was computed from."""
    own = torch.ops.voxtune
    return node.target in (own.norm_act.default, own.upsample.default)


def _keeps(user: fx.Node, node: fx.Node) -> bool:
    """Whether an operator keeps an argument for its gradient: not a sum its terms, nor a product its residual."""
    own = torch.ops.voxtune
    if user.target is own.add.default:
        return False
    if user.target in (own.conv3d.default, own.pointwise.default):
        return node in tree_leaves(user.args[0])
    return True


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
        kept = any(_keeps(user, node) for user in node.users)
        return large and kept and not computed_again(node) and all(user in members for user in node.users)

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

"""Group norms that a network writes out in basic operators become one aten.group_norm, so that later passes find them.

Matched by what is computed: (x - mean) / sqrt(var + eps) over groups of channels, for all groups at once or group by group and
concatenated (MONAI's MAISI autoencoder does this to save memory), then optionally * weight + bias per channel. Part of cleanup.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from voxtune.plan.derivation import computes_weights
from voxtune.plan.graph import Captured, argument, aten, is_call, is_weight, shape, sole_user
from voxtune.plan.passes.norm import per_channel

RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


@dataclass(frozen=True)
class Standardized:
    """(source - mean) / sqrt(variance + eps), over all dimensions but batch and group."""

    source: fx.Node
    eps: float


def written_norms(captured: Captured) -> int:
    count = 0
    # Whole norms first: a group of one would otherwise be taken for a norm of its own.
    for targets in (RESHAPES, (aten.div.Tensor, aten.mul.Tensor)):
        result = sum(_replace(captured, node) for node in captured.nodes(*targets))
        if result:
            captured.refresh()
        count += result
    return count


def _replace(captured: Captured, last: fx.Node) -> int:
    """`last`: the reshape from groups back to channels, or the standardized volume itself (one channel a group)."""
    inner = last.args[0] if is_call(last, *RESHAPES) else last
    result = _grouped(inner)
    if result is None:
        return 0
    grouped, eps = result
    volume = grouped.args[0] if is_call(grouped, *RESHAPES) else grouped
    before, after = shape(volume), shape(last)
    groups = shape(grouped)[1]
    if before != after or len(before) < 3 or len(shape(grouped)) < len(before) or before[1] % groups:
        return 0
    if shape(grouped)[:1] != before[:1] or (len(shape(grouped)) == len(before) and groups != before[1]):
        return 0
    end, weight, bias = _affine(last)
    new = captured.insert(
        end, aten.group_norm.default, volume, groups, *_flat(captured, end, weight, bias), eps, of=last
    )
    captured.replace(end, new)
    return 1


def _grouped(node: Any) -> tuple[fx.Node, float] | None:
    """(grouped source, eps) of a standardized volume (N, groups, ...), in one piece or concatenated from its groups."""
    whole = _standardized(node)
    if whole is not None:
        return whole.source, whole.eps
    if not is_call(node, aten.cat.default) or argument(node, "dim") != 1:
        return None
    parts = [_standardized(part) for part in node.args[0]]
    if not parts or any(part is None for part in parts):
        return None
    first = parts[0]
    assert first is not None
    source = _slice_of(first.source, 0)
    for index, part in enumerate(parts):
        if source is None or part is None or part.eps != first.eps or _slice_of(part.source, index) is not source:
            return None
    return (source, first.eps) if source is not None and shape(source)[1] == len(parts) else None


def _slice_of(node: Any, index: int) -> fx.Node | None:
    """The tensor that a node takes one group of."""
    if is_call(node, aten.slice.Tensor) and (argument(node, "dim"), argument(node, "start")) == (1, index):
        return node.args[0] if argument(node, "end") == index + 1 and argument(node, "step") == 1 else None
    if is_call(node, operator.getitem) and node.args[1] == index and is_call(node.args[0], aten.split.Tensor):
        split = node.args[0]
        return split.args[0] if (argument(split, "split_size"), argument(split, "dim")) == (1, 1) else None
    return None


def _standardized(node: Any) -> Standardized | None:
    """x - mean, divided by sqrt(var + eps) or multiplied by rsqrt(var + eps)."""
    if not is_call(node, aten.div.Tensor, aten.mul.Tensor):
        return None
    centred, root = node.args[0], node.args[1]
    root_operator = aten.sqrt.default if is_call(node, aten.div.Tensor) else aten.rsqrt.default
    if not is_call(root, root_operator) or not is_call(centred, aten.sub.Tensor) or argument(centred, "alpha") != 1:
        return None
    source, mean = centred.args
    total = root.args[0]
    if not is_call(total, aten.add.Tensor, aten.add.Scalar) or not isinstance(total.args[1], float):
        return None
    variance = total.args[0]
    dims = tuple(range(2, len(shape(source))))
    if not (
        _reduces(mean, source, dims, aten.mean.dim)
        and _reduces(variance, source, dims, aten.var.dim, aten.var.correction)
    ):
        return None
    biased = {aten.var.dim: ("unbiased", (False,)), aten.var.correction: ("correction", (0,))}
    name, allowed = biased[variance.target]
    return Standardized(source, total.args[1]) if argument(variance, name) in allowed else None


def _reduces(node: Any, source: Any, dims: tuple[int, ...], *targets: Any) -> bool:
    if not is_call(node, *targets) or node.args[0] is not source or not argument(node, "keepdim"):
        return False
    rank = len(shape(source))
    return tuple(sorted(d % rank for d in argument(node, "dim") or ())) == dims != ()


def _affine(last: fx.Node) -> tuple[fx.Node, fx.Node | None, fx.Node | None]:
    """(the end of the norm, weight, bias): * weight and + bias per channel, where they follow."""
    end, weight, bias = last, None, None
    factor = _follower(end, aten.mul.Tensor)
    if factor is not None:
        end, weight = factor
    addend = _follower(end, aten.add.Tensor)
    if addend is not None and argument(addend[0], "alpha") == 1:
        end, bias = addend
    return end, weight, bias


def _follower(node: fx.Node, target: Any) -> tuple[fx.Node, fx.Node] | None:
    """The only user, behind reshapes that change nothing together, if it combines the node with a weight per channel."""
    user, last = _behind_reshapes(node)
    if user is None or not is_call(user, target) or len(user.args) < 2:
        return None
    other: Any = user.args[1] if user.args[0] is last else user.args[0]
    return (
        (user, other) if is_weight(other) and per_channel(other, shape(user)) and shape(user) == shape(node) else None
    )


def _behind_reshapes(node: fx.Node) -> tuple[fx.Node | None, fx.Node]:
    user, last = sole_user(node), node
    while user is not None and is_call(user, *RESHAPES):
        last, user = user, sole_user(user)
    return (user, last) if shape(last) == shape(node) else (None, node)


@computes_weights
def as_vector(weight: Tensor) -> Tensor:
    return weight.flatten()


def _flat(captured: Captured, end: fx.Node, *weights: fx.Node | None) -> list[fx.Node | None]:
    return [None if weight is None else captured.derive("affine", as_vector, weight) for weight in weights]

"""Constants that are added to parts of one product become part of the product's bias. Part of `elementwise`.

Each block of a diffusion network adds a bias to its part of the time embedding's projection: a kernel of its own for a few
hundred values, which the bias of the merged projection can carry."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from voxtune.plan.derivation import computes_weights
from voxtune.plan.graph import Captured, argument, aten, is_call, shape, sole_user, value

RESHAPES = (aten.view.default, aten.reshape.default, aten.unsqueeze.default)


def merge_shifts(captured: Captured) -> int:
    """Number of additions that were removed."""
    count = 0
    for split in captured.nodes(aten.split_with_sizes.default):
        product, sizes = split.args[0], list(argument(split, "split_sizes"))
        if (
            not is_call(product, aten.linear.default)
            or len(shape(product)) != 2
            or argument(split, "dim") not in (1, -1)
        ):
            continue
        bias = argument(product, "bias")  # type: ignore[arg-type]
        if len(product.users) > 1 or captured.constant(bias) is None:  # type: ignore[union-attr]
            continue
        additions = [_addition(captured, split, index) for index in range(len(sizes))]
        present = [addition for addition in additions if addition is not None]
        if not present:
            continue
        addends = [None if a is None else a[1] for a in additions]
        total = captured.derive("shifts", with_addends, bias, sizes, addends)
        product.args = (*product.args[:2], total)  # type: ignore[union-attr]
        for node, addend in present:
            captured.replace(node, node.args[1] if node.args[0] is addend else node.args[0])  # type: ignore[arg-type]
        count += len(present)
    captured.refresh()
    return count


@computes_weights
def with_addends(bias: Tensor, sizes: list[int], addends: list[Tensor | None]) -> Tensor:
    parts = zip(bias.split(sizes), addends, strict=True)
    return torch.cat([part if addend is None else part + addend.flatten() for part, addend in parts])


def _addition(captured: Captured, split: fx.Node, index: int) -> tuple[fx.Node, fx.Node] | None:
    """The only reader of a part of a product, behind reshapes that keep its values, and the constant that it adds."""
    parts = [user for user in split.users if is_call(user, operator.getitem) and user.args[1] == index]
    if len(parts) != 1:
        return None
    last, reader = parts[0], sole_user(parts[0])
    while reader is not None and is_call(reader, *RESHAPES):
        last, reader = reader, sole_user(reader)
    if reader is None or not is_call(reader, aten.add.Tensor) or argument(reader, "alpha") != 1:
        return None
    addend: Any = reader.args[1] if reader.args[0] is last else reader.args[0]
    batch, channels = shape(parts[0])
    per_channel = (batch, channels, *[1] * (len(shape(last)) - 2))
    if captured.constant(addend) is None or not shape(last) == shape(reader) == per_channel:
        return None
    aligned = (*[1] * (len(per_channel) - len(shape(addend))), *shape(addend))
    same = [value(n).dtype for n in (addend, reader, parts[0])]  # type: ignore[union-attr]
    return (reader, addend) if aligned == (1, *per_channel[1:]) and len(set(same)) == 1 else None

"""time: all blocks' projections of the same time embedding as one product."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from voxtune.plan.graph import Captured, argument, aten, shape
from voxtune.plan.passes.base import Context, Pass, PassOutcome, PassStage


def merge_linears(captured: Captured, _context: Context, _options: dict[str, Any]) -> PassOutcome:
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in captured.nodes(aten.linear.default):
        source = node.args[0]
        plain = captured.constant(node.args[1]) is not None and captured.constant(argument(node, "bias")) is not None
        if plain and isinstance(source, fx.Node) and len(shape(source)) == 2:
            groups.setdefault(source, []).append(node)
    count = 0
    for source, linears in groups.items():
        if len(linears) > 1:
            _merge(captured, source, linears)
            count += len(linears)
    captured.refresh()
    return PassOutcome(count, None if count else "no two projections of one embedding")


def _merge(captured: Captured, source: fx.Node, linears: list[fx.Node]) -> None:
    sizes = [shape(n)[1] for n in linears]
    weight = captured.derive("time_weight", aten.cat.default, [n.args[1] for n in linears])
    bias = captured.derive("time_bias", aten.cat.default, [argument(n, "bias") for n in linears])
    anchor = source.next
    while anchor.op in ("placeholder", "get_attr"):
        anchor = anchor.next
    merged = captured.insert(anchor, aten.linear.default, source, weight, bias)
    parts = captured.insert(anchor, aten.split_with_sizes.default, merged, sizes, 1)
    for index, node in enumerate(linears):
        captured.replace(node, captured.insert(anchor, operator.getitem, parts, index))


TIME = Pass(
    name="time",
    summary="all projections of the time embedding in one product",
    stage=PassStage.SHARING,
    structural=True,
    rewrite=merge_linears,
)

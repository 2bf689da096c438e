"""time: several projections of one input as one product: all blocks' of the time embedding; queries, keys and values."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from voxtune.plan.graph import Captured, argument, aten, shape
from voxtune.plan.passes.base import Context, Pass, PassOutcome, PassStage


def merge_linears(captured: Captured, _context: Context, _options: dict[str, Any]) -> PassOutcome:
    groups: dict[tuple[fx.Node, bool], list[fx.Node]] = {}
    for node in captured.nodes(aten.linear.default):
        source, bias = node.args[0], argument(node, "bias")
        constants = captured.constant(node.args[1]) is not None and (
            bias is None or captured.constant(bias) is not None
        )
        if constants and isinstance(source, fx.Node):
            groups.setdefault((source, bias is None), []).append(node)
    count = 0
    for (source, _), linears in groups.items():
        if len(linears) > 1:
            _merge(captured, source, linears)
            count += len(linears)
    captured.refresh()
    return PassOutcome(count, None if count else "no two projections of one input")


def _merge(captured: Captured, source: fx.Node, linears: list[fx.Node]) -> None:
    sizes = [shape(n)[-1] for n in linears]
    weight = captured.derive("projections", aten.cat.default, [n.args[1] for n in linears])
    biases = [argument(n, "bias") for n in linears]
    bias = None if biases[0] is None else captured.derive("projections", aten.cat.default, biases)
    anchor = source.next
    while anchor.op in ("placeholder", "get_attr"):
        anchor = anchor.next
    merged = captured.insert(anchor, aten.linear.default, source, weight, bias, of=linears[0])
    parts = captured.insert(anchor, aten.split_with_sizes.default, merged, sizes, -1, of=linears[0])
    for index, node in enumerate(linears):
        captured.replace(node, captured.insert(anchor, operator.getitem, parts, index, of=node))


TIME = Pass(
    name="time",
    summary="all projections of one input (time embedding; queries, keys and values) in one product",
    stage=PassStage.SHARING,
    structural=True,
    rewrite=merge_linears,
)

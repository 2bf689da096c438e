"""cleanup: removes operators without effect (casts to the same type, dropout in eval mode, copies) and normalises equivalent
operators, so that later passes need one pattern each. Exact."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from voxtune.plan.graph import CASTS, Captured, argument, aten, is_call, shape, value
from voxtune.plan.passes.base import Context, Pass, PassOutcome, PassStage
from voxtune.plan.passes.written_norm import written_norms
from voxtune.plan.recipes import Recipe, Ref

COPIES = (
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh_copy.default,
    aten.contiguous.default,
    aten.clone.default,
)


def cleanup(captured: Captured, _context: Context, _options: dict[str, Any]) -> PassOutcome:
    count = 0
    for node in list(captured.graph.nodes):
        if node.op == "call_function":
            count += _simplify(captured, node)
    captured.refresh()
    count += _fold(captured)
    count += _share_equal(captured)
    count += written_norms(captured)
    captured.refresh()
    return PassOutcome(count)


def _simplify(captured: Captured, node: fx.Node) -> int:
    target = node.target
    if target == aten.chunk.default:
        return _chunk_to_split(captured, node)
    if target == aten.conv1d.default:
        return _conv1d_to_linear(captured, node)
    if _computes_nothing(node):
        captured.replace(node, node.args[0])  # type: ignore[arg-type]
        captured.graph.erase_node(node)
    elif target == aten.view.default:
        node.target = aten.reshape.default  # the strides need not be those of a view
    else:
        return 0
    return 1


def _computes_nothing(node: fx.Node) -> bool:
    if is_call(node, aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default):
        return not argument(node, "train") or argument(node, "p") == 0
    # A captured graph has no in-place operators: a copy equals its source.
    if is_call(node, *COPIES):
        return True
    if is_call(node, *CASTS, aten.to.dtype_layout, aten.to.device, aten.to.other):
        before, after = value(node.args[0]), value(node)
        return (
            before is not None and after is not None and before.dtype == after.dtype and before.device == after.device
        )
    return False


def _chunk_to_split(captured: Captured, node: fx.Node) -> int:
    source, pieces, dim = node.args[0], argument(node, "chunks"), argument(node, "dim")
    size = shape(source)[dim]
    if size % pieces:
        return 0
    new = captured.insert(node, aten.split.Tensor, source, size // pieces, dim)
    new.meta = dict(node.meta)
    captured.replace(node, new)
    return 1


def _conv1d_to_linear(captured: Captured, node: fx.Node) -> int:
    """A convolution with one tap along a sequence is a matrix product on its channels-last view."""
    weight = shape(argument(node, "weight"))
    plain = (
        weight[2:] == (1,)
        and argument(node, "groups") == 1
        and tuple(argument(node, "stride")) == (1,)
        and argument(node, "padding") in (0, [0])
    )
    if not plain:
        return 0
    x_NLC = captured.insert(node, aten.transpose.int, node.args[0], 1, 2)
    w_OC = captured.insert(node, aten.select.int, argument(node, "weight"), 2, 0)
    y_NLO = captured.insert(node, aten.linear.default, x_NLC, w_OC, argument(node, "bias"))
    captured.replace(node, captured.insert(node, aten.transpose.int, y_NLO, 1, 2))
    return 1


def _fold(captured: Captured) -> int:
    """Computes what depends on weights alone."""
    known: dict[fx.Node, Any] = {}
    recipes: dict[fx.Node, Ref | Recipe] = {}
    for node in captured.graph.nodes:
        if node.op == "get_attr":
            known[node], recipes[node] = captured.constant(node), captured.reference(node)
        elif node.op == "call_function" and _pure(node) and all(i in known for i in node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
            with torch.no_grad():
                known[node] = node.target(*args, **kwargs)
            parts: Any = fx.map_arg((node.args, node.kwargs), recipes.__getitem__)  # type: ignore[arg-type]
            recipes[node] = Recipe(node.target, *parts)
    folded = [n for n in known if n.op == "call_function" and any(u not in known for u in n.users)]
    for node in folded:
        if isinstance(known[node], torch.Tensor):
            constant = captured.add_constant(known[node].clone(), "folded")
            captured.derived.recipes[str(constant.target)] = recipes[node]  # type: ignore[assignment]
            captured.replace(node, constant)
    captured.refresh()
    return len(folded)


def _share_equal(captured: Captured) -> int:
    """Computes pure operators with equal arguments once (for example each block's silu(time))."""
    seen: dict[Any, fx.Node] = {}
    count = 0
    for node in list(captured.graph.nodes):
        if node.op == "get_attr":
            key: Any = ("get_attr", node.target)
        elif node.op == "call_function" and _pure(node):
            key = (node.target, _frozen(node.args), _frozen(node.kwargs))
        else:
            continue
        if key in seen:
            captured.replace(node, seen[key])
            captured.graph.erase_node(node)
            count += 1
        else:
            seen[key] = node
    return count


def _pure(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    tags = getattr(node.target, "tags", ())
    return schema is not None and not schema.is_mutable and torch.Tag.nondeterministic_seeded not in tags


def _frozen(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return (type(value).__name__, *(_frozen(v) for v in value))
    if isinstance(value, dict):
        return tuple(sorted((k, _frozen(v)) for k, v in value.items()))
    return (type(value).__name__, value) if isinstance(value, int | float | bool) else value


CLEANUP = Pass(
    name="cleanup",
    summary="remove operators without effect, share equal ones",
    stage=PassStage.CLEANUP,
    structural=True,
    rewrite=cleanup,
)

"""sdpa: softmax(q k) v becomes one scaled_dot_product_attention. The matrix of weights (L x L) is never stored.

Matched as einsum - scale - softmax - einsum (or matmul / bmm), in any order of axes; factors on q, on k and on their product
are combined into one scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from voxtune.plan.graph import CASTS, Captured, argument, aten, is_call, shape, sole_user
from voxtune.plan.passes.base import Context, Pass, PassOutcome, PassStage

SOFTMAX = (aten.softmax.int, aten._softmax.default)
PRODUCTS = (aten.matmul.default, aten.bmm.default)


@dataclass
class Product:
    """A batched product as an einsum: `letters` of both inputs and of the output."""

    left: Any
    right: Any
    letters: tuple[str, str, str]


def sdpa(captured: Captured, _context: Context, _options: dict[str, Any]) -> PassOutcome:
    count = 0
    for softmax in captured.nodes(*SOFTMAX):
        count += _fuse(captured, softmax)
    captured.refresh()
    return PassOutcome(count, None if count else "no softmax between two products")


def _fuse(captured: Captured, softmax: fx.Node) -> int:
    rank = len(shape(softmax))
    if rank < 3 or argument(softmax, "dim") not in (-1, rank - 1):
        return 0
    scores, scale = _scaled(softmax.args[0])
    first = _product(scores)
    after = sole_user(softmax)
    weights = softmax
    while after is not None and is_call(after, *CASTS):
        weights, after = after, sole_user(after)
    second = _product(after)
    if first is None or second is None or after is None or second.left is not weights:
        return 0
    axes = _axes(first, second)
    if axes is None or len(scores.users) != 1:
        return 0
    q, q_scale = _scaled(first.left)
    k, k_scale = _scaled(first.right)
    attention = _attention(captured, after, (q, k, second.right), axes, scale * q_scale * k_scale)
    captured.replace(after, attention)
    return 1


def _scaled(node: Any) -> tuple[Any, float]:
    """The node behind casts and multiplications by numbers, and the product of these numbers."""
    scale = 1.0
    while True:
        if is_call(node, aten.mul.Tensor, aten.mul.Scalar) and isinstance(node.args[1], int | float):
            scale *= node.args[1]
        elif is_call(node, aten.div.Tensor, aten.div.Scalar) and isinstance(node.args[1], int | float):
            scale /= node.args[1]
        elif not is_call(node, *CASTS):
            return node, scale
        node = node.args[0]


def _product(node: Any) -> Product | None:
    if is_call(node, aten.einsum.default):
        equation, operands = node.args[0], node.args[1]
        inputs, _, output = equation.replace(" ", "").partition("->")
        if len(operands) != 2 or not output or "." in equation:
            return None
        left, right = inputs.split(",")
        return Product(operands[0], operands[1], (left, right, output))
    if is_call(node, *PRODUCTS):
        rank = len(shape(node))
        if rank not in (3, 4) or len(shape(node.args[0])) != rank or len(shape(node.args[1])) != rank:
            return None
        batch = "ab"[: rank - 2]
        return Product(node.args[0], node.args[1], (batch + "xy", batch + "yz", batch + "xz"))
    return None


@dataclass
class _Axes:
    """Permutations of each operand to (batch..., length, width), and of the result back."""

    q: list[int]
    k: list[int]
    v: list[int]
    back: list[int]
    batch: int


def _axes(first: Product, second: Product) -> _Axes | None:
    left, right, scores = first.letters
    weights, values, output = second.letters
    if len(scores) != len(weights) or len(set(scores)) != len(scores):
        return None
    # The second product's letters, renamed to the first one's.
    names = dict(zip(weights, scores, strict=True))
    width = next((c for c in values if c not in names), None)
    if width is None or any(c not in names and c != width for c in output + values):
        return None
    names[width] = "*"
    values, output = ("".join(names[c] for c in text) for text in (values, output))
    key = scores[-1]
    query = next((c for c in scores if c in left and c not in right), None)
    inner = [c for c in left if c in right and c not in scores]
    batch = [c for c in scores if c in left and c in right]
    if query is None or len(inner) != 1 or key not in right or key in left:
        return None
    fits = sorted(values) == sorted([*batch, key, "*"]) and sorted(output) == sorted([*batch, query, "*"])
    if not fits or len(batch) not in (1, 2) or len(left) != len(scores) or len(right) != len(scores):
        return None
    return _Axes(
        q=[left.index(c) for c in (*batch, query, *inner)],
        k=[right.index(c) for c in (*batch, key, *inner)],
        v=[values.index(c) for c in (*batch, key, "*")],
        back=[[*batch, query, "*"].index(c) for c in output],
        batch=len(batch),
    )


def _attention(captured: Captured, before: fx.Node, qkv: tuple[Any, Any, Any], axes: _Axes, scale: float) -> fx.Node:
    def arranged(node: Any, order: list[int]) -> fx.Node:
        moved = captured.insert(before, aten.permute.default, node, order)
        return captured.insert(before, aten.unsqueeze.default, moved, 1) if axes.batch == 1 else moved

    q, k, v = (arranged(n, o) for n, o in zip(qkv, (axes.q, axes.k, axes.v), strict=True))
    y = captured.insert(before, aten.scaled_dot_product_attention.default, q, k, v, scale=scale)
    if axes.batch == 1:
        y = captured.insert(before, aten.squeeze.dim, y, 1)
    return captured.insert(before, aten.permute.default, y, axes.back)


SDPA = Pass(name="sdpa", summary="attention in one kernel", stage=PassStage.SHARING, structural=True, rewrite=sdpa)

"""elementwise: chains of elementwise operators that no other pass fuses (gates, GEGLU, residual sums, casts) in one kernel each.

A node joins the kernel of its readers if these are all in one kernel and it has that kernel's shape, or is smaller and cheap to
compute again for each element. So a kernel has one result. The bias of a convolution by cuDNN, which PyTorch adds by a kernel of
its own, is added in the kernel that reads the convolution. Arithmetic is float32, rounded once. What shift.py moves needs no
kernel at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import fx

from voxtune.files import one_line
from voxtune.kernels.elementwise_program import MAX_INPUTS, MAX_STEPS, OPERATIONS, Instruction, is_constant, text_of
from voxtune.plan.graph import CASTS, Captured, argument, aten, shape, sole_user, value
from voxtune.plan.passes.base import Context, Pass, PassOutcome, PassStage, register_operators
from voxtune.plan.passes.shift import merge_shifts

TYPES = (torch.float32, torch.bfloat16, torch.float16)
# Operations on smaller tensors that a kernel computes again for each element.
MAX_REPEATED = 2
CONVOLUTIONS = (
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    aten.conv1d.padding,
    aten.conv2d.padding,
    aten.conv3d.padding,
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
)


@dataclass(frozen=True)
class Local:
    """The result of an earlier part of the same recipe."""

    index: int


@dataclass(frozen=True)
class Operator:
    """An operation on nodes, numbers and results of earlier parts."""

    name: str
    operands: tuple[Any, ...]
    numbers: tuple[float, ...] = ()


# An operator as operations of a program; none for a cast, which is its source.
Recipe = list[Operator]


def _first(node: fx.Node, count: int = 1) -> list[Any]:
    """The operator's first arguments."""
    return [argument(node, a.name) for a in node.target._schema.arguments[:count]]  # type: ignore[union-attr]


def _plain(name: str, *more: str) -> Callable[[fx.Node], Recipe]:
    """An operation on the operator's first arguments, with the arguments named `more` as its numbers."""

    def recipe(node: fx.Node) -> Recipe:
        operands = _first(node, OPERATIONS[name].operands)
        return [Operator(name, tuple(operands), tuple(argument(node, m) for m in more))]

    return recipe


def _sum(name: str, *, swapped: bool = False) -> Callable[[fx.Node], Recipe]:
    """a + alpha b, a - alpha b, and swapped: b - alpha a."""

    def recipe(node: fx.Node) -> Recipe:
        first, second = _first(node, 2)[:: -1 if swapped else 1]
        alpha = argument(node, "alpha")
        if alpha == 1:
            return [Operator(name, (first, second))]
        if isinstance(second, int | float):
            return [Operator(name, (first, alpha * second))]
        return [Operator("mul", (second, alpha)), Operator(name, (first, Local(0)))]

    return recipe


def _power(node: fx.Node) -> Recipe | None:
    names = {2: "square", 3: "cube", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    name = names.get(argument(node, "exponent"))
    return None if name is None else [Operator(name, tuple(_first(node)))]


def _gelu(node: fx.Node) -> Recipe:
    return [Operator("gelu_tanh" if argument(node, "approximate") == "tanh" else "gelu", tuple(_first(node)))]


def _between(node: Any, low: float | None, high: float | None) -> Recipe:
    parts = list[Operator]()
    for name, limit in (("maximum", low), ("minimum", high)):
        if limit is not None:
            parts.append(Operator(name, (Local(len(parts) - 1) if parts else node, limit)))
    return parts


def _clamp(low: str | float | None, high: str | float | None) -> Callable[[fx.Node], Recipe]:
    """Limits by their names in the schema, or as numbers."""

    def recipe(node: fx.Node) -> Recipe:
        limits = (argument(node, limit) if isinstance(limit, str) else limit for limit in (low, high))
        return _between(*_first(node), *limits)

    return recipe


def _hard_sigmoid(node: fx.Node) -> Recipe:
    return [
        Operator("add", (*_first(node), 3.0)),
        *_shifted(_between(Local(-1), 0.0, 6.0), 1),
        Operator("div", (Local(2), 6.0)),
    ]


def _hard_swish(node: fx.Node) -> Recipe:
    return [*_hard_sigmoid(node), Operator("mul", (*_first(node), Local(3)))]


def _shifted(parts: Recipe, by: int) -> Recipe:
    shift = lambda x: Local(x.index + by) if isinstance(x, Local) else x  # noqa: E731
    return [Operator(p.name, tuple(map(shift, p.operands)), p.numbers) for p in parts]


def _cast(node: fx.Node) -> Recipe | None:
    known = {"dtype", "non_blocking", "copy"}
    declared = [a.name for a in node.target._schema.arguments[1:]]  # type: ignore[union-attr]
    return [] if all(argument(node, name) is None for name in declared if name not in known) else None


RECIPES: dict[Any, Callable[[fx.Node], Recipe | None]] = {
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), _sum("add")),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), _sum("sub")),
    **dict.fromkeys((aten.rsub.Tensor, aten.rsub.Scalar), _sum("sub", swapped=True)),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), _plain("mul")),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar), _plain("div")),
    **dict.fromkeys((aten.maximum.default, aten.max.other), _plain("maximum")),
    **dict.fromkeys((aten.minimum.default, aten.min.other), _plain("minimum")),
    **{
        getattr(aten, name).default: _plain(name)
        for name in ("neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "square")
    },
    **{getattr(aten, name).default: _plain(name) for name in ("sigmoid", "tanh", "silu", "relu", "mish")},
    aten.leaky_relu.default: _plain("leaky_relu", "negative_slope"),
    aten.elu.default: _plain("elu", "alpha", "scale", "input_scale"),
    aten.softplus.default: _plain("softplus", "beta", "threshold"),
    aten.gelu.default: _gelu,
    aten.pow.Tensor_Scalar: _power,
    aten.clamp.default: _clamp("min", "max"),
    aten.clamp_min.default: _clamp("min", None),
    aten.clamp_max.default: _clamp(None, "max"),
    aten.hardtanh.default: _clamp("min_val", "max_val"),
    aten.relu6.default: _clamp(0.0, 6.0),
    aten.hardsigmoid.default: _hard_sigmoid,
    aten.hardswish.default: _hard_swish,
    **dict.fromkeys(CASTS, _cast),
}


@dataclass
class Cluster:
    """Operators of one kernel; `root` computes its result."""

    root: fx.Node
    nodes: set[fx.Node] = field(default_factory=set)
    steps: int = 0
    repeated: int = 0

    def takes(self, node: fx.Node, recipe: Recipe) -> bool:
        """Adds an operator whose readers are all in the kernel, unless the kernel becomes too large."""
        inputs = {i for n in (*self.nodes, node) for i in n.all_input_nodes} - self.nodes - {node}
        repeated = self.repeated + (len(recipe) if shape(node) != shape(self.root) else 0)
        if len(inputs) > MAX_INPUTS or self.steps + len(recipe) > MAX_STEPS or repeated > MAX_REPEATED:
            return False
        self.nodes.add(node)
        self.steps, self.repeated = self.steps + len(recipe), repeated
        return True


def elementwise(captured: Captured, context: Context, _options: dict[str, Any]) -> PassOutcome:
    register_operators()
    if context.dtype != torch.float32:
        try:
            infer_types(captured)
        except Exception as error:  # an operator whose result's type cannot be inferred
            return PassOutcome(0, f"{type(error).__name__}: {one_line(error)}")
    merged = merge_shifts(captured)
    for node in captured.nodes(*CONVOLUTIONS):
        _take_bias(captured, node)
    clusters = find_clusters(captured)
    for cluster in clusters:
        _fuse(captured, cluster)
    captured.refresh()
    operators = sum(len(cluster.nodes) for cluster in clusters)
    notes = [f"{operators} operators in {len(clusters)} kernels"] if clusters else []
    notes += [f"{merged} constants moved into the bias of a product"] if merged else []
    reason = None if clusters or merged else "no two elementwise operators in a row"
    return PassOutcome(len(clusters) + merged, reason, notes)


def infer_types(captured: Captured) -> None:
    """Infers each node's shape and type anew: half precision is applied to a graph that has the types of the capture."""
    with captured.mode, torch.no_grad():
        for node in captured.graph.nodes:
            if node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
                node.meta["val"] = node.target(*args, **kwargs)


def _take_bias(captured: Captured, node: fx.Node) -> None:
    """The bias of a convolution that only an elementwise operator reads becomes an operator of its own."""
    bias, reader = argument(node, "bias"), sole_user(node)
    if captured.constant(bias) is None or reader is None or _recipe(reader) is None or shape(reader) != shape(node):
        return
    if len(shape(node)) != len(shape(argument(node, "weight"))):
        return  # without a batch
    column = captured.derive("bias", aten.reshape.default, bias, [1, -1, *[1] * (len(shape(node)) - 2)])
    position = next(i for i, a in enumerate(node.target._schema.arguments) if a.name == "bias")  # type: ignore[union-attr]
    if position < len(node.args):
        node.args = (*node.args[:position], None, *node.args[position + 1 :])
    else:
        node.kwargs = {**node.kwargs, "bias": None}
    reader.replace_input_with(node, captured.insert(reader, aten.add.Tensor, node, column, of=node))


def find_clusters(captured: Captured) -> list[Cluster]:
    """The kernels, the last one first; types must be up to date."""
    member: dict[fx.Node, Cluster] = {}
    for node in reversed(captured.graph.nodes):
        recipe = _recipe(node)
        if recipe is None:
            continue
        readers = {id(cluster): cluster for cluster in (member.get(user) for user in node.users)}
        cluster = next(iter(readers.values())) if len(readers) == 1 else None
        if cluster is None or not cluster.takes(node, recipe):
            cluster = Cluster(node)
            if not cluster.takes(node, recipe):
                continue
        member[node] = cluster
    clusters = {id(cluster): cluster for cluster in member.values()}
    return [c for c in clusters.values() if len(c.nodes) > 1 and c.steps]


def _recipe(node: fx.Node) -> Recipe | None:
    """What a node computes, or None if it is not an elementwise operator on floating-point tensors."""
    if node.op != "call_function" or node.target not in RECIPES:
        return None
    result, sources = value(node), [value(i) for i in node.all_input_nodes]
    if result is None or not sources or prod(shape(node)) == 0:
        return None
    if any(s is None or s.dtype not in TYPES or s.device != result.device for s in (*sources, result)):
        return None
    recipe = RECIPES[node.target](node)
    if recipe is None or not all(_is_number(x) for part in recipe for x in part.numbers):
        return None
    operands = (x for part in recipe for x in part.operands)
    return recipe if all(isinstance(x, fx.Node | Local) or _is_number(x) for x in operands) else None


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and is_constant(float(x))


def _fuse(captured: Captured, cluster: Cluster) -> None:
    nodes = [n for n in captured.graph.nodes if n in cluster.nodes]
    inputs = list(dict.fromkeys(i for n in nodes for i in n.all_input_nodes if i not in cluster.nodes))
    places = {node: index for index, node in enumerate(inputs)}
    steps = list[Instruction]()
    for node in nodes:
        recipe, start = _recipe(node), len(inputs) + len(steps)
        assert recipe is not None
        for part in recipe:
            steps.append(
                Instruction(part.name, tuple(_operand(x, places, start) for x in part.operands), _floats(part.numbers))
            )
        places[node] = len(inputs) + len(steps) - 1 if recipe else places[_first(node)[0]]
    result = value(cluster.root)
    assert result is not None
    args = (inputs, text_of(steps), result.dtype)
    new = captured.insert(cluster.root, torch.ops.voxtune.elementwise.default, *args, of=cluster.root)
    captured.replace(cluster.root, new)


def _operand(x: Any, places: dict[fx.Node, int], start: int) -> int | float:
    if isinstance(x, Local):
        return start + x.index
    return places[x] if isinstance(x, fx.Node) else float(x)


def _floats(numbers: tuple[Any, ...]) -> tuple[float, ...]:
    return tuple(map(float, numbers))


ELEMENTWISE = Pass(
    name="elementwise",
    summary="chains of elementwise operators in one kernel each",
    stage=PassStage.FUSION,
    structural=True,
    has_gradients=False,
    needs_gpu=True,
    rewrite=elementwise,
)

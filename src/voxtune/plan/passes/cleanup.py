"""cleanup: removes operators without effect (casts to the same type, dropout in eval mode, copies) and normalises equivalent
operators, so that later passes need one pattern each; a norm with fixed statistics (BatchNorm in eval mode) becomes part of the
convolution before it, the mean of 2x2x2 voxels part of a 1x1x1 convolution after it; writes into views become reads of what was
written (scatter.py). Exact."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from voxtune.plan.derivation import Derivation, Ref, computes_weights
from voxtune.plan.graph import CASTS, Captured, argument, aten, is_call, shape, value
from voxtune.plan.passes.base import Context, Pass, PassOutcome, PassStage
from voxtune.plan.passes.scatter import resolve_scatters
from voxtune.plan.passes.written_norm import RESHAPES, written_norms

COPIES = (
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh_copy.default,
    aten.contiguous.default,
    aten.clone.default,
)
FORWARD = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.conv2d.padding, aten.conv3d.padding)
POINTWISE = (aten.conv2d.default, aten.conv3d.default)
POOLS = (aten.avg_pool2d.default, aten.avg_pool3d.default)
TRANSPOSED = (aten.conv_transpose2d.input, aten.conv_transpose3d.input)


def cleanup(captured: Captured, _context: Context, _options: dict[str, Any]) -> PassOutcome:
    count = 0
    for node in list(captured.graph.nodes):
        if node.op == "call_function":
            count += _simplify(captured, node)
    captured.refresh()
    count += resolve_scatters(captured)
    count += _fold(captured)
    count += _share_equal(captured)
    count += written_norms(captured)
    count += _merge_reshapes(captured)
    captured.refresh()
    return PassOutcome(count)


def _simplify(captured: Captured, node: fx.Node) -> int:
    target = node.target
    if target == aten.chunk.default:
        return _chunk_to_split(captured, node)
    if target == aten.conv1d.default:
        return _conv1d_to_linear(captured, node)
    if target in POINTWISE and is_call(node.args[0], *POOLS):
        return _pool_to_stride(captured, node, node.args[0])  # type: ignore[arg-type]
    if (norm := _fixed_norm(node)) is not None:
        return _fold_norm(captured, node, norm)
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
    if is_call(node, *CASTS, aten.to.dtype_layout, aten.to.device, aten.to.other, aten.type_as.default):
        before, after = value(node.args[0]), value(node)
        return (
            before is not None and after is not None and before.dtype == after.dtype and before.device == after.device
        )
    # x * 1, x / 1, x + 0, x - 0
    neutral = 1 if is_call(node, aten.mul.Tensor, aten.div.Tensor) else 0
    if neutral or is_call(node, aten.add.Tensor, aten.sub.Tensor):
        before, after, number = value(node.args[0]), value(node), node.args[1]
        return (
            isinstance(number, int | float)
            and number == neutral
            and before is not None
            and after is not None
            and before.dtype == after.dtype
        )
    return False


def _fixed_norm(node: fx.Node) -> fx.Node | None:
    """The norm with running statistics whose result a node is."""
    if node.target is operator.getitem and node.args[1] == 0:
        norm = node.args[0]
        return norm if is_call(norm, aten._native_batch_norm_legit_no_training.default) else None  # type: ignore[return-value]
    in_eval_mode = (is_call(node, aten.batch_norm.default) and not argument(node, "training")) or (
        is_call(node, aten.instance_norm.default) and not argument(node, "use_input_stats")
    )
    return node if in_eval_mode else None


def _fold_norm(captured: Captured, node: fx.Node, norm: fx.Node) -> int:
    """Into weight and bias of the convolution before it, if nothing else reads that convolution."""
    source = argument(norm, "input")
    transposed = is_call(source, *TRANSPOSED)
    if not is_call(source, *FORWARD, *TRANSPOSED) or len(source.users) != 1:
        return 0
    weight, bias = argument(source, "weight"), argument(source, "bias")
    gamma, beta, mean, variance = (argument(norm, name) for name in ("weight", "bias", "running_mean", "running_var"))
    optional = [a for a in (bias, gamma, beta) if a is not None]
    if any(captured.constant(a) is None for a in (weight, mean, variance, *optional)):
        return 0
    if transposed and argument(source, "groups") != 1:
        return 0
    eps = argument(norm, "eps")
    scaled = captured.derive("folded", folded_weight, weight, gamma, variance, eps, 1 if transposed else 0)
    offset = captured.derive("folded", folded_bias, weight, bias, gamma, beta, mean, variance, eps)
    more = {name: a for name, a in source.kwargs.items() if name not in ("weight", "bias")}
    new = captured.insert(source, source.target, source.args[0], scaled, offset, *source.args[3:], of=source, **more)
    captured.replace(node, new)
    return 1


def _scale(gamma: Tensor | None, variance: Tensor, eps: float) -> Tensor:
    """The factor per channel of a norm with running statistics, in float64."""
    return (variance.double() + eps).rsqrt() * (1 if gamma is None else gamma.double())


@computes_weights
def folded_weight(weight: Tensor, gamma: Tensor | None, variance: Tensor, eps: float, outputs: int) -> Tensor:
    """A convolution's weight with the norm after it; `outputs` is its dimension of output channels."""
    per_output = [1] * weight.dim()
    per_output[outputs] = -1
    return (weight.double() * _scale(gamma, variance, eps).view(per_output)).to(weight.dtype)


@computes_weights
def folded_bias(
    weight: Tensor,
    bias: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    eps: float,
) -> Tensor:
    before = -mean.double() if bias is None else bias.double() - mean.double()
    total = before * _scale(gamma, variance, eps)
    return (total if beta is None else total + beta.double()).to(weight.dtype)


@computes_weights
def mean_weight(weight: Tensor) -> Tensor:
    """The weight of a 1x1x1 convolution, for 2x2x2 voxels of which it reads the mean."""
    sides = weight.dim() - 2
    return (weight / 2**sides).expand(*weight.shape[:2], *[2] * sides).contiguous()


def _pool_to_stride(captured: Captured, node: fx.Node, pool: fx.Node) -> int:
    """A mean of 2x2x2 voxels, then a 1x1x1 convolution: one convolution of stride 2 with the weight divided by 8.

    Pooling has no kernel for channels-last volumes.
    """
    weight, sides = captured.constant(argument(node, "weight")), len(shape(node)) - 2
    two, one, zero = ([number] * sides for number in (2, 1, 0))

    def is_plain(call: fx.Node, **expected: list[int]) -> bool:
        return all(list(argument(call, name)) in (value, value[:1]) for name, value in expected.items())

    if (
        weight is None
        or len(pool.users) != 1
        or tuple(weight.shape[2:]) != (1,) * sides
        or not is_plain(node, stride=one, padding=zero)
        or argument(node, "groups") != 1
        or not is_plain(pool, kernel_size=two, padding=zero)
        or list(argument(pool, "stride")) not in ([], [2], two)
        or argument(pool, "ceil_mode")
        or argument(pool, "divisor_override") is not None
    ):
        return 0
    mean = captured.derive("folded", mean_weight, argument(node, "weight"))
    new = captured.insert(node, node.target, pool.args[0], mean, argument(node, "bias"), two, of=node)  # type: ignore[arg-type]
    captured.replace(node, new)
    return 1


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
    derivations: dict[fx.Node, Ref | Derivation] = {}
    for node in captured.graph.nodes:
        if node.op == "get_attr":
            known[node], derivations[node] = captured.constant(node), captured.reference(node)
        elif node.op == "call_function" and _pure(node) and all(i in known for i in node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
            with torch.no_grad():
                known[node] = node.target(*args, **kwargs)
            parts: Any = fx.map_arg((node.args, node.kwargs), derivations.__getitem__)  # type: ignore[arg-type]
            derivations[node] = Derivation(node.target, *parts)
    folded = [n for n in known if n.op == "call_function" and any(u not in known for u in n.users)]
    for node in folded:
        if isinstance(known[node], Tensor):
            constant = captured.add_constant(known[node].clone(), "folded")
            captured.derived.derivations[str(constant.target)] = derivations[node]  # type: ignore[assignment]
            captured.replace(node, constant)
    captured.refresh()
    return len(folded)


def _merge_reshapes(captured: Captured) -> int:
    """A reshape of a reshape is one; one to the shape that its source has is none. They would hide what follows a norm."""
    count = 0
    for node in captured.nodes(*RESHAPES):
        source: Any = node.args[0]
        if is_call(source, *RESHAPES):
            node.update_arg(0, source.args[0])
            count += 1
        if shape(node.args[0]) == shape(node):
            captured.replace(node, node.args[0])  # type: ignore[arg-type]
            captured.graph.erase_node(node)
            count += 1
    return count


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

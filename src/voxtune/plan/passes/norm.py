"""fuse_norm: a norm with what surrounds it as one operator, float32 statistics, no concatenation.

    [cat] - [+ shift per channel] - group_norm - [+ residual] - [activation]
    RMS norm over the channels of a voxel - [* weight] - [+ bias] - [activation]

The shift is added to all voxels of a channel: a convolution's bias, the time embedding. It moves a channel's mean and keeps its
variance, so the norm can apply it without another pass over the volume. InstanceNorm is a group_norm of one channel a group, on
which a shift has no effect at all. (It is not rewritten as aten.group_norm first: on a CPU that is ten times less accurate for
channels-last volumes.)"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from voxtune.plan.derivation import computes_weights
from voxtune.plan.graph import CASTS, Captured, argument, aten, channel_sources, is_call, shape, sole_user, value
from voxtune.plan.passes.base import Context, Pass, PassOutcome, PassStage, register_operators

EXPANSIONS = (aten.expand.default, aten.expand_as.default)


def fuse_norm(captured: Captured, _context: Context, _options: dict[str, Any]) -> PassOutcome:
    register_operators()
    norms = [n for n in captured.nodes(aten.group_norm.default, aten.instance_norm.default) if _has_kernel(n)]
    for norm in norms:
        _fuse(captured, norm)
    quotients = captured.nodes(aten.div.Tensor, aten.mul.Tensor)
    count = len(norms) + sum(_fuse_rms(captured, node) for node in quotients if node.users)
    captured.refresh()
    return PassOutcome(count, None if count else "no GroupNorm, InstanceNorm or RMS norm over channels")


def _has_kernel(norm: fx.Node) -> bool:
    if is_call(norm, aten.instance_norm.default):
        # In training mode it also updates its running statistics; in eval mode these are a fixed scale and offset.
        return argument(norm, "use_input_stats") and argument(norm, "running_mean") is None
    return len(shape(norm)) >= 3


@dataclass
class Tail:
    """The operators after a norm that one operator computes with it; each is the only reader of the one before."""

    last: fx.Node
    residual: fx.Node | None = None
    activation: str = "none"
    slope: float = 0.01
    slopes: fx.Node | None = None
    nodes: list[fx.Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.nodes.append(self.last)

    def take(self, *nodes: fx.Node) -> None:
        self.nodes += nodes
        self.last = nodes[-1]

    def take_cast(self, dtype: torch.dtype) -> None:
        """A cast back to the source's type."""
        user = sole_user(self.last)
        if user is not None and is_call(user, *CASTS):
            after = value(user)
            if after is not None and after.dtype == dtype:
                self.take(user)

    def take_residual(self) -> None:
        """An addition of a volume of the same shape and type."""
        user = sole_user(self.last)
        if user is None or not is_call(user, aten.add.Tensor) or argument(user, "alpha") != 1:
            return
        other = user.args[1] if user.args[0] is self.last else user.args[0]
        before, added, after = value(self.last), value(other), value(user)
        if before is None or added is None or after is None or other is self.last:
            return
        if added.shape == before.shape and added.dtype == before.dtype:
            assert isinstance(other, fx.Node)
            self.residual = other
            self.take(user)

    def take_activation(self, *, parametric: bool = True) -> None:
        """`parametric`: also those with a slope."""
        if self._take_sigmoid_product():
            return
        user = sole_user(self.last)
        if user is None or user.op != "call_function" or user.args[:1] != (self.last,):
            return
        if user.target in (aten.silu.default, aten.relu.default):
            self.activation = "silu" if user.target == aten.silu.default else "relu"
        elif user.target == aten.clamp_min.default and argument(user, "min") == 0:
            self.activation = "relu"
        elif user.target == aten.gelu.default:
            self.activation = "gelu_tanh" if argument(user, "approximate") == "tanh" else "gelu"
        elif parametric and user.target == aten.leaky_relu.default:
            self.activation, self.slope = "leaky_relu", float(argument(user, "negative_slope"))
        elif parametric and user.target == aten.prelu.default:
            self.activation, self.slopes = "prelu", argument(user, "weight")
        else:
            return
        self.take(user)

    def _take_sigmoid_product(self) -> bool:
        """x * sigmoid(x), which is silu."""
        sigmoids = [u for u in self.last.users if is_call(u, aten.sigmoid.default)]
        if len(sigmoids) != 1 or len(self.last.users) != 2:
            return False
        product = sole_user(sigmoids[0])
        if product is None or not is_call(product, aten.mul.Tensor) or product not in self.last.users:
            return False
        self.activation = "silu"
        self.take(sigmoids[0], product)
        return True

    def replace(self, captured: Captured, fused: fx.Node) -> None:
        captured.replace(self.last, fused)
        # Removed at once: as further readers of the residual they would hide other patterns.
        for node in reversed(self.nodes):
            captured.graph.erase_node(node)


def _fuse(captured: Captured, norm: fx.Node) -> None:
    source = _uncast(norm.args[0])
    channels = shape(source)[1]
    groups = argument(norm, "num_groups") if is_call(norm, aten.group_norm.default) else channels
    tail = Tail(norm)
    before = value(source)
    if source is not norm.args[0] and before is not None:
        tail.take_cast(before.dtype)
    tail.take_residual()
    tail.take_activation()
    source, shift = _shift(captured, source, norm)
    fused = captured.insert(
        tail.last,
        torch.ops.voxtune.norm_act.default,
        channel_sources(source),
        argument(norm, "weight") or _per_channel_constant(captured, channels, 1.0),
        argument(norm, "bias") or _per_channel_constant(captured, channels, 0.0),
        groups,
        argument(norm, "eps"),
        None if groups == channels else shift,
        tail.activation,
        tail.slope,
        tail.slopes,
        tail.residual,
        [],
        of=norm,
    )
    tail.replace(captured, fused)


def _per_channel_constant(captured: Captured, channels: int, number: float) -> fx.Node:
    """The weight or bias of a norm that has none."""
    return captured.add_constant(torch.full((channels,), number, device=captured.device), "affine")


def _uncast(node: Any) -> Any:
    """The source before a cast to float32, which protects the statistics: the operator's are float32 anyway."""
    if is_call(node, *CASTS):
        before, after = value(node.args[0]), value(node)
        if before is not None and after is not None and after.dtype == torch.float32:
            return node.args[0]
    return node


def _shift(captured: Captured, source: fx.Node, norm: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """For `volume + per-channel` that only the norm reads: the volume, and the addend as (N or 1, C)."""
    if is_call(source, aten.add.Tensor) and argument(source, "alpha") == 1 and len(source.users) == 1:
        for volume, addend in ((source.args[0], source.args[1]), (source.args[1], source.args[0])):
            if isinstance(volume, fx.Node) and per_channel(addend, shape(source)) and shape(volume) == shape(source):
                flat = captured.insert(norm, aten.reshape.default, addend, list(shape(addend)[:2]))
                return volume, flat
    return source, None


def per_channel(node: Any, volume: tuple[int, ...]) -> bool:
    """Whether a node has one value for each sample and channel of a volume of this shape."""
    values = shape(node)
    return (
        len(values) == len(volume) >= 3
        and values[1] == volume[1]
        and values[0] in (1, volume[0])
        and all(s == 1 for s in values[2:])
        and any(s > 1 for s in volume[2:])
    )


def set_argument(norm: fx.Node, name: str, given: Any) -> None:
    """Replaces an argument of an operator whose arguments are all given by position."""
    names = [a.name for a in norm.target._schema.arguments]  # type: ignore[union-attr]
    norm.update_arg(names.index(name), given)


def _fuse_rms(captured: Captured, node: fx.Node) -> bool:
    """x / rms(x) over the channels, in the forms of `_root_mean_square`."""
    inverse = is_call(node, aten.mul.Tensor)
    pairs = (node.args[:2], node.args[1::-1]) if inverse else (node.args[:2],)
    for x, other in pairs:
        if isinstance(x, fx.Node) and len(shape(x)) >= 3 and shape(x) == shape(node):
            form = _root_mean_square(other, x, inverse=inverse)
            if form is not None:
                break
    else:
        return False
    factor, eps, floor = form
    source, channels = _uncast(x), shape(x)[1]
    tail = Tail(node)
    before = value(source)
    if source is not x and before is not None:
        tail.take_cast(before.dtype)
    weights, bias = _affine(captured, tail)
    tail.take_activation(parametric=False)
    fused = captured.insert(
        tail.last,
        torch.ops.voxtune.rms_norm_act.default,
        source,
        _channel_product(captured, channels, factor, *weights),
        None if bias is None else _channel_product(captured, channels, 1.0, bias),
        eps,
        floor,
        tail.activation,
        of=node,
    )
    tail.replace(captured, fused)
    return True


def _root_mean_square(node: Any, x: fx.Node, *, inverse: bool = False) -> tuple[float, float, float] | None:
    """(factor, eps, floor) if x / node is x * factor / max(sqrt(mean(x^2) + eps), floor), the mean over the channels.

    node is norm(x) clamped at a minimum (torch.nn.functional.normalize), or sqrt(mean(x^2) + eps), or with `inverse` the
    inverse of the latter, by which x is multiplied.
    """
    channels = shape(x)[1]
    while is_call(node, *EXPANSIONS):
        node = node.args[0]
    if not inverse and is_call(node, aten.clamp_min.default):
        norm, floor = node.args[0], argument(node, "min")
        if is_call(norm, aten.linalg_vector_norm.default) and norm.args[0] is x and argument(norm, "ord") == 2:
            return (channels**-0.5, 0.0, floor * channels**-0.5) if _over_channels(norm, x) else None
        return None
    if not is_call(node, aten.rsqrt.default if inverse else aten.sqrt.default):
        return None
    total = node.args[0]
    if not is_call(total, aten.add.Tensor) or not isinstance(total.args[1], float) or argument(total, "alpha") != 1:
        return None
    mean = total.args[0]
    if not is_call(mean, aten.mean.dim) or not _over_channels(mean, x):
        return None
    square = mean.args[0]
    by_power = is_call(square, aten.pow.Tensor_Scalar) and square.args[0] is x and square.args[1] == 2
    by_product = is_call(square, aten.mul.Tensor) and square.args[:2] == (x, x)
    return (1.0, total.args[1], 0.0) if by_power or by_product else None


def _over_channels(reduction: fx.Node, x: fx.Node) -> bool:
    return argument(reduction, "dim") in ([1], [1 - len(shape(x))]) and argument(reduction, "keepdim") is True


def _affine(captured: Captured, tail: Tail) -> tuple[list[fx.Node | float], fx.Node | float | None]:
    """Factors and then at most one addend: numbers, or weights with one value per channel."""
    factors: list[fx.Node | float] = []
    while True:
        user = sole_user(tail.last)
        if user is None or not is_call(user, aten.mul.Tensor, aten.add.Tensor):
            return factors, None
        other: Any = user.args[1] if user.args[0] is tail.last else user.args[0]
        before, after = value(tail.last), value(user)
        unchanged = (
            before is not None and after is not None and (before.shape, before.dtype) == (after.shape, after.dtype)
        )
        if not unchanged or not _is_affine(captured, other, shape(user)):
            return factors, None
        if is_call(user, aten.add.Tensor):
            if argument(user, "alpha") != 1:
                return factors, None
            tail.take(user)
            return factors, None if other == 0 else other
        factors.append(other)
        tail.take(user)


def _is_affine(captured: Captured, given: Any, volume: tuple[int, ...]) -> bool:
    """Whether this is a number, or a weight that has one value, or one per channel."""
    if isinstance(given, int | float):
        return math.isfinite(given)
    sizes = shape(given)
    if captured.constant(given) is None or len(sizes) > len(volume):
        return False
    sizes = (1,) * (len(volume) - len(sizes)) + sizes
    return sizes[1] in (1, volume[1]) and all(s == 1 for i, s in enumerate(sizes) if i != 1)


def _channel_product(captured: Captured, channels: int, factor: float, *parts: fx.Node | float) -> fx.Node:
    number = math.prod((factor, *(p for p in parts if not isinstance(p, fx.Node))))
    weights = [p for p in parts if isinstance(p, fx.Node)]
    if not weights:
        return _per_channel_constant(captured, channels, number)
    return captured.derive("affine", channel_product, channels, number, *weights)


@computes_weights
def channel_product(channels: int, number: float, *weights: Tensor) -> Tensor:
    """(C,) float32, from weights of one value, or of one per channel."""
    total = torch.full((channels,), number, dtype=torch.float64, device=weights[0].device)
    for weight in weights:
        total = total * weight.double().flatten()
    return total.float()


FUSE_NORM = Pass(
    name="fuse_norm",
    summary="norm + shift + residual + activation in one operator, no concatenation",
    stage=PassStage.NORM,
    structural=True,
    needs_gpu=True,
    needs_channels_last=True,
    rewrite=fuse_norm,
)

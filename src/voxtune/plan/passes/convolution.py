"""Convolutions by the project's kernels, with the operations on their output fused.

conv3d:    3x3x3, 1x3x3, 3x1x1, stride 1, any zero padding, over two sources without concatenation: + bias, + time embedding,
           + residual, and the statistics for the next norm.
pointwise: 1x1x1, over two sources without concatenation: + bias, + residual.
edges:     the stem (few input channels) and the head (few output channels).
epilogue:  for convolutions that stay with cuDNN: bias into the next norm, or bias and residual in one kernel."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from voxtune.plan.derivation import computes_weights
from voxtune.plan.graph import Captured, argument, aten, channel_sources, is_call, shape, sole_user
from voxtune.plan.passes.base import (
    Context,
    Pass,
    PassOutcome,
    PassStage,
    outcome_of,
    register_operators,
    why_excepted,
)
from voxtune.plan.passes.norm import per_channel, set_argument

CONVOLUTIONS = (aten.conv2d.default, aten.conv3d.default)
# The kernels write output channels in units of 16 bytes.
UNIT = 8


def is_plain(node: fx.Node, kernel: int) -> bool:
    """Stride 1, no groups, no dilation, padded to keep the size."""
    weight = shape(argument(node, "weight"))
    return (
        weight[2:] == (kernel,) * (len(weight) - 2)
        and argument(node, "groups") == 1
        and _all(argument(node, "stride"), 1)
        and _all(argument(node, "dilation"), 1)
        and (_all(argument(node, "padding"), kernel // 2))
    )


def _all(values: Any, expected: int) -> bool:
    return values == expected if isinstance(values, int) else all(v == expected for v in values)


def weights(captured: Captured, node: fx.Node) -> tuple[Tensor, fx.Node | None] | None:
    """The weight, and the node of the bias, if both are constants (or there is no bias)."""
    weight, bias = captured.constant(argument(node, "weight")), argument(node, "bias")
    if weight is None or (bias is not None and captured.constant(bias) is None):
        return None
    return weight, bias


@computes_weights
def as_row(bias: Tensor) -> Tensor:
    """(1, C), to which shifts of a batch can be added."""
    return bias[None].float()


@computes_weights
def as_float(bias: Tensor) -> Tensor:
    return bias.float()


@computes_weights
def as_matrix(weight: Tensor) -> Tensor:
    """A 1x1x1 convolution's weight as (outputs, inputs)."""
    return weight.flatten(1).contiguous()


class Join:
    """What follows a convolution and can be fused into its output: addends per channel and a residual."""

    def __init__(self, captured: Captured, node: fx.Node, bias: fx.Node | None, *, residual: bool = True):
        self.captured, self.last, self.takes_residual = captured, node, residual
        self.addends: list[fx.Node] = []
        self.residual: fx.Node | None = None
        self.bias = bias
        while self._take_one():
            pass

    def _take_one(self) -> bool:
        user = sole_user(self.last)
        if user is None or not is_call(user, aten.add.Tensor) or argument(user, "alpha") != 1:
            return False
        other = user.args[1] if user.args[0] is self.last else user.args[0]
        if not isinstance(other, fx.Node) or other is self.last:
            return False
        if per_channel(other, shape(user)):
            self.addends.append(other)
        elif self.takes_residual and self.residual is None and shape(other) == shape(user) == shape(self.last):
            self.residual = other
        else:
            return False
        self.last = user
        return True

    def shift(self) -> fx.Node | None:
        """Bias and addends as one (N or 1, C), in the addends' own type."""
        total: fx.Node | None = None
        if self.bias is not None:
            total = self.captured.derive("bias", as_row, self.bias)
        for addend in self.addends:
            flat = self.captured.insert(self.last, aten.reshape.default, addend, list(shape(addend)[:2]))
            total = flat if total is None else self.captured.insert(self.last, aten.add.Tensor, total, flat)
        return total


@dataclass(frozen=True)
class Window:
    """A convolution of stride 1 without groups or dilation: its source before any zero padding, and the padding."""

    source: fx.Node
    kernel: tuple[int, ...]
    padding: tuple[int, ...]  # before and after each axis, the depth first


def window_of(node: fx.Node) -> Window | None:
    """The convolution's own padding and that of a zero padding before it: video networks pad the time axis in front only."""
    kernel = shape(argument(node, "weight"))[2:]
    if (
        argument(node, "groups") != 1
        or not _all(argument(node, "stride"), 1)
        or not _all(argument(node, "dilation"), 1)
    ):
        return None
    own = argument(node, "padding")
    if isinstance(own, str):
        if own == "same" and any(extent % 2 == 0 for extent in kernel):
            return None
        own = [extent // 2 for extent in kernel] if own == "same" else [0]
    own = list(own) * (len(kernel) // len(own))
    source = node.args[0]
    before = after = (0,) * len(kernel)
    if (pads := _zero_padding(source, len(kernel))) is not None:
        source, before, after = source.args[0], pads[::2], pads[1::2]  # type: ignore[union-attr]
    assert isinstance(source, fx.Node)
    padding = tuple(p for o, b, a in zip(own, before, after, strict=True) for p in (o + b, o + a))
    return Window(source, kernel, padding)


def _zero_padding(node: Any, axes: int) -> tuple[int, ...] | None:
    """(before, after) of each of the last axes, the first axis first, if a node pads these, and no others, by zeros."""
    if is_call(node, aten.pad.default):
        zeros = argument(node, "mode") == "constant" and argument(node, "value") in (None, 0)
    elif is_call(node, aten.constant_pad_nd.default):
        zeros = argument(node, "value") == 0
    else:
        return None
    pads = list(argument(node, "pad"))
    pads += [0] * (2 * axes - len(pads))
    if not zeros or len(pads) > 2 * axes or min(pads) < 0:
        return None
    # PyTorch lists the last axis first.
    return tuple(p for axis in range(axes - 1, -1, -1) for p in pads[2 * axis : 2 * axis + 2])


def conv3d(captured: Captured, _context: Context, options: dict[str, Any]) -> PassOutcome:
    from voxtune.kernels import conv3d as kernel

    register_operators()
    count, skipped = 0, list[str]()
    for node in captured.nodes(aten.conv3d.default, aten.conv3d.padding):
        constants, window = weights(captured, node), window_of(node)
        if constants is None or window is None or window.kernel == (1, 1, 1):
            continue
        weight, bias = constants
        sources = channel_sources(window.source)
        K, C = weight.shape[:2]
        whole = -(-K // UNIT) * UNIT
        reason = kernel.why_not_weight(whole, tuple(shape(s)[1] for s in sources), window.kernel)
        if reason and len(sources) > 1:
            sources, reason = [window.source], kernel.why_not_weight(whole, (C,), window.kernel)
        # By its own outputs, or as the operator would be called, with whole units of outputs.
        for outputs in {K, whole}:
            reason = reason or why_excepted(options, C, outputs, shape(node)[2:])
        if reason is not None:
            skipped.append(reason)
            continue
        if whole > K:
            _few_outputs(captured, node, sources, window, bias, whole)
        else:
            packed = captured.derive("packed", kernel.pack, argument(node, "weight"))
            _own_conv3d(captured, node, sources, window, packed, bias)
        count += 1
    captured.refresh()
    return outcome_of(count, skipped, "no convolution of stride 1 with a kernel of 3x3x3, 1x3x3 or 3x1x1")


def _own_conv3d(
    captured: Captured, node: fx.Node, sources: list[Any], window: Window, packed: fx.Node, bias: fx.Node | None
) -> None:
    join = Join(captured, node, bias)
    args = (sources, packed, join.shift(), join.residual)
    taps = {"kernel": list(window.kernel), "padding": list(window.padding)}
    insert_with_statistics(captured, join, torch.ops.voxtune.conv3d.default, *args, of=node, **taps)


def _few_outputs(
    captured: Captured, node: fx.Node, sources: list[Any], window: Window, bias: fx.Node | None, whole: int
) -> None:
    """A convolution whose outputs are not a multiple of UNIT, such as a head: with outputs of zero, which nothing reads."""
    K = shape(node)[1]
    packed = captured.derive("packed", padded_pack, argument(node, "weight"), whole)
    shift = None if bias is None else captured.derive("bias", padded_row, bias, whole)
    args = (sources, packed, shift, None, False)
    taps = {"kernel": list(window.kernel), "padding": list(window.padding)}
    both = captured.insert(node, torch.ops.voxtune.conv3d.default, *args, of=node, **taps)
    y = captured.insert(node, operator.getitem, both, 0)
    captured.replace(node, captured.insert(node, aten.slice.Tensor, y, 1, 0, K))


@computes_weights
def padded_pack(weight: Tensor, outputs: int) -> Tensor:
    from voxtune.kernels.conv3d import pack

    return pack(functional.pad(weight, (0,) * (2 * weight.dim() - 1) + (outputs - weight.shape[0],)))


@computes_weights
def padded_row(bias: Tensor, outputs: int) -> Tensor:
    return functional.pad(as_row(bias), (0, outputs - bias.shape[0]))


def insert_with_statistics(captured: Captured, join: Join, target: Any, *args: Any, of: fx.Node, **kwargs: Any) -> None:
    """Inserts an operator in place of a convolution and its join. Its last positional argument says whether a norm reads its
    result; it returns the result and the statistics, which the norm then receives.
    """
    norms = [u for u in join.last.users if is_call(u, torch.ops.voxtune.norm_act.default)]
    norms = [n for n in norms if join.last in argument(n, "sources")]  # and not only its residual
    both = captured.insert(join.last, target, *args, bool(norms), of=of, **kwargs)
    y = captured.insert(join.last, operator.getitem, both, 0)
    if norms:
        statistics = captured.insert(join.last, operator.getitem, both, 1)
        for norm in norms:
            _give_statistics(captured, norm, join.last, statistics)
    captured.replace(join.last, y)


def _give_statistics(captured: Captured, norm: fx.Node, source: fx.Node, statistics: fx.Node) -> None:
    """One entry for each of the norm's sources; for an empty tensor the norm computes the statistics itself."""
    sources, known = list(norm.args[0]), list(argument(norm, "statistics"))  # type: ignore[arg-type]
    if not known:
        empty = captured.add_constant(torch.empty(0, device=captured.device), "unknown")
        known = [empty] * len(sources)
    known = [statistics if s is source else k for s, k in zip(sources, known, strict=True)]
    set_argument(norm, "statistics", known)


def pointwise(captured: Captured, _context: Context, options: dict[str, Any]) -> PassOutcome:
    register_operators()
    count, skipped = 0, list[str]()
    for node in captured.nodes(*CONVOLUTIONS):
        constants = weights(captured, node)
        if constants is None or not is_plain(node, 1):
            continue
        K, C = constants[0].shape[:2]
        if (reason := why_excepted(options, C, K, shape(node)[2:])) is not None:
            skipped.append(reason)
            continue
        join = Join(captured, node, constants[1])
        new = captured.insert(
            join.last,
            torch.ops.voxtune.pointwise.default,
            channel_sources(node.args[0]),
            captured.derive("matrix", as_matrix, argument(node, "weight")),
            join.shift(),
            join.residual,
            of=node,
        )
        captured.replace(join.last, new)
        count += 1
    captured.refresh()
    return outcome_of(count, skipped, "no 1x1 convolution of stride 1")


def edges(captured: Captured, _context: Context, options: dict[str, Any]) -> PassOutcome:
    from voxtune.kernels.stem_conv import FEW

    register_operators()
    count, skipped = 0, list[str]()
    for node in captured.nodes(*CONVOLUTIONS):
        constants = weights(captured, node)
        if constants is None or not is_plain(node, 3):
            continue
        weight, bias = constants
        source, (K, C) = node.args[0], weight.shape[:2]
        if not min(C, K) <= FEW < max(C, K):
            continue
        if (reason := why_excepted(options, C, K, shape(node)[2:])) is not None:
            skipped.append(reason)
            continue
        if C < K:
            sources = channel_sources(source)
            shift = None if bias is None else captured.derive("bias", as_row, bias)
            new = captured.insert(node, torch.ops.voxtune.stem.default, sources, argument(node, "weight"), shift)
        else:
            shift = None if bias is None else captured.derive("bias", as_float, bias)
            new = captured.insert(node, torch.ops.voxtune.head.default, source, argument(node, "weight"), shift)
        captured.replace(node, new)
        count += 1
    captured.refresh()
    return outcome_of(count, skipped, f"no 3x3 convolution with {FEW} channels or fewer on a side")


def epilogue(captured: Captured, _context: Context, _options: dict[str, Any]) -> PassOutcome:
    register_operators()
    count = 0
    for node in captured.nodes(*CONVOLUTIONS):
        constants = weights(captured, node)
        if constants is None:
            continue
        bias = constants[1]
        count += _into_norm(captured, node, bias) or _into_join(captured, node, bias)
    captured.refresh()
    return PassOutcome(count, None if count else "no convolution with a bias or a residual")


def _without_bias(node: fx.Node) -> None:
    node.args = (*node.args[:2], None, *node.args[3:])


def _into_norm(captured: Captured, node: fx.Node, bias: fx.Node | None) -> bool:
    """A bias that only a norm reads becomes part of the norm's shift, which InstanceNorm does not need."""
    norm = sole_user(node)
    if bias is None or norm is None or not is_call(norm, torch.ops.voxtune.norm_act.default):
        return False
    if list(norm.args[0]) != [node] or argument(norm, "residual") is node:  # type: ignore[arg-type]
        return False
    if argument(norm, "groups") < shape(bias)[0]:
        total, shift = captured.derive("bias", as_row, bias), argument(norm, "shift")
        if isinstance(shift, fx.Node):
            total = captured.insert(norm, aten.add.Tensor, shift, total)
        set_argument(norm, "shift", total)
    _without_bias(node)
    return True


def _into_join(captured: Captured, node: fx.Node, bias: fx.Node | None) -> bool:
    join = Join(captured, node, bias)
    if join.residual is None:
        return False
    shift = join.shift()
    new = captured.insert(join.last, torch.ops.voxtune.add.default, node, join.residual, shift, of=node)
    captured.replace(join.last, new)
    _without_bias(node)
    return True


EDGES = Pass(
    name="edges",
    summary="own kernels for the stem and the head",
    stage=PassStage.EDGES,
    structural=True,
    needs_gpu=True,
    needs_channels_last=True,
    needs_half=True,
    rewrite=edges,
)
CONV3D = Pass(
    name="conv3d",
    summary="own 3x3x3, 1x3x3 and 3x1x1 convolutions with their epilogue",
    stage=PassStage.CONVOLUTION,
    structural=True,
    needs_gpu=True,
    needs_channels_last=True,
    needs_half=True,
    rewrite=conv3d,
)
POINTWISE = Pass(
    name="pointwise",
    summary="own 1x1 convolutions over one or two sources",
    stage=PassStage.FUSION,
    structural=True,
    needs_gpu=True,
    needs_channels_last=True,
    rewrite=pointwise,
)
EPILOGUE = Pass(
    name="epilogue",
    summary="bias into the norm; bias and residual in one kernel",
    stage=PassStage.FUSION,
    structural=True,
    requires=("fuse_norm",),
    needs_gpu=True,
    needs_channels_last=True,
    rewrite=epilogue,
)

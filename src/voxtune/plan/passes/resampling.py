"""Convolutions that change the resolution, by the project's kernels, with bias and addends per channel fused.

doubling: transposed convolutions of stride 2, and nearest upsampling with the 3x3x3 convolution that alone reads it. Weights of
          the latter are folded: 8 products a voxel for 27. Their sums are rounded once, so half precision rounds differently.
strided:  3x3x3 convolutions of stride 2.
Both give the statistics of their result to the norm that reads it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

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
from voxtune.plan.passes.convolution import CONVOLUTIONS, Join, insert_with_statistics, weights
from voxtune.plan.passes.upsample import scale_of

TRANSPOSED = (aten.conv_transpose2d.input, aten.conv_transpose3d.input)
NEAREST = (
    aten.upsample_nearest2d.vec,
    aten.upsample_nearest3d.vec,
    aten.upsample_nearest2d.default,
    aten.upsample_nearest3d.default,
    aten._upsample_nearest_exact2d.vec,
    aten._upsample_nearest_exact3d.vec,
    aten._upsample_nearest_exact2d.default,
    aten._upsample_nearest_exact3d.default,
)


def per_axis(node: fx.Node, name: str) -> tuple[int, ...]:
    """An argument that may be one number for all axes."""
    axes, values = len(shape(node)) - 2, argument(node, name)
    values = [values] if isinstance(values, int) else list(values)
    return tuple(values * axes if len(values) == 1 else values)


def doubling(captured: Captured, _context: Context, options: dict[str, Any]) -> PassOutcome:
    from voxtune.kernels import doubling_conv as kernels

    register_operators()
    count, skipped = 0, list[str]()
    for node in captured.nodes(*TRANSPOSED, *CONVOLUTIONS):
        constants = weights(captured, node)
        form = None if constants is None else _form(node)
        if constants is None or form is None:
            continue
        weight, bias = constants
        x, kernel, stride = form
        transposed = node.target in TRANSPOSED
        C, K = weight.shape[:2] if transposed else reversed(weight.shape[:2])
        sources = channel_sources(x)
        if any(shape(s)[1] % 8 for s in sources):
            sources = [x]
        reason = kernels.unsupported(kernel, stride, tuple(shape(s)[1] for s in sources), K)
        reason = reason or why_excepted(options, C, K, shape(node)[2:])
        if reason is not None:
            skipped.append(reason)
            continue
        packing = (kernels.pack_transposed,) if transposed else (kernels.pack_nearest, stride)
        join = Join(captured, node, bias, residual=False)
        taps = captured.derive("packed", packing[0], argument(node, "weight"), *packing[1:])
        args = (sources, taps, join.shift(), list(kernel), list(stride))
        insert_with_statistics(captured, join, torch.ops.voxtune.doubling_conv.default, *args, of=node)
        count += 1
    captured.refresh()
    return outcome_of(count, skipped, "no transposed convolution of stride 2, and no convolution of nearest upsampling")


def _form(node: fx.Node) -> tuple[Any, tuple[int, ...], tuple[int, ...]] | None:
    """(source, kernel and stride of the transposed convolution) of a convolution that doubles its source, or None."""
    from voxtune.kernels.doubling_conv import folded_kernel, paddings

    kernel, stride = shape(argument(node, "weight"))[2:], per_axis(node, "stride")
    if argument(node, "groups") != 1 or any(d != 1 for d in per_axis(node, "dilation")):
        return None
    if node.target in TRANSPOSED:
        given = per_axis(node, "padding"), per_axis(node, "output_padding")
        return (node.args[0], kernel, stride) if given == paddings(kernel, stride) and max(stride) > 1 else None
    source = node.args[0]
    if max(stride) > 1 or per_axis(node, "padding") != tuple(k // 2 for k in kernel):
        return None
    if not is_call(source, *NEAREST) or sole_user(source) is not node:  # type: ignore[arg-type]
        return None
    scale = scale_of(source)  # type: ignore[arg-type]
    if scale is None or any(
        factor not in (1, 2) or (factor == 2 and size != 3) for size, factor in zip(kernel, scale, strict=True)
    ):
        return None
    return source.args[0], folded_kernel(kernel, scale), scale  # type: ignore[union-attr]


def strided(captured: Captured, _context: Context, options: dict[str, Any]) -> PassOutcome:
    from voxtune.kernels import strided_conv as kernels

    register_operators()
    count, skipped = 0, list[str]()
    for node in captured.nodes(aten.conv3d.default):
        constants = weights(captured, node)
        if constants is None or max(per_axis(node, "stride")) == 1:
            continue
        weight, bias = constants
        reason = _not_strided(node, weight)
        reason = reason or why_excepted(options, weight.shape[1], weight.shape[0], shape(node)[2:])
        if reason is not None:
            skipped.append(reason)
            continue
        join = Join(captured, node, bias, residual=False)
        taps = captured.derive("packed", kernels.pack_strided, argument(node, "weight"))
        args = (node.args[0], taps, join.shift(), list(weight.shape[2:]), list(per_axis(node, "stride")))
        insert_with_statistics(captured, join, torch.ops.voxtune.strided_conv.default, *args, of=node)
        count += 1
    captured.refresh()
    return outcome_of(count, skipped, "no 3D convolution of stride 2")


def _not_strided(node: fx.Node, weight: Tensor) -> str | None:
    """The reason why a convolution of another stride than 1 is left to PyTorch, or None."""
    from voxtune.kernels.strided_conv import unsupported

    if argument(node, "groups") != 1 or any(d != 1 for d in per_axis(node, "dilation")):
        return "groups or dilation"
    kernel = tuple(weight.shape[2:])
    if per_axis(node, "padding") != tuple(k // 2 for k in kernel):
        return f"kernel {kernel} with padding {per_axis(node, 'padding')}"
    channels = (weight.shape[1], weight.shape[0])
    return unsupported(kernel, per_axis(node, "stride"), shape(node.args[0])[2:], channels)


DOUBLING = Pass(
    name="doubling",
    summary="own transposed convolutions; nearest upsampling folded into its convolution",
    stage=PassStage.FUSION,
    structural=True,
    needs_gpu=True,
    needs_channels_last=True,
    needs_half=True,
    rewrite=doubling,
)
STRIDED = Pass(
    name="strided",
    summary="own 3x3x3 convolutions of stride 2",
    stage=PassStage.CONVOLUTION,
    structural=True,
    needs_gpu=True,
    needs_channels_last=True,
    needs_half=True,
    rewrite=strided,
)

"""fuse_norm: [cat] - [+ shift per channel] - group_norm - [silu] as one operator, float32 statistics, no concatenation.

The shift is added to all voxels of a channel: a convolution's bias, the time embedding. It moves a channel's mean and keeps its
variance, so the norm can apply it without another pass over the volume."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from voxtune.plan.graph import CASTS, Captured, argument, aten, channel_sources, is_call, shape, sole_user, value
from voxtune.plan.passes.base import Context, Pass, PassOutcome, PassStage, register_operators


def fuse_norm(captured: Captured, _context: Context, _options: dict[str, Any]) -> PassOutcome:
    register_operators()
    count = 0
    for norm in captured.nodes(aten.group_norm.default):
        if len(shape(norm)) >= 3 and argument(norm, "weight") is not None and argument(norm, "bias") is not None:
            _fuse(captured, norm)
            count += 1
    captured.refresh()
    return PassOutcome(count, None if count else "no group_norm with weight and bias")


def _fuse(captured: Captured, norm: fx.Node) -> None:
    source = _uncast(norm.args[0])
    last = _cast_back(norm, source)
    follower = sole_user(last)
    silu = is_call(follower, aten.silu.default)
    last = follower if silu and follower is not None else last
    source, shift = _shift(captured, source, norm)
    fused = captured.insert(
        last,
        torch.ops.voxtune.group_norm_silu.default,
        channel_sources(source),
        argument(norm, "weight"),
        argument(norm, "bias"),
        argument(norm, "num_groups"),
        argument(norm, "eps"),
        shift,
        silu,
        [],
        of=norm,
    )
    captured.replace(last, fused)


def _uncast(node: Any) -> Any:
    """The source before a cast to float32, which protects the statistics: the operator's are float32 anyway."""
    if is_call(node, *CASTS):
        before, after = value(node.args[0]), value(node)
        if before is not None and after is not None and after.dtype == torch.float32:
            return node.args[0]
    return node


def _cast_back(norm: fx.Node, source: fx.Node) -> fx.Node:
    """The cast back to the source's type after the norm, if it is the norm's only user."""
    user, before = sole_user(norm), value(source)
    if source is not norm.args[0] and user is not None and is_call(user, *CASTS):
        after = value(user)
        if before is not None and after is not None and after.dtype == before.dtype:
            return user
    return norm


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


FUSE_NORM = Pass(
    name="fuse_norm",
    summary="GroupNorm + SiLU + shift in one operator, no concatenation",
    stage=PassStage.NORM,
    structural=True,
    needs_gpu=True,
    needs_channels_last=True,
    rewrite=fuse_norm,
)

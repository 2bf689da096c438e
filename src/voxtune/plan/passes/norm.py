"""fuse_norm: [cat] - [+ shift per channel] - group_norm - [silu] as one operator, float32 statistics, no concatenation.

The shift is what is added to every voxel of a channel alike: a convolution's bias, the time embedding. It moves a channel's
mean and leaves its spread, so it goes into the norm's own arithmetic and costs no pass over the volume."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from voxtune.plan.graph import CASTS, Captured, argument, aten, channel_sources, is_call, shape, sole_user, value
from voxtune.plan.passes.base import Context, Pass, PassOutcome, Stage, register_operators


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
    """A cast to float32 before the norm protects its statistics, which ours are anyway."""
    if is_call(node, *CASTS):
        before, after = value(node.args[0]), value(node)
        if before is not None and after is not None and after.dtype == torch.float32:
            return node.args[0]
    return node


def _cast_back(norm: fx.Node, source: fx.Node) -> fx.Node:
    """The cast back to the source's type after it, if that is all that happens to the norm."""
    user, before = sole_user(norm), value(source)
    if source is not norm.args[0] and user is not None and is_call(user, *CASTS):
        after = value(user)
        if before is not None and after is not None and after.dtype == before.dtype:
            return user
    return norm


def _shift(captured: Captured, source: fx.Node, norm: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """The volume behind `volume + per-channel`, and the addend as (N or 1, C), where only the norm looks at the sum."""
    if is_call(source, aten.add.Tensor) and argument(source, "alpha") == 1 and len(source.users) == 1:
        for volume, addend in ((source.args[0], source.args[1]), (source.args[1], source.args[0])):
            if isinstance(volume, fx.Node) and per_channel(addend, shape(source)) and shape(volume) == shape(source):
                flat = captured.insert(norm, aten.reshape.default, addend, list(shape(addend)[:2]))
                return volume, flat
    return source, None


def per_channel(node: Any, whole: tuple[int, ...]) -> bool:
    """Whether a node is one number for each sample and channel of a volume of this shape."""
    found = shape(node)
    return (
        len(found) == len(whole) >= 3
        and found[1] == whole[1]
        and found[0] in (1, whole[0])
        and all(side == 1 for side in found[2:])
        and any(side > 1 for side in whole[2:])
    )


FUSE_NORM = Pass(
    name="fuse_norm",
    summary="GroupNorm + SiLU + shift in one operator, no concatenation",
    stage=Stage.NORM,
    structural=True,
    needs_gpu=True,
    needs_channels_last=True,
    rewrite=fuse_norm,
)

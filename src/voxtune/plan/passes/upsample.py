"""upsample: doubling (trilinear, bilinear, nearest; align_corners off) by a kernel that reads and writes channels-last."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from voxtune.plan.graph import Captured, argument, aten, shape
from voxtune.plan.passes.base import Context, Pass, PassOutcome, PassStage, register_operators

UPSAMPLES = {
    aten.upsample_trilinear3d.vec: "linear",
    aten.upsample_bilinear2d.vec: "linear",
    aten.upsample_nearest3d.vec: "nearest",
    aten.upsample_nearest2d.vec: "nearest",
    # With a whole factor the two ways of rounding a position agree.
    aten._upsample_nearest_exact3d.vec: "nearest",
    aten._upsample_nearest_exact2d.vec: "nearest",
}


def upsample(captured: Captured, _context: Context, _options: dict[str, Any]) -> PassOutcome:
    register_operators()
    count = 0
    for node in captured.nodes(*UPSAMPLES):
        mode = UPSAMPLES[node.target]  # type: ignore[index]
        aligned = mode == "linear" and argument(node, "align_corners")
        if aligned or set(scale_of(node) or ()) != {2}:
            continue
        captured.replace(node, captured.insert(node, torch.ops.voxtune.upsample.default, node.args[0], mode))
        count += 1
    captured.refresh()
    return PassOutcome(count, None if count else "no upsampling by two")


def scale_of(node: fx.Node) -> tuple[int, ...] | None:
    """The whole factor of each axis of an upsampling, or None."""
    before, after = shape(node.args[0])[2:], shape(node)[2:]
    scale = tuple(b // a for a, b in zip(before, after, strict=True))
    # The size alone does not decide: 3 voxels become 6 by a factor of 2.1 too, and other voxels are nearest.
    if any(declared.name == "scale_factors" for declared in node.target._schema.arguments):  # type: ignore[union-attr]
        given = argument(node, "scale_factors") or [None] * len(scale)
    else:
        given = [argument(node, name) for name in ("scales_d", "scales_h", "scales_w")[-len(scale) :]]
    exact = all(a * s == b for a, b, s in zip(before, after, scale, strict=True))
    return scale if exact and all(g is None or g == s for g, s in zip(given, scale, strict=True)) else None


UPSAMPLE = Pass(
    name="upsample",
    summary="upsampling by two, channels-last",
    stage=PassStage.FUSION,
    structural=True,
    needs_gpu=True,
    needs_channels_last=True,
    rewrite=upsample,
)

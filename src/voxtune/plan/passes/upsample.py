"""upsample: doubling (trilinear, bilinear, nearest; align_corners off) by a kernel that reads and writes channels-last."""

from __future__ import annotations

from typing import Any

import torch

from voxtune.plan.graph import Captured, argument, aten, shape
from voxtune.plan.passes.base import Context, Pass, PassOutcome, PassStage, register_operators

UPSAMPLES = {
    aten.upsample_trilinear3d.vec: "linear",
    aten.upsample_bilinear2d.vec: "linear",
    aten.upsample_nearest3d.vec: "nearest",
    aten.upsample_nearest2d.vec: "nearest",
}


def upsample(captured: Captured, _context: Context, _options: dict[str, Any]) -> PassOutcome:
    register_operators()
    count = 0
    for node in captured.nodes(*UPSAMPLES):
        mode = UPSAMPLES[node.target]  # type: ignore[index]
        before, after = shape(node.args[0]), shape(node)
        aligned = mode == "linear" and argument(node, "align_corners")
        if aligned or after[2:] != tuple(2 * s for s in before[2:]):
            continue
        captured.replace(node, captured.insert(node, torch.ops.voxtune.upsample.default, node.args[0], mode))
        count += 1
    captured.refresh()
    return PassOutcome(count, None if count else "no upsampling by two")


UPSAMPLE = Pass(
    name="upsample",
    summary="upsampling by two, channels-last",
    stage=PassStage.FUSION,
    structural=True,
    needs_gpu=True,
    needs_channels_last=True,
    rewrite=upsample,
)

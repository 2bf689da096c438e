"""channels_last: every volume with its channels innermost (OPT2 of the paper). Exact: it moves values without changing them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from voxtune.plan.derivation import computes_weights
from voxtune.plan.graph import Captured, aten, value, volume_inputs
from voxtune.plan.passes.base import Context, Pass, PassOutcome, PassStage

CONVOLUTIONS = (
    aten.conv2d.default,
    aten.conv3d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
    aten.convolution.default,
)
# The kernels of stems read their sources in any layout.
ANY_LAYOUT = ("voxtune.stem.default", "voxtune.stem2d.default")
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def channels_last(captured: Captured, _context: Context, _options: dict[str, Any]) -> PassOutcome:
    count = 0
    for node in captured.nodes(*CONVOLUTIONS):
        weight = captured.constant(node.args[1])
        if weight is not None and weight.dim() in FORMATS:
            new = captured.derive("weight", lasting, node.args[1])
            node.args = (node.args[0], new, *node.args[2:])
            count += 1
    for node in volume_inputs(captured):
        fake = value(node)
        assert fake is not None
        users = [u for u in node.users if not (u.op == "call_function" and str(u.target) in ANY_LAYOUT)]
        if not users or fake.dim() not in FORMATS:
            continue
        anchor = next(n for n in captured.graph.nodes if n.op == "call_function")
        moved = captured.insert(anchor, aten.contiguous.default, node, memory_format=FORMATS[fake.dim()])
        for user in users:
            user.replace_input_with(node, moved)
    captured.refresh()
    return PassOutcome(count, None if count else "no 2D or 3D convolution")


def _channels_last_weights(network: nn.Module) -> None:
    for parameter in network.parameters():
        parameter.data = lasting(parameter.data)


@computes_weights
def lasting(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=FORMATS[x.dim()]) if x.dim() in FORMATS else x


CHANNELS_LAST = Pass(
    name="channels_last",
    summary="channels innermost in memory",
    stage=PassStage.LAYOUT,
    rewrite=channels_last,
    rewrite_module=_channels_last_weights,
)

"""One gate as a prepared launch: packed weights and buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from voxtune.kernels.convnext.gate import voxtune_gate
from voxtune.kernels.convnext.launch import Launch
from voxtune.kernels.convnext.tiles import divisor, power_of_two
from voxtune.ladder.convolution import Image

if TYPE_CHECKING:
    from voxtune.ladder.program import Program


def gate_launch(program: Program, gate: Any, x: Image, joint: Tensor, part: str) -> Launch:
    """Multiplies the skip in place, in its slice of `joint` beside the decoder's `x`."""
    C, CS = x.channels, joint.shape[1] - x.channels
    rows = joint.shape[0]
    wide, narrow = power_of_two(max(16, C)), 128 if program.dtype.itemsize == 2 else 32
    block_c = max(16, min(narrow, divisor(C, 128), divisor(CS, 128)))
    pixels = x.side[0] * x.side[1]
    block_m = max(16, min(divisor(pixels, 64), power_of_two(rows // 128)))
    # With few pixels, weights are most of what a program reads: split them among eight programs.
    few = rows // block_m <= program.processors // 16 and wide >= 128
    block_h = wide // 8 if few else wide
    program.reserve(rows * (wide // block_h), rows // block_m)
    w = torch.zeros((-(-C // block_c) + -(-CS // block_c)) * block_c, wide, device=program.device)
    w[:C, :C] = gate.gate_conv.weight.detach().flatten(1).t()
    at = -(-C // block_c) * block_c
    w[at : at + CS, :C] = gate.residual_conv.weight.detach().flatten(1).t()
    inner = gate.gate_conv.bias.detach() + gate.residual_conv.bias.detach()
    bias, v = (F.pad(b.float(), (0, wide - C)).contiguous() for b in (inner, gate.in_conv.weight.detach().flatten()))
    return Launch(
        kernel=voxtune_gate,
        programs=rows // block_m * (wide // block_h),
        arguments=(
            joint,
            w.to(program.dtype),
            bias,
            v,
            gate.in_conv.bias.detach().float(),
            program.parts,
            program.count,
        ),
        constants={
            "C": C,
            "CS": CS,
            "CP": wide,
            "LD": joint.stride(0),
            "BLOCK_M": block_m,
            "BLOCK_C": block_c,
            "BLOCK_H": block_h,
            "BLOCK_S": power_of_two(CS),
            "PRECISION": program.precision,
            "CHAINED": False,
        },
        warps=8 if block_h >= 128 else 4,
        part=part,
    )

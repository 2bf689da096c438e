"""A whole block as one launch, with the same packed weights and tiles as its separate launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from voxtune.kernels.convnext.block import PHASES, voxtune_block
from voxtune.kernels.convnext.depthwise import pack_depthwise
from voxtune.kernels.convnext.launch import Launch
from voxtune.kernels.convnext.packing import pack_conv
from voxtune.kernels.convnext.tiles import depthwise_tile, power_of_two
from voxtune.ladder.convolution import EPS, Image

if TYPE_CHECKING:
    from voxtune.ladder.program import Program

# All phases share the launch's warps.
WARPS = 4


def whole_block(program: Program, block: Any, x: Image, into: Tensor, part: str) -> list[Launch]:
    """One launch; under the interpreter, which runs programs one after another, one per phase."""
    (H, W), C = x.side, x.channels
    rows = program.batch * H * W
    norm1, conv1, _, norm2, conv2 = block.block
    residual_conv: Any = block.residual_conv if isinstance(block.residual_conv, nn.Conv2d) else None
    K1, K2 = conv1.out_channels, conv2.out_channels
    tile1, tile2 = (program.tile(rows, H * W, 9 * conv.in_channels, conv.out_channels) for conv in (conv1, conv2))
    packed = [
        pack_conv(
            conv.weight,
            conv.bias,
            norm=(norm.weight, norm.bias),
            residual=(residual_conv.weight, residual_conv.bias) if residual_conv and conv is conv2 else None,
            dtype=program.dtype,
            block_c=tile.block_c * tile.ways,
            block_k=tile.block_k,
        )
        for conv, norm, tile in ((conv1, norm1, tile1), (conv2, norm2, tile2))
    ]
    KP1, KP2 = (one.weight.shape[1] for one in packed)
    first = depthwise_tile(rows, x.side, C, program.processors)
    read1 = first.tiles(H * W, C)
    read2 = H * W // tile1.block_m * (KP1 // tile1.block_k)
    device = program.device
    sums1, sums2 = (torch.empty((program.batch, 2, reads), device=device) for reads in (read1, read2))
    for tile, KP in ((tile1, KP1), (tile2, KP2)):
        program.reserve(*tile.scratch_size(rows, KP))
    residual = packed[1].weight if packed[1].residual is None else packed[1].residual
    arguments = (
        x.data,
        pack_depthwise(block.in_conv.weight, program.dtype),
        torch.zeros(C, device=device),
        program.scratch("depthwise", x.side, C),
        sums1,
        packed[0].weight,
        packed[0].shift,
        packed[0].slope,
        program.scratch("between", x.side, K1),
        sums2,
        packed[1].weight,
        packed[1].shift,
        packed[1].slope,
        residual,
        into,
        program.eps,
        program.counter,
        program.counter,
        tile1.turns(9 * C),
        tile2.turns(9 * K1),
        tile2.turns(C),
    )
    constants: dict[str, Any] = {
        "H": H,
        "W": W,
        "C": C,
        "K1": K1,
        "KP1": KP1,
        "K2": K2,
        "KP2": KP2,
        "LDX": x.stride,
        "LDY": into.stride(0),
        "ROWS": rows,
        "RESIDUAL": 2 if residual_conv else 1,
        "READ1": read1,
        "BLOCK_R1": power_of_two(read1),
        "READ2": read2,
        "BLOCK_R2": power_of_two(read2),
        "EPS": EPS,
        "RUN": first.run,
        "BLOCK_P": first.block_p,
        "BLOCK_D": first.block_c,
        "BLOCK_I": first.block_i,
        "PRECISION": program.precision,
        "CHAINED": False,
    }
    for number, tile in ((1, tile1), (2, tile2)):
        constants |= {
            f"SPLIT{number}": tile.split,
            f"BLOCK_M{number}": tile.block_m,
            f"BLOCK_K{number}": tile.block_k,
            f"BLOCK_C{number}": tile.block_c,
            f"WAYS{number}": tile.ways,
        }
    programs = 1 << (program.processors.bit_length() - 1)
    spans = [(0, PHASES)] if device.type == "cuda" or program.processors > 1 else [(p, p + 1) for p in range(PHASES)]
    return [
        Launch(
            kernel=voxtune_block,
            programs=programs,
            arguments=arguments,
            constants={**constants, "PROGRAMS": programs, "FIRST": begin, "LAST": end},
            warps=WARPS,
            stages=min(tile1.stages, tile2.stages),
            part=part,
        )
        for begin, end in spans
    ]

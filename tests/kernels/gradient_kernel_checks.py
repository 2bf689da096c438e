"""Run by test_gradient_kernels.py in processes of their own: prints its findings as one line of JSON."""

from __future__ import annotations

import json
import sys
from unittest.mock import patch

import torch

from tests.kernels.small_kernels_checks import ALL_TYPES, KINDS, Draw, build, channels_last, finding, typed
from voxtune.kernels import upsample, upsample_backward

# (batch, channels, voxels of the source)
UPSAMPLE = [
    (1, 64, (4, 5, 6)),
    (2, 10, (3, 3, 3)),
    (1, 192, (1, 1, 2)),
    (1, 16, (17, 2, 3)),
    (1, 7, (2, 1, 9)),
    (2, 32, (5, 7)),
    (1, 129, (1, 1)),
    (2, 64, (9, 8)),
    (1, 64, (2, 9, 11)),
]


def of_upsample(draw, mode):
    for case in UPSAMPLE[:4] if draw.whole else UPSAMPLE:
        batch, channels, voxels = case
        dy = channels_last(draw(batch, channels, *(2 * side for side in voxels)))
        x = torch.zeros(batch, channels, *voxels, dtype=torch.float64, requires_grad=True)
        (truth,) = torch.autograd.grad(upsample.upsample_reference(x, mode), x, dy.double())
        with patch.object(upsample_backward, "ENOUGH", 1 if draw.whole else 10**6):  # long walks, and the shortest
            yield finding((*case, mode), upsample_backward.upsample_backward(dy, mode), truth)
        expected = upsample_backward.upsample_backward_reference(dy.double(), mode)
        yield finding((*case, mode, "reference"), channels_last(expected), truth)


def compile_upsample(arch, kinds):
    for kind in kinds:
        constants = {"VOLUME": True, "BLOCK_C": 64}
        pointers = typed("dy_ptr dx_ptr", kind)
        voxels = upsample_backward.TILE // (64 * KINDS[kind].itemsize)
        h, w = upsample_backward.tile_of(voxels)
        tile = {"WALK": 8, "BLOCK_H": h, "BLOCK_W": w, "num_warps": 8}
        yield build(upsample_backward.voxtune_upsample_linear_backward, arch, pointers, constants, **tile)
        tile = {"BLOCK_Q": voxels, "num_warps": 8}
        yield build(upsample_backward.voxtune_upsample_nearest_backward, arch, pointers, constants, **tile)


def numerics(what, whole):
    # Poison what is not written: fresh memory is filled with NaN.
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    cases = {
        "linear": [(lambda draw: of_upsample(draw, "linear"), t) for t in ALL_TYPES],
        "nearest": [(lambda draw: of_upsample(draw, "nearest"), t) for t in ALL_TYPES],
    }[what]
    return [{"type": str(t), **row} for function, t in cases for row in function(Draw(t, whole))]


if __name__ == "__main__":
    job, what, option, *kinds = sys.argv[1:]
    if job == "numerics":
        result = numerics(what, option == "whole")
    else:
        kernels = {"upsample": compile_upsample}
        result = list(kernels[what](int(option), kinds[0].split(",")))
    print(json.dumps(result))

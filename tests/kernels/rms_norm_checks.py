"""Run by test_rms_norm.py in a process of its own: prints its findings as one line of JSON."""

from __future__ import annotations

import json
import sys

import torch
import triton

from tests.kernels.group_norm_checks import channels_last, resources
from voxtune.kernels import rms_norm as rms

# (batch, channels, voxels, bias, eps, floor, activation)
CASES = [
    (1, 96, (3, 4, 5), False, 0.0, 1e-13, "silu"),
    (2, 24, (5, 3, 7), True, 0.0, 1e-13, "silu"),
    (1, 7, (9, 11), True, 1e-6, 0.0, "none"),
    (2, 1, (4, 5, 3), False, 1e-8, 0.0, "relu"),
    (1, 384, (2, 3, 3), True, 0.0, 1e-13, "gelu"),
    (1, 1000, (1, 1, 3), False, 1e-5, 0.0, "gelu_tanh"),
    (1, 16, (1, 1, 1), True, 0.0, 1e-13, "silu"),
]


def case(dtype, batch, channels, voxels, bias, eps, floor, activation):
    generator = torch.Generator().manual_seed(channels)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = channels_last((draw(batch, channels, *voxels) * 2 + 1).to(dtype))
    x[0, :, 0] = 0  # an empty voxel: the floor, or eps, keeps it finite
    weight, shift = draw(channels).float(), draw(channels).float() if bias else None
    wide = None if shift is None else shift.double()
    truth = rms.rms_norm_act_reference(x.double(), weight.double(), wide, eps, floor, activation)
    y = rms.rms_norm_act(x, weight, shift, eps, floor, activation)
    written = bool(torch.isfinite(y).all()) and y.movedim(1, -1).is_contiguous()
    difference = (y.double() - truth).norm() / truth.norm().clamp(min=1e-9)
    return {"case": [batch, channels, voxels, activation], "error": difference.item(), "written": written}


def numerics(dtype):
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    return [case(getattr(torch, dtype), *c) for c in CASES]


def compile_all(arch):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    found = []
    for channels, activation in ((96, "silu"), (384, "silu"), (4096, "gelu")):
        signature = {"x_ptr": "*bf16", "weight_ptr": "*fp32", "bias_ptr": "*fp32", "y_ptr": "*bf16"}
        signature |= {"V": "i32", "C": "i32", "eps": "fp32", "floor": "fp32"}
        block_c = triton.next_power_of_2(channels)
        constants = {"ACTIVATION": activation, "HAS_BIAS": True, "UNIT": 8}
        constants |= {"BLOCK_V": 4096 // block_c, "BLOCK_C": block_c}
        compiled = triton.compile(
            ASTSource(rms.voxtune_rms_norm, {**signature, **dict.fromkeys(constants, "constexpr")}, constants),
            target=GPUTarget("cuda", arch, 32),
            options={"num_warps": 8},
        )
        found.append(resources(compiled.asm["cubin"], compiled.metadata.name))
    return found


if __name__ == "__main__":
    what, given = sys.argv[1:]
    print(json.dumps(numerics(given) if what == "numerics" else compile_all(int(given))))

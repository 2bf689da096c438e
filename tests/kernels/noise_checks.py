"""Run by test_noise.py in a process of its own: prints one line of JSON."""

from __future__ import annotations

import json
import sys

import torch

from voxtune.diffusion import noise as plain


def numerics() -> list[dict]:
    from voxtune.kernels import noise

    rows = []
    for seed, indices, draw, shape in [
        (0, [0], 0, (1, 4, 4, 4)),
        (7, [3, 2**40 + 5], 249, (1, 5, 7, 9)),
        (2**62 + 12345, [10**6], 3, (4, 3, 3)),
        (2**63 - 1, [0, 1, 2], 1, (2053,)),
        (5, [2**63 - 1, 2**62 + 2**31 + 9], 2, (1, 4, 4, 4)),
    ]:
        found = noise.normal_batch(seed, torch.tensor(indices), draw, shape)
        wanted = plain.normal_batch(seed, indices, draw, shape)
        rows.append({"shape": list(found.shape) == list(wanted.shape), "worst": float((found - wanted).abs().max())})
    return rows


def compiled(arch: int) -> dict:
    from voxtune.kernels.compiled import compiled as compile_for
    from voxtune.kernels.noise import voxtune_noise

    signature = {
        "index_ptr": "*i64",
        "y_ptr": "*fp32",
        "seed": "i64",
        "draw": "i32",
        "V": "i32",
        "BLOCK_B": "constexpr",
    }
    made = compile_for(voxtune_noise, signature, {"BLOCK_B": 512}, arch=arch, warps=4)
    return {"registers": made.registers, "spills": made.spills}


print(json.dumps(numerics() if sys.argv[1] == "numerics" else compiled(int(sys.argv[2]))))

"""Run by test_group_norm_backward.py in a process of its own: prints its findings as one line of JSON."""

from __future__ import annotations

import json
import sys
from unittest.mock import patch

import torch

from tests.kernels.group_norm_checks import CASES, QUICK, channels_last
from voxtune.kernels import group_norm as gn
from voxtune.kernels import group_norm_backward as gb


def fields(gradients):
    names = [f"source {i}" for i in range(len(gradients.sources))]
    pairs = list(zip(names, gradients.sources, strict=True))
    pairs += [(n, getattr(gradients, n)) for n in ("weight", "bias", "shift_NC", "slopes", "residual")]
    return [(name, value) for name, value in pairs if value is not None]


def case(dtype, batch, channels, voxels, groups, shift, activation, residual, device="cpu"):
    generator = torch.Generator().manual_seed(batch * 1000 + sum(channels))

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)

    total = sum(channels)
    sources = tuple(
        channels_last((draw(batch, c, *voxels) * 2 + draw(1, c, *[1] * len(voxels))).to(dtype)) for c in channels
    )
    weight, bias = draw(total).float(), draw(total).float()
    shift_NC = draw(batch, total + 5).to(dtype)[:, 3 : total + 3] if shift else None
    added = channels_last(draw(batch, total, *voxels).to(dtype)) if residual else None
    slopes = draw(1 if activation == "prelu_one" else total).float() if activation.startswith("prelu") else None
    activation = activation.removesuffix("_one")
    dy = channels_last(draw(batch, total, *voxels).to(dtype))

    def double(x):
        return None if x is None else x.double()

    given = (groups, 1e-5, double(shift_NC), activation, 0.2, double(slopes), double(added))
    wide = tuple(s.double() for s in sources)
    truth = gb.norm_act_backward_reference(dy.double(), wide, weight.double(), bias.double(), *given)
    _y, affine = gn.norm_act_and_affine(sources, weight, bias, groups, 1e-5, shift_NC, activation, 0.2, slopes, added)
    exact = gb.affine_reference(sources, weight, bias, groups, 1e-5, shift_NC)
    found = gb.norm_act_backward(dy, sources, affine, weight, groups, shift_NC, activation, 0.2, slopes, added)
    again = gb.norm_act_backward(dy, sources, affine, weight, groups, shift_NC, activation, 0.2, slopes, added)
    assert [n for n, _ in fields(found)] == [n for n, _ in fields(truth)]
    errors = {}
    scale = max(float(t.norm()) for n, t in fields(truth) if n.startswith("source"))
    for (name, value), (_, right), (_, twice) in zip(fields(found), fields(truth), fields(again), strict=True):
        assert value.shape == right.shape and torch.equal(value, twice), name
        # A shift has no effect on a norm of one channel a group, where its gradient is zero.
        size = max(float(right.norm()), 1e-3 * scale)
        errors[name] = float((value.double() - right).norm()) / size
    addends = [channels_last(draw(*s.shape).to(dtype)) if i == 0 else None for i, s in enumerate(sources)]
    with patch.object(gb, "ENOUGH", 3):  # several tiles a program, also for small volumes
        more = gb.norm_act_backward(
            dy, sources, affine, weight, groups, shift_NC, activation, 0.2, slopes, added, addends
        )
    for i, (dx, own, addend) in enumerate(zip(more.sources, truth.sources, addends, strict=True)):
        right = own if addend is None else own + addend.double()
        errors[f"source {i} and an addend"] = float((dx.double() - right).norm()) / max(float(right.norm()), scale)
        # Before rounding to the type of dx.
        sums, size = right.flatten(2).sum(2), right.flatten(2).abs().sum(2)
        errors[f"sums {i}"] = float(
            (more.sums_NPC[i].sum(1).double() - sums).norm() / size.norm().clamp_min(1e-3 * scale)
        )
    return {
        "case": [batch, list(channels), list(voxels), groups, activation],
        "errors": errors,
        "affine": float((affine - exact).norm() / exact.norm()),
    }


def numerics(dtype, extent):
    cases = CASES if extent == "all" else [CASES[i] for i in QUICK]
    return [case(getattr(torch, dtype), *c) for c in cases]


def compile_all(arch):
    from voxtune.kernels.compiled import compiled

    rows = []
    flags = {"ACTIVATION": "silu", "HAS_RESIDUAL": True, "UNIT": 1, "BLOCK_C": 64}
    tensors = {
        "x_ptr": "*bf16",
        "dy_ptr": "*bf16",
        "affine_ptr": "*fp32",
        "slopes_ptr": "*fp32",
        "residual_ptr": "*bf16",
    }
    sizes = dict.fromkeys(("V", "CS", "C", "first", "slopes_stride", "stretch"), "i32") | {"slope": "fp32"}
    own = {
        gb.voxtune_norm_sums: (
            {"sums_ptr": "*fp32"},
            flags | {"BLOCK_V": gb.SUMS_TILE // 64, "STAGES": gb.SUMS_STAGES},
        ),
        gb.voxtune_norm_gradient: (
            {
                "linear_ptr": "*fp32",
                "dx_ptr": "*bf16",
                "dresidual_ptr": "*bf16",
                "addend_ptr": "*bf16",
                "sums_ptr": "*fp32",
            },
            flags | {"BLOCK_V": 32, "HAS_ADDEND": True, "STEPS": 16},
        ),
    }
    totals = dict.fromkeys(("sums_ptr", "affine_ptr", "weight_ptr", "totals_ptr", "linear_ptr"), "*fp32") | {"P": "i32"}
    own[gb.voxtune_norm_combine] = (totals, {"GROUP": 2, "BLOCK_G": 2, "BLOCK_P": 512})
    for kernel, (more, constants) in own.items():
        known = {n: k for n, k in {**tensors, **sizes, **more}.items() if n in kernel.arg_names}
        result = compiled(kernel, known, constants, arch=int(arch), warps=8)
        rows.append({"name": result.name, "registers": result.registers, "spills": result.spills})
    return rows


if __name__ == "__main__":
    action, *arguments = sys.argv[1:]
    print(json.dumps({"numerics": numerics, "compile": compile_all}[action](*arguments)))

"""Run by test_weight_gradient.py in a process of its own: prints its findings as one line of JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch
from torch.nn import functional as F
from triton.runtime import interpreter

from voxtune.kernels import conv3d as cv
from voxtune.kernels import conv3d_weight_gradient as wg
from voxtune.kernels.conv3d_tiles import SHARED_MEMORY

SMALL = wg.GradientTile(h=2, w=8, k=16, c=16, stages=2)
WIDE = wg.GradientTile(h=4, w=4, k=32, c=32, stages=2)
NONE = (0,) * 6
# (batch, channels of each source, output channels, voxels of the sources, padding, tile, programs): ragged in every direction,
# fewer channels than a tile and more, two sources, one program, a program for each step and more, padding in front only.
CASES = [
    (1, (16,), 16, (2, 4, 8), cv.AROUND, SMALL, 3),
    (2, (24, 8), 8, (3, 3, 9), cv.AROUND, SMALL, 5),
    (1, (32,), 24, (3, 5, 7), NONE, WIDE, 7),
    (1, (8,), 16, (2, 4, 5), (2, 0, 1, 1, 1, 0), WIDE, 10_000),
    (1, (40,), 24, (2, 2, 2), cv.AROUND, WIDE, 1),
    (2, (8,), 8, (1, 1, 1), cv.AROUND, SMALL, 4),
    (2, (16, 40), 40, (2, 3, 5), cv.AROUND, WIDE, 11),
    (1, (16,), 16, (2, 3, 4), (0, 2, 2, 0, 3, 1), SMALL, 6),
]
QUICK = (1, 2, 5)


def channels_last(x):
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def differentiated(dy, sources, padding):
    """(27, K, C) by PyTorch's differentiation in float64."""
    x = torch.cat(sources, 1).double()
    weight = torch.zeros(dy.shape[1], x.shape[1], 3, 3, 3, dtype=torch.float64, requires_grad=True)
    y = F.conv3d(F.pad(x, (*padding[4:], *padding[2:4], *padding[:2])), weight)
    return cv.pack(torch.autograd.grad(y, weight, dy.double())[0])


def case(dtype, whole, N, channels, K, voxels, padding, tile, programs):
    generator = torch.Generator().manual_seed(sum(channels) + K)

    def draw(*shape):
        x = torch.randint(-3, 4, shape, generator=generator) if whole else torch.randn(shape, generator=generator)
        return channels_last(x.to(dtype))

    sources = [draw(N, c, *voxels) for c in channels]
    dy = draw(N, K, *cv.result_size(sources[0], cv.CUBE, padding))
    given = (dy, sources, padding)
    dw = wg.weight_gradient(*given, torch.float32, tile=tile, programs=programs).double()
    truth = differentiated(*given)
    reference = wg.weight_gradient_reference(dy.double(), [s.double() for s in sources], padding)
    # Without descriptors, as on devices that have no copy engine.
    pointers = wg.weight_gradient(*given, torch.float32, tile=tile, programs=programs, bulk=False).double()
    return {
        "case": str((N, channels, K, voxels, padding, tile, programs)),
        "exact": torch.equal(dw, truth),
        "error": ((dw - truth).norm() / truth.norm().clamp_min(1e-9)).item(),
        "reference": ((reference - truth).norm() / truth.norm().clamp_min(1e-9)).item(),
        "pointers": torch.equal(pointers, dw),
    }


def numerics(dtype, kind, extent):
    # Poison what is not written: fresh memory is filled with NaN.
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    if extent == "quick":
        # A check of every integer for overflow is half of the interpreter's time; "all" leaves it on.
        object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
    cases = [CASES[i] for i in QUICK] if extent == "quick" else CASES
    return [case(getattr(torch, dtype), kind == "integers", *c) for c in cases]


def operator():
    """The gradient of torch.ops.voxtune.conv3d by each method, and why the kernels do not apply to other tensors."""
    from voxtune.kernels.gradients import register_gradients

    register_gradients()
    calls, original = [], wg.weight_gradient
    wg.weight_gradient = lambda *a, **k: calls.append(k["hopper"]) or original(*a, **k)
    x = [channels_last(torch.randn(1, c, 3, 4, 5).half()) for c in (8, 16)]
    weight = cv.pack(torch.randn(8, 24, 3, 3, 3).half()).requires_grad_()
    dy = channels_last(torch.randn(1, 8, 3, 4, 5).half())
    results = {}
    for method in ("cudnn", "triton", "hopper"):
        wg.METHOD = method
        y, _ = torch.ops.voxtune.conv3d(x, weight, None, None, False)
        (results[method],) = torch.autograd.grad(y, weight, dy)
    truth = differentiated(dy, x, cv.AROUND)
    around, unaligned = cv.AROUND, torch.zeros(dy.numel() + 1).half()[1:].view(1, 3, 4, 5, 8).movedim(-1, 1)
    return {
        "errors": {m: ((r.double() - truth).norm() / truth.norm()).item() for m, r in results.items()},
        "types": sorted({str(r.dtype) for r in results.values()}),
        "calls": calls,
        "applies": wg.why_not(dy, x, cv.CUBE, around),
        "reasons": [
            wg.why_not(dy, x, cv.CUBE, around, hopper=True),
            wg.why_not(dy, x, (1, 3, 3), (0, 0, 1, 1, 1, 1)),
            wg.why_not(dy.float(), [s.float() for s in x], cv.CUBE, around),
            wg.why_not(dy, [x[0], x[1].float()], cv.CUBE, around),
            wg.why_not(dy, [x[1][:, :12]], cv.CUBE, around),
            wg.why_not(dy, x, cv.CUBE, NONE),
            wg.why_not(dy, x, cv.CUBE, (-1, 3, 1, 1, 1, 1)),
            wg.why_not(dy.contiguous(), x, cv.CUBE, around),
            wg.why_not(unaligned, x, cv.CUBE, around),
            wg.why_not(dy[:0], [s[:0] for s in x], cv.CUBE, around),
            wg.why_not(*enormous(1 << 14, 1 << 14, 16), cv.CUBE, around),
            wg.why_not(*enormous(1 << 13, 1 << 13, 8), cv.CUBE, around),
        ],
    }


def enormous(H, W, C):
    """(dy, sources) of a depth of 64, without memory."""
    dy = torch.empty(1, 64, H, W, C, dtype=torch.float16, device="meta").movedim(-1, 1)
    return dy, [dy]


PRODUCTS = {80: "mma.sync", 86: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}


def compile_plain(arch):
    from voxtune.kernels.compiled import compiled

    tile = wg.default_tile(torch.empty(1, 64, 1, 1, 1), hopper=False)
    found = []
    for bulk in (True, False) if int(arch) >= 90 else (False,):
        arguments = wg.arguments(tile, dtype="bf16", bulk=bulk)
        found.append(row(compiled(wg.voxtune_weight_gradient, *arguments, arch=int(arch), warps=tile.warps), int(arch)))
    for taps in (3, 9):
        arguments = wg.arguments_of_join(taps, dtype="bf16")
        made = compiled(wg.voxtune_weight_gradient_join, *arguments, arch=int(arch), warps=4)
        found.append(row(made, int(arch)) | {"products": 1, "bulk": 1, "wide": 1})
    return found


def compile_hopper(extent):
    from voxtune.kernels import conv3d_weight_gradient_hopper as hopper
    from voxtune.kernels.compiled import compiled

    tile = wg.default_tile(torch.empty(1, 64, 1, 1, 1), hopper=True)
    tiles = [tile, replace(tile, registers=False)]
    if extent == "all":
        tiles += [replace(tile, stages=6), replace(tile, registers=False, ahead=True)]
        tiles += [replace(tile, warps=8, registers=False)]
    found = []
    for tile in tiles:
        arguments = hopper.arguments(tile, dtype="bf16")
        made = compiled(hopper.voxtune_weight_gradient_hopper, *arguments, arch=90, warps=tile.warps)
        # From the wait for a step's tiles to their release.
        stretches = [s.partition("SYNCS.ARRIVE")[0] for s in made.sass.split("SYNCS.PHASECHK")[1:]]
        steps = [s for s in stretches if "HGMMA" in s]
        more = {"tile": str(tile), "rings": hopper.shared_memory(tile), "groups": 3 if tile.warps == 4 else 1}
        more |= {"steps": len(steps), "spills_in_steps": sum("STL" in s or "LDL" in s for s in steps)}
        found.append(row(made, 90) | more | {"in_registers": tile.registers})
    return found


def row(made, arch):
    return {
        "name": made.name,
        "registers": made.registers,
        "spills": made.spills,
        "shared": made.shared,
        "limit": SHARED_MEMORY[arch],
        "serialised": made.serialised,
        "products": made.ptx.count(PRODUCTS[arch]),
        "bulk": made.ptx.count("cp.async.bulk.tensor"),
        "wide": made.ptx.count("cp.async.cg.shared.global") + made.ptx.count("cp.async.ca.shared.global"),
        "loads_of_operand": made.ptx.count("ldmatrix"),
    }


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    jobs = {"numerics": numerics, "operator": operator, "plain": compile_plain, "hopper": compile_hopper}
    print(json.dumps(jobs[what](*rest)))

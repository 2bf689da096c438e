"""Run by test_conv3d.py in a process of its own: prints its findings as one line of JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch
from triton.runtime import interpreter

from voxtune.kernels import conv3d as cv
from voxtune.kernels.conv3d_tiles import Conv3dTile, tiles

SMALL = Conv3dTile(h=2, w=8, k=16, c=16)
# (batch, input and output channels, voxels, tile, shift, residual): ragged in every direction, more channels than one tile, one
# voxel, split taps.
CASES = [
    (1, 16, 16, (2, 4, 8), SMALL, None, False),
    (1, 16, 16, (3, 5, 7), SMALL, "batch", True),
    (2, 32, 48, (3, 3, 9), replace(SMALL, h=4, k=32, swap=False), "each", True),
    (2, 48, 32, (3, 4, 5), replace(SMALL, k=64, c=64), "each", False),
    (1, 16, 32, (1, 1, 1), SMALL, "batch", True),
    (1, 80, 16, (4, 3, 3), replace(SMALL, c=32, split=3), "batch", True),
    (2, 32, 48, (3, 3, 5), replace(SMALL, k=32, split=2, swap=False), "each", True),
    (1, 16, 16, (2, 3, 4), replace(SMALL, split=7), None, False),
]
QUICK = (1, 4, 6)


def channels_last(x):
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def joined(statistics):
    """(count, mean, sum of squares about the mean) of all stretches together, each (N, K)."""
    count, mean, squares = statistics.double().unbind(2)
    total = count.sum(1)
    middle = (count * mean).sum(1) / total
    return total, middle, (squares + count * (mean - middle[:, None]).square()).sum(1)


def case(dtype, whole, N, C, K, voxels, tile, shift, residual, offset=0.0):
    generator = torch.Generator().manual_seed(C + K)

    def draw(high, *shape):
        if whole:
            return torch.randint(-high, high + 1, shape, generator=generator).to(dtype)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    x, r = channels_last(draw(3, N, C, *voxels)), channels_last(draw(3, N, K, *voxels))
    packed = cv.pack(draw(1, K, C, 3, 3, 3))
    s = None if shift is None else (draw(3, N if shift == "each" else 1, K + 5) + offset)[:, 3 : K + 3]
    r = r if residual else None
    y, found = cv.convolve(x, packed, tile, s, r, statistics=True)
    double = [None if t is None else t.double() for t in (x, packed, s, r)]
    truth, _ = cv.conv3d_reference(*double)
    count, mean, squares = joined(found)
    flat = y.double().flatten(2)
    spread = (flat - flat.mean(2, keepdim=True)).square().sum(2)
    return {
        "case": [N, C, K, voxels, str(tile)],
        "exact": torch.equal(y.double(), truth.to(dtype).double()),
        "error": ((y.double() - truth).norm() / truth.norm()).item(),
        "counted": bool((count == flat.shape[2]).all()),
        "mean": (mean - flat.mean(2)).abs().max().item() / (1 + abs(offset)),
        "spread": ((squares - spread).abs().max() / spread.max().clamp_min(1e-9)).item(),
        "plain": torch.equal(cv.convolve(x, packed, tile, s, r)[0], y),
    }


def numerics(dtype, kind, extent):
    # Poison what is not written: fresh memory is filled with NaN.
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    if kind == "offset":
        return [case(getattr(torch, dtype), False, *CASES[1], offset=1000.0)]
    if extent == "quick":
        # A check of every integer for overflow is half of the interpreter's time; "all" leaves it on.
        object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
    cases = [CASES[i] for i in QUICK] if extent == "quick" else CASES
    return [case(getattr(torch, dtype), kind == "integers", *c) for c in cases]


def entry():
    """The entry point with its own tile, against the reference."""
    x = channels_last(torch.randn(1, 16, 3, 4, 5).half())
    weight, shift = torch.randn(32, 16, 3, 3, 3).half(), torch.randn(1, 32)
    y, found = cv.conv3d(x, cv.pack(weight), shift, statistics=True)
    truth, one = cv.conv3d_reference(x, cv.pack(weight), shift, statistics=True)
    pairs = zip(joined(found), joined(one), strict=True)
    by_operator, checks = operator(x, cv.pack(weight), shift)
    return {
        "operator": torch.equal(by_operator, y),
        "checks": checks,
        "error": ((y - truth).float().norm() / truth.float().norm()).item(),
        "statistics": max(((a - b).norm() / b.norm()).item() for a, b in pairs),
        "reasons": [
            cv.why_not(x, weight.shape),
            cv.why_not(x.float(), weight.shape),
            cv.why_not(x, weight.shape, (2, 2, 2)),
            cv.why_not(x, (32, 16, 1, 1, 1)),
            cv.why_not(x, (33, 16, 3, 3, 3)),
            cv.why_not(x.contiguous(), weight.shape),
        ],
    }


def operator(x, packed, shift):
    """The result of torch.ops.voxtune.conv3d, and how often it asked whether the kernel applies."""
    from voxtune.kernels import ops

    calls, original = [], cv.why_not
    ops._conv3d.why_not = lambda *a: calls.append(a) or original(*a)
    try:
        return torch.ops.voxtune.conv3d(x, packed, shift, None, True)[0], len(calls)
    finally:
        ops._conv3d.why_not = original


def shapes():
    """Every size of the whole-head and of the BraTS network: (D, H, W, C, K)."""
    pairs = [(128, 64, 64), (128, 128, 64), (64, 128, 128), (64, 192, 64), (32, 320, 128), (32, 192, 192)]
    pairs += [(16, 192, 192), (16, 448, 192), (16, 256, 256), (8, 256, 256), (8, 512, 256)]
    sizes = {128: (144, 192, 192), 64: (72, 96, 96), 32: (36, 48, 48), 16: (18, 24, 24), 8: (9, 12, 12)}
    return [(*v, C, K) for side, C, K in pairs for v in ((side, side, side), sizes[side])]


def compile_all(arch, extent):
    """Registers, spills, shared memory and products of each tile in use; `quick`: of the two that most layers use."""
    from voxtune.kernels import conv3d_halo
    from voxtune.kernels.compiled import compiled

    chosen = {}
    for *voxels, C, K in shapes():
        tile = tiles(1, *voxels, C, K, hopper=arch == 90)
        chosen[replace(tile, split=min(tile.split, 2))] = C
    if extent == "quick":
        kept = {tile.halo: tile for tile in reversed(chosen)}.values()
        chosen = {tile: C for tile, C in chosen.items() if tile in kept}
    found = []
    for tile, C in chosen.items():
        kernel, arguments = cv.voxtune_conv3d, cv.arguments(tile, dtype="bf16")
        if tile.halo:
            kernel, arguments = conv3d_halo.voxtune_conv3d_halo, conv3d_halo.arguments(tile, C, dtype="bf16")
        made = compiled(kernel, *arguments, arch=arch, warps=tile.warps)
        row = {"tile": str(tile), "registers": made.registers, "spills": made.spills, "shared": made.shared}
        row |= {"serialised": made.serialised, "wgmma": made.ptx.count("wgmma.mma_async")}
        found.append(row | {"mma": made.ptx.count("mma.sync"), "bulk": made.ptx.count("cp.async.bulk.tensor")})
    return found


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    result = {"numerics": numerics, "entry": entry, "compile": lambda a, extent: compile_all(int(a), extent)}[what](
        *rest
    )
    print(json.dumps(result))

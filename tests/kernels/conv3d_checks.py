"""Run by test_conv3d.py in a process of its own: prints its findings as one line of JSON."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import torch
from triton.runtime import interpreter

from voxtune.kernels import conv3d as cv
from voxtune.kernels.conv3d_tiles import SHARED_MEMORY, Conv3dTile, Device, tiles

SMALL = Conv3dTile(h=2, w=8, k=16, c=16)
PLAIN = replace(SMALL, swap=False)
AROUND, CAUSAL = cv.AROUND, (2, 0, 1, 1, 1, 1)
# (batch, channels of each source, output channels, voxels, tile, shift, residual, kernel, padding): ragged in every direction,
# more channels than one tile, fewer than a tile, one voxel, split taps, two sources, padding in front only.
CASES = [
    (1, (16,), 16, (2, 4, 8), SMALL, None, False, (3, 3, 3), AROUND),
    (1, (16,), 16, (3, 5, 7), SMALL, "batch", True, (3, 3, 3), AROUND),
    (2, (32,), 48, (3, 3, 9), replace(PLAIN, h=4, k=32), "each", True, (3, 3, 3), AROUND),
    (2, (48,), 32, (3, 4, 5), replace(SMALL, k=64, c=64), "each", False, (3, 3, 3), AROUND),
    (1, (16,), 32, (1, 1, 1), SMALL, "batch", True, (3, 3, 3), AROUND),
    (1, (80,), 16, (4, 3, 3), replace(SMALL, c=32, split=3), "batch", True, (3, 3, 3), AROUND),
    (2, (32,), 48, (3, 3, 5), replace(PLAIN, k=32, split=2), "each", True, (3, 3, 3), AROUND),
    (1, (16,), 16, (2, 3, 4), replace(SMALL, split=7), None, False, (3, 3, 3), AROUND),
    (2, (24, 8), 8, (3, 3, 9), PLAIN, "each", True, (3, 3, 3), AROUND),
    (1, (8, 40), 24, (2, 3, 5), replace(SMALL, c=32, split=5), "batch", True, (3, 3, 3), AROUND),
    (1, (16,), 16, (3, 4, 5), PLAIN, "batch", True, (3, 3, 3), CAUSAL),
    (1, (8, 8), 16, (3, 4, 5), SMALL, None, False, (3, 3, 3), (0, 2, 2, 0, 0, 1)),
    (2, (16,), 8, (3, 4, 9), PLAIN, "each", True, (1, 3, 3), (0, 0, 1, 1, 1, 1)),
    (1, (8, 24), 16, (4, 3, 5), replace(PLAIN, split=2), "batch", False, (3, 1, 1), (2, 0, 0, 0, 0, 0)),
    (1, (16,), 16, (2, 3, 4), replace(PLAIN, split=3), None, True, (1, 3, 3), (0, 0, 0, 1, 2, 0)),
    (1, (8,), 8, (2, 3, 4), SMALL, None, False, (3, 1, 3), (1, 1, 0, 0, 1, 1)),
]
QUICK = (1, 4, 11, 12, 13)


def channels_last(x):
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def joined(statistics):
    """(count, mean, sum of squares about the mean) of all stretches together, each (N, K)."""
    count, mean, squares = statistics.double().unbind(2)
    total = count.sum(1)
    middle = (count * mean).sum(1) / total
    return total, middle, (squares + count * (mean - middle[:, None]).square()).sum(1)


def case(dtype, whole, N, channels, K, voxels, tile, shift, residual, kernel, padding, offset=0.0):
    generator = torch.Generator().manual_seed(sum(channels) + K)

    def draw(high, *shape):
        if whole:
            return torch.randint(-high, high + 1, shape, generator=generator).to(dtype)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    sources = tuple(channels_last(draw(3, N, c, *voxels)) for c in channels)
    size = cv.result_size(sources[0], kernel, padding)
    r = channels_last(draw(3, N, K, *size))
    packed = cv.pack(draw(1, K, sum(channels), *kernel))
    s = None if shift is None else (draw(3, N if shift == "each" else 1, K + 5) + offset)[:, 3 : K + 3]
    r = r if residual else None
    window = (kernel, padding)
    y, found = cv.convolve(sources, packed, tile, s, r, True, *window)
    double = [None if t is None else t.double() for t in (packed, s, r)]
    truth, _ = cv.conv3d_reference(tuple(x.double() for x in sources), *double, False, *window)
    count, mean, squares = joined(found)
    flat = y.double().flatten(2)
    spread = (flat - flat.mean(2, keepdim=True)).square().sum(2)
    return {
        "case": [N, channels, K, voxels, str(tile), window],
        "exact": torch.equal(y.double(), truth.to(dtype).double()),
        "error": ((y.double() - truth).norm() / truth.norm()).item(),
        "counted": bool((count == flat.shape[2]).all()),
        "mean": (mean - flat.mean(2)).abs().max().item() / (1 + abs(offset)),
        "spread": ((squares - spread).abs().max() / spread.max().clamp_min(1e-9)).item(),
        "plain": torch.equal(cv.convolve(sources, packed, tile, s, r, False, *window)[0], y),
        # Without descriptors, as on devices that have no copy engine.
        "pointers": torch.equal(cv.convolve(sources, packed, tile, s, r, True, *window, bulk=False)[0], y),
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
    packed = cv.pack(weight)
    y, found = cv.conv3d((x,), packed, shift, statistics=True)
    truth, one = cv.conv3d_reference((x,), packed, shift, statistics=True)
    pairs = zip(joined(found), joined(one), strict=True)
    by_operator, checks = operator(x, packed, shift)
    residual = channels_last(torch.zeros(1, 32, 3, 4, 5).half())
    unaligned = torch.zeros(residual.numel() + 1).half()[1:].view(1, 3, 4, 5, 32).movedim(-1, 1)
    return {
        "operator": torch.equal(by_operator, y),
        "checks": checks,
        "error": ((y - truth).float().norm() / truth.float().norm()).item(),
        "statistics": max(((a - b).norm() / b.norm()).item() for a, b in pairs),
        "reasons": [
            cv.why_not((x,), packed, shift, residual),
            cv.why_not((x.float(),), packed),
            cv.why_not((x,), packed.float()),
            cv.why_not((x,), packed, None, residual.float()),
            cv.why_not((x,), packed, None, residual.contiguous()),
            cv.why_not((x,), packed, None, residual[:, :, :2]),
            cv.why_not((x,), packed, None, unaligned),
            cv.why_not((x,), packed, torch.randn(1, 31)),
            cv.why_not((x,), packed[:, :30].contiguous()),
            cv.why_not((x, x), packed),
            cv.why_not((x, x, x), packed),
            cv.why_not((x,), packed[:8].contiguous(), kernel=(2, 2, 2)),
            cv.why_not((x,), packed, padding=(-1, 1, 1, 1, 1, 1)),
            cv.why_not((x[:, :, :1],), packed, padding=(0, 0, 1, 1, 1, 1)),
            cv.why_not((x.contiguous(),), packed),
        ],
    }


def operator(x, packed, shift):
    """The result of torch.ops.voxtune.conv3d, and how often it asked whether the kernel applies."""
    from voxtune.kernels import ops

    calls, original = [], cv.why_not
    ops._conv3d.why_not = lambda *a: calls.append(a) or original(*a)
    try:
        return torch.ops.voxtune.conv3d([x], packed, shift, None, True)[0], len(calls)
    finally:
        ops._conv3d.why_not = original


def shapes():
    """Every size of the whole-head and of the BraTS network, then thinner networks: (D, H, W, channels of each source, K)."""
    pairs = [(128, 64, 64), (128, 128, 64), (64, 128, 128), (64, 192, 64), (32, 320, 128), (32, 192, 192)]
    pairs += [(16, 192, 192), (16, 448, 192), (16, 256, 256), (8, 256, 256), (8, 512, 256)]
    sizes = {128: (144, 192, 192), 64: (72, 96, 96), 32: (36, 48, 48), 16: (18, 24, 24), 8: (9, 12, 12)}
    rows = [(*v, (C,), K) for side, C, K in pairs for v in ((side, side, side), sizes[side])]
    thin = [((8,), 8), ((16,), 16), ((32,), 32), ((32, 32), 32), ((64,), 32), ((32,), 64), ((64, 64), 64), ((16,), 64)]
    return [*rows, *((128, 128, 128, *pair) for pair in thin), (16, 16, 16, (256, 256), 256)]


# What each capability has: instructions of the matrix units.
PRODUCTS = {80: "mma.sync", 86: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}


def compile_all(arch, extent):
    """Registers, spills, shared memory and products of each tile in use; `quick`: of the two that most layers use."""
    from voxtune.kernels import conv3d_halo
    from voxtune.kernels.compiled import compiled

    device = Device(hopper=arch == 90, halo=arch == 90, shared=SHARED_MEMORY[arch])
    chosen = {}
    for *voxels, channels, K in shapes():
        tile = tiles(1, *voxels, channels, K, device=device)
        chosen[replace(tile, split=min(tile.split, 2)), len(channels), cv.CUBE] = channels
    if extent == "quick":
        kept = {tile.halo: (tile, *more) for tile, *more in reversed(chosen)}.values()
        chosen = {key: channels for key, channels in chosen.items() if key in kept}
    else:
        for kernel in ((1, 3, 3), (3, 1, 1)):
            for channels in ((64,), (32, 32)):
                chosen[tiles(1, 64, 64, 64, channels, 64, kernel=kernel, device=device), len(channels), kernel] = (
                    channels
                )
    found = []
    for (tile, sources, window), channels in chosen.items():
        kernel = cv.voxtune_conv3d
        arguments = cv.arguments(tile, dtype="bf16", sources=sources, kernel=window, bulk=arch >= 90)
        if tile.halo:
            kernel, arguments = conv3d_halo.voxtune_conv3d_halo, conv3d_halo.arguments(tile, channels, dtype="bf16")
        made = compiled(kernel, *arguments, arch=arch, warps=tile.warps)
        row = {"tile": str(tile), "channels": channels, "kernel": window, "registers": made.registers}
        row |= {"spills": made.spills, "shared": made.shared, "limit": SHARED_MEMORY[arch]}
        row |= {"serialised": made.serialised, "products": made.ptx.count(PRODUCTS[arch])}
        row["bulk"] = made.ptx.count("cp.async.bulk.tensor")
        row["wide"] = len(re.findall(r"cp\.async\.c[^;]*0x10", made.ptx))
        found.append(row)
    return found


def compile_join(arch):
    """The kernel that adds the parts of split tiles, with everything in its epilogue."""
    from voxtune.kernels.compiled import compiled
    from voxtune.kernels.conv3d_join import join_block, voxtune_conv3d_join

    found = []
    for side, K in ((16, 192), (8, 256), (4, 24)):
        block_v, block_k = join_block(1, side**3, K)
        types = {"partial_ptr": "*fp32", "y_ptr": "*bf16", "r_ptr": "*bf16", "shift_ptr": "*fp32"}
        types |= {"statistics_ptr": "*fp32", **dict.fromkeys(("N", "V", "K", "splits", "shift_stride"), "i32")}
        constants = {"BLOCK_V": block_v, "BLOCK_K": block_k}
        made = compiled(voxtune_conv3d_join, types, constants, arch=int(arch), warps=4)
        found.append({"blocks": constants, "registers": made.registers, "spills": made.spills, "shared": made.shared})
    return found


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    jobs = {"numerics": numerics, "entry": entry, "join": compile_join}
    result = (jobs | {"compile": lambda a, extent: compile_all(int(a), extent)})[what](*rest)
    print(json.dumps(result))

"""Run by test_parity_conv.py in processes of its own: prints its findings as one line of JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch
from torch.nn import functional as F
from triton.runtime import interpreter

from voxtune.kernels import doubling_conv as doubling
from voxtune.kernels import strided_conv as strided
from voxtune.kernels.parity_tiles import ParityTile, doubling_tile, shared_memory, strided_tile

SMALL = ParityTile(h=2, w=8, k=16, c=16)
PLAIN = replace(SMALL, swap=False)
# (batch, channels of each source, output channels, voxels, kernel, stride, tile, shift): ragged in every direction, channels that
# fill no tile, one voxel, an axis that is not doubled, images.
DOUBLING = [
    (1, (16,), 16, (2, 4, 8), (2, 2, 2), (2, 2, 2), SMALL, None),
    (2, (8,), 24, (3, 3, 5), (2, 2, 2), (2, 2, 2), PLAIN, "each"),
    (2, (24,), 16, (2, 3, 5), (3, 3, 3), (2, 2, 2), SMALL, "batch"),
    (1, (16, 40), 40, (2, 3, 9), (3, 3, 3), (2, 2, 2), replace(SMALL, k=32), "batch"),
    (2, (24,), 40, (2, 3, 5), (4, 4, 4), (2, 2, 2), PLAIN, "each"),
    (1, (16, 8), 16, (3, 3, 3), (4, 4, 4), (2, 2, 2), replace(SMALL, k=32), "batch"),
    (1, (16,), 8, (1, 1, 1), (4, 4, 4), (2, 2, 2), SMALL, "batch"),
    (2, (16,), 16, (3, 3, 5), (1, 2, 2), (1, 2, 2), SMALL, "each"),
    (2, (16,), 16, (3, 3, 3), (3, 4, 4), (1, 2, 2), SMALL, "each"),
    (1, (16,), 16, (2, 3, 3), (2, 1, 2), (2, 1, 2), SMALL, None),
    (1, (16, 16), 32, (5, 9), (3, 3), (2, 2), SMALL, "batch"),
    (2, (48,), 16, (3, 11), (4, 4), (2, 2), replace(SMALL, c=64), "each"),
]
# (batch, channels in and out, voxels, kernel, stride, tile, shift)
STRIDED = [
    (1, 16, 16, (4, 4, 16), (3, 3, 3), (2, 2, 2), SMALL, None),
    (2, 24, 40, (5, 6, 10), (3, 3, 3), (2, 2, 2), replace(SMALL, k=32), "each"),
    (1, 40, 16, (3, 2, 6), (3, 3, 3), (2, 2, 2), replace(PLAIN, c=32), "batch"),
    (2, 8, 24, (1, 2, 2), (3, 3, 3), (2, 2, 2), replace(SMALL, c=32), "each"),
    (2, 16, 16, (3, 6, 6), (1, 3, 3), (1, 2, 2), SMALL, "batch"),
    (1, 24, 16, (3, 4, 6), (3, 3, 3), (1, 2, 2), SMALL, "batch"),
    (1, 24, 8, (4, 6, 5), (3, 3, 3), (2, 2, 1), SMALL, "batch"),
    (1, 16, 16, (4, 5, 8), (3, 3, 3), (2, 1, 2), SMALL, None),
    (2, 48, 24, (4, 4, 6), (3, 3, 3), (2, 2, 2), replace(SMALL, split=3, c=32), "each"),
    (1, 16, 16, (1, 2, 2), (3, 3, 3), (2, 2, 2), replace(PLAIN, split=7), "batch"),
    (2, 16, 48, (8, 18), (3, 3), (2, 2), SMALL, "each"),
    (2, 16, 16, (4, 4, 4), (3, 1, 3), (2, 1, 2), SMALL, "each"),
]
QUICK = {"doubling": (1, 5, 7, 10), "strided": (1, 2, 6, 8)}


def channels_last(x):
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def joined(statistics):
    """(count, mean, sum of squares about the mean) of all stretches together, each (N, K)."""
    count, mean, squares = statistics.double().unbind(2)
    total = count.sum(1)
    middle = (count * mean).sum(1) / total
    return total, middle, (squares + count * (mean - middle[:, None]).square()).sum(1)


class Draw:
    def __init__(self, dtype, whole, seed):
        self.dtype, self.whole = dtype, whole
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, high, *shape):
        if self.whole:
            return torch.randint(-high, high + 1, shape, generator=self.generator).to(self.dtype)
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def shift(self, kind, N, K, offset):
        """Rows of a wider tensor."""
        return None if kind is None else (self(3, N if kind == "each" else 1, K + 5) + offset)[:, 3 : K + 3]


def finding(case, y, statistics, plain, truth, offset):
    count, mean, squares = joined(statistics)
    flat = y.double().flatten(2)
    spread = (flat - flat.mean(2, keepdim=True)).square().sum(2)
    return {
        "case": [str(c) for c in case],
        "exact": y.shape == truth.shape and torch.equal(y.double(), truth.to(y.dtype).double()),
        "error": ((y.double() - truth).norm() / truth.norm()).item(),
        "last": y.movedim(1, -1).is_contiguous(),
        "counted": bool((count == flat.shape[2]).all()),
        "mean": (mean - flat.mean(2)).abs().max().item() / (1 + abs(offset)),
        "spread": ((squares - spread).abs().max() / spread.max().clamp_min(1e-9)).item(),
        "plain": torch.equal(plain, y),
    }


def of_doubling(dtype, whole, case, offset):
    N, channels, K, voxels, kernel, stride, tile, kind = case
    draw = Draw(dtype, whole, sum(channels) + K)
    sources = tuple(channels_last(draw(3, N, c, *voxels)) for c in channels)
    weight, shift = draw(1, sum(channels), K, *kernel), draw.shift(kind, N, K, offset)
    packed = doubling.pack_transposed(weight)
    y, statistics = doubling.convolve(sources, packed, tile, shift, kernel, stride, statistics=True)
    plain, none = doubling.convolve(sources, packed, tile, shift, kernel, stride)
    assert none is None
    padding, output_padding = doubling.paddings(kernel, stride)
    convolution = F.conv_transpose3d if len(kernel) == 3 else F.conv_transpose2d
    x = torch.cat(sources, 1).double()
    truth = convolution(x, weight.double(), stride=stride, padding=padding, output_padding=output_padding)
    if shift is not None:
        truth = truth + shift.double().view(*shift.shape, *[1] * len(kernel))
    return finding(case, y, statistics, plain, truth, offset)


def of_strided(dtype, whole, case, offset):
    N, C, K, voxels, kernel, stride, tile, kind = case
    draw = Draw(dtype, whole, C + K)
    x, weight = channels_last(draw(3, N, C, *voxels)), draw(1, K, C, *kernel)
    shift, packed = draw.shift(kind, N, K, offset), strided.pack_strided(weight)
    y, statistics = strided.convolve(x, packed, tile, shift, kernel, stride, statistics=True)
    plain, none = strided.convolve(x, packed, tile, shift, kernel, stride)
    assert none is None
    convolution = F.conv3d if len(kernel) == 3 else F.conv2d
    truth = convolution(x.double(), weight.double(), stride=stride, padding=[k // 2 for k in kernel])
    if shift is not None:
        truth = truth + shift.double().view(*shift.shape, *[1] * len(kernel))
    return finding(case, y, statistics, plain, truth, offset)


def numerics(what, dtype, kind, extent):
    # Poison what is not written: fresh memory is filled with NaN.
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    cases, check = (DOUBLING, of_doubling) if what == "doubling" else (STRIDED, of_strided)
    if kind == "offset":
        return [check(getattr(torch, dtype), False, cases[5], 1000.0)]
    if extent == "quick":
        # A check of every integer for overflow is half of the interpreter's time; "all" leaves it on.
        object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
        cases = [cases[i] for i in QUICK[what]]
    return [check(getattr(torch, dtype), kind == "integers", case, 0.0) for case in cases]


def entry(what):
    """The operator, that is the entry point with its own tile, against its reference; and the reasons of `why_not`."""
    from voxtune.kernels import ops

    x, shift = channels_last(torch.randn(2, 24, 3, 4, 6).half()), torch.randn(1, 40)
    own = torch.ops.voxtune.doubling_conv if what == "doubling" else torch.ops.voxtune.strided_conv
    if what == "doubling":
        packed = doubling.pack_nearest(torch.randn(40, 48, 3, 3, 3).half() / 30, (2, 2, 2))
        args = ([x, x + 1], packed, shift, (4, 4, 4), (2, 2, 2), True)
        half = packed[..., :24].contiguous()
        reasons = [
            doubling.why_not((x, x), packed, (4, 4, 4), (2, 2, 2)),
            doubling.why_not((x.float(), x.float()), packed, (4, 4, 4), (2, 2, 2)),
            doubling.why_not((x,), packed, (4, 4, 4), (2, 2, 2)),
            doubling.why_not((x,), half[:25], (5, 5, 1), (2, 2, 2)),
            doubling.why_not((x,), half[:16], (4, 4, 1), (2, 2, 1)),
            doubling.why_not((x,), half[:, :36], (4, 4, 4), (2, 2, 2)),
            doubling.why_not((x, x[..., :4]), packed, (4, 4, 4), (2, 2, 2)),
            doubling.why_not((x.contiguous(),), half, (4, 4, 4), (2, 2, 2)),
        ]
    else:
        packed = strided.pack_strided(torch.randn(40, 24, 3, 3, 3).half() / 30)
        args = (x, packed, shift, (3, 3, 3), (2, 2, 2), True)
        reasons = [
            strided.why_not(x, packed, (3, 3, 3), (2, 2, 2)),
            strided.why_not(x.float(), packed, (3, 3, 3), (2, 2, 2)),
            strided.why_not(x, packed, (3, 3, 3), (1, 1, 1)),
            strided.why_not(x, packed, (3, 3, 3), (3, 2, 2)),
            strided.why_not(x, packed[:3], (3, 1, 3), (3, 2, 2)),
            strided.why_not(x, packed[:, :36], (3, 3, 3), (2, 2, 2)),
            strided.why_not(channels_last(x[..., :3, :]), packed, (3, 3, 3), (2, 2, 2)),
            strided.why_not(x.contiguous(), packed, (3, 3, 3), (2, 2, 2)),
        ]
    module, launches = (doubling if what == "doubling" else strided), []
    original = module.convolve
    module.convolve = lambda *a: launches.append(a) or original(*a)
    y, found = own(*args)
    with ops.plain_operators():
        truth, one = own(*args)
    pairs = zip(joined(found), joined(one), strict=True)
    return {
        "error": ((y - truth).float().norm() / truth.float().norm()).item(),
        "statistics": max(((a - b).norm() / b.norm()).item() for a, b in pairs),
        "launches": len(launches),
        "reasons": reasons,
    }


# (channels of each source, output channels, voxels of the source, kernel): nnU-Net's decoder, MONAI UNet's, nearest + 3x3x3.
DOUBLED = [
    ((64,), 32, (64, 64, 64), 2),
    ((128,), 64, (32, 32, 32), 2),
    ((320,), 320, (4, 4, 4), 2),
    ((32, 32), 16, (64, 64, 64), 3),
    ((128, 128), 64, (16, 16, 16), 3),
    ((256,), 256, (8, 8, 8), 4),
    ((128,), 128, (64, 64, 64), 4),
    ((64,), 64, (128, 128, 128), 4),
]
# (channels in and out, voxels of the result): nnU-Net's encoder.
HALVED = [
    (32, 64, (64, 64, 64)),
    (64, 128, (32, 32, 32)),
    (128, 256, (16, 16, 16)),
    (256, 320, (8, 8, 8)),
    (320, 320, (4, 4, 4)),
    (64, 64, (64, 64, 64)),
]


def compile_all(arch, extent):
    """Registers, spills, shared memory and products of each tile in use; `quick`: of one that most layers use of each kernel."""
    from voxtune.kernels.compiled import compiled

    jobs = []
    for channels, K, voxels, size in DOUBLED[-2:-1] if extent == "quick" else DOUBLED:
        fold = size == 2
        tile = doubling_tile(1, *voxels, max(channels), K, fold)
        kernel, stride = ((2, 1, 2), (2, 1, 2)) if fold else ((size,) * 3, (2, 2, 2))
        given = doubling.arguments(tile, kernel, stride, dtype="bf16", sources=len(channels), statistics=not fold)
        memory = shared_memory(tile, doubling=True, kernel_w=size)
        jobs.append((doubling.voxtune_doubling_conv, given, tile, memory, f"kernel {size}"))
    for C, K, voxels in HALVED[1:2] if extent == "quick" else HALVED:
        tile = strided_tile(1, *voxels, C, K, 27 * -(-C // 64))
        given = strided.arguments(replace(tile, split=min(tile.split, 2)), (3, 3, 3), (2, 2, 2), dtype="bf16")
        jobs.append(
            (strided.voxtune_strided_conv, given, tile, shared_memory(tile, doubling=False), f"{C} to {K} channels")
        )
    found = []
    for kernel, given, tile, memory, what in jobs:
        made = compiled(kernel, *given, arch=arch, warps=tile.warps)
        row = {"kernel": made.name, "what": what, "tile": str(tile), "registers": made.registers, "spills": made.spills}
        row |= {"shared": made.shared, "loads": memory, "serialised": made.serialised}
        row |= {"wgmma": made.ptx.count("wgmma.mma_async")}
        row["products"] = sum(made.ptx.count(name) for name in ("wgmma.mma_async", "tcgen05.mma", "mma.sync"))
        found.append(row | {"bulk": made.ptx.count("cp.async.bulk.tensor")})
    return found


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    result = {"numerics": numerics, "entry": entry, "compile": lambda a, extent: compile_all(int(a), extent)}[what](
        *rest
    )
    print(json.dumps(result))

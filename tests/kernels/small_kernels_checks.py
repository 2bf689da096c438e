"""Run by test_pointwise.py, test_upsample.py and test_edge_conv.py in processes of their own: prints one line of JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import torch
import triton

from voxtune.kernels import head_conv, head_lines, pointwise, stem_conv, upsample

# Products of bfloat16 are not to be trusted in the interpreter; plain arithmetic is, but it cuts instead of rounding.
PRODUCT_TYPES = (torch.float32, torch.float16)
ALL_TYPES = (*PRODUCT_TYPES, torch.bfloat16)

# (batch, channels of each source, voxels, channels out, shift's batch or 0, residual)
POINTWISE = [
    (1, (64, 64), (4, 5, 6), 64, 1, False),
    (2, (64, 64), (3, 5, 9), 64, 2, True),
    (2, (128, 64), (3, 3, 3), 128, 1, True),
    (1, (192, 128), (2, 5, 3), 192, 0, False),
    (1, (256, 192), (2, 2, 2), 192, 1, False),
    (1, (64,), (5, 5, 5), 128, 0, True),
    (2, (10, 5), (3, 4, 3), 7, 2, True),
    (1, (7,), (1, 1, 1), 1, 1, False),
    (2, (96,), (8, 9), 32, 2, True),
    (1, (48, 16), (13, 11), 80, 0, False),
    (1, (32,), (5, 6, 11), 14, 1, False),
    (2, (24,), (3, 5, 4), 2, 0, False),
    (1, (8, 40), (4, 5, 3), 3, 1, False),
]
# (batch, channels, voxels)
UPSAMPLE = [
    (1, 64, (4, 5, 6)),
    (2, 10, (3, 3, 3)),
    (1, 192, (1, 1, 2)),
    (1, 16, (17, 2, 3)),
    (1, 7, (2, 1, 9)),
    (2, 32, (5, 7)),
    (1, 129, (1, 1)),
    (2, 64, (9, 8)),
]
# (batch, channels of each source, channels-last, voxels, channels out, shift's batch or 0)
STEM = [
    (1, (3,), False, (2, 3, 6), 64, 1),
    (2, (3,), True, (3, 2, 3), 64, 2),
    (1, (1, 2), False, (2, 2, 33), 64, 0),
    (1, (4, 4), True, (2, 2, 17), 64, 1),
    (1, (8,), False, (1, 3, 5), 20, 1),
    (1, (1,), False, (1, 1, 1), 128, 0),
    (2, (3,), True, (5, 7), 48, 2),
    (1, (1, 3), False, (3, 130), 32, 1),
]
# (batch, channels, voxels, channels out, bias, norm)
HEAD = [
    (1, 64, (3, 7, 7), 1, True, False),
    (2, 64, (2, 3, 5), 4, True, False),
    (1, 32, (9, 17), 1, True, False),
    (1, 48, (4, 2, 6), 3, True, True),
    (2, 64, (1, 3, 15), 1, True, True),
    (1, 128, (2, 2, 3), 8, False, True),
    (1, 7, (1, 1, 1), 2, True, False),
    (2, 64, (7, 5), 3, False, True),
]
# For head_lines.py: (batch, channels, voxels, channels out, bias); the fourth is of several programs along each axis.
LINES = [
    (1, 64, (3, 5, 9), 1, True),
    (2, 16, (3, 3, 5), 5, True),
    (1, 24, (1, 1, 1), 3, False),
    (1, 8, (3, 9, 70), 2, True),
    (2, 32, (4, 2, 6), 8, True),
    (1, 16, (5, 6, 63), 4, False),
]


def channels_last(x):
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


class Draw:
    """Random values of a type and, beside them, the same in float64; whole numbers where results must be exact."""

    def __init__(self, dtype, whole):
        self.dtype, self.whole = dtype, whole
        self.generator = torch.Generator().manual_seed(7)

    def __call__(self, *shape, dtype=None):
        if self.whole:
            return torch.randint(-2, 3, shape, generator=self.generator).to(dtype or self.dtype)
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(dtype or self.dtype)


def wide(x):
    if isinstance(x, tuple):
        return tuple(wide(s) for s in x)
    return None if x is None else x.double()


def finding(case, y, truth):
    return {
        "case": list(map(str, case)),
        "error": ((y.double() - truth).norm() / truth.norm().clamp_min(1e-30)).item(),
        "written": bool(torch.isfinite(y).all()) and y.shape == truth.shape,
        "last": y.movedim(1, -1).is_contiguous(),
        "exact": bool(torch.equal(y.double(), truth)),
    }


def of_pointwise(draw):
    for case in POINTWISE:
        batch, channels, voxels, out, shift, residual = case
        sources = tuple(channels_last(draw(batch, c, *voxels)) for c in channels)
        rest = (
            draw(out, sum(channels)),
            draw(shift, out + 5)[:, 3 : out + 3] if shift else None,  # rows of a wider tensor
            channels_last(draw(batch, out, *voxels)) if residual else None,
        )
        truth = pointwise.pointwise_reference(wide(sources), *wide(rest))
        yield finding(case, pointwise.pointwise(sources, *rest), truth)
        if out < 16:  # a head, stored in float32
            y = pointwise.pointwise(sources, *rest, dtype=torch.float32)
            assert y.dtype == torch.float32
            yield finding((*case, "float32"), y, truth)


def of_add(draw):
    for batch, channels, voxels in UPSAMPLE:
        for shift in (0, 1, batch):
            a, b = (channels_last(draw(batch, channels, *voxels)) for _ in range(2))
            shift_NC = draw(shift, channels + 5)[:, 3 : channels + 3] if shift else None
            truth = pointwise.add_reference(a.double(), b.double(), wide(shift_NC))
            yield finding((batch, channels, voxels, shift), pointwise.add(a, b, shift_NC), truth)


def of_upsample(draw, mode):
    for case in UPSAMPLE:
        batch, channels, voxels = case
        x = channels_last(draw(batch, channels, *voxels))
        yield finding((*case, mode), upsample.upsample(x, mode), upsample.upsample_reference(x.double(), mode))


def of_stem(draw):
    for case in STEM[:3] if draw.whole else STEM:
        batch, channels, last, voxels, out, shift = case
        # Sources are float32 whatever the weights: the kernel casts them.
        sources = tuple(draw(batch, c, *voxels, dtype=torch.float32) for c in channels)
        sources = tuple(channels_last(s) for s in sources) if last else sources
        weight = draw(out, sum(channels), *[3] * len(voxels))
        shift_NC = draw(shift, out + 5)[:, 3 : out + 3] if shift else None
        cast = tuple(s.to(draw.dtype).double() for s in sources)
        truth = stem_conv.stem_reference(cast, weight.double(), wide(shift_NC))
        yield finding(case, stem_conv.stem(sources, stem_conv.pack_stem(weight, channels, draw.dtype), shift_NC), truth)


def of_head(draw):
    for case in HEAD[:2] if draw.whole else HEAD:  # a norm's results are not whole
        batch, channels, voxels, out, bias, norm = case
        x, weight = channels_last(draw(batch, channels, *voxels)), draw(out, channels, *[3] * len(voxels))
        bias_M = draw(out) if bias else None
        affine = draw(batch, 2, channels, dtype=torch.float32) if norm else None
        truth = head_conv.head_reference(x.double(), weight.double(), wide(bias_M), wide(affine))
        packed = head_conv.pack_head(weight, draw.dtype)
        if out > 1:  # into a given tensor of other strides and type
            given = torch.empty(truth.shape, dtype=torch.float32)
            assert head_conv.head(x, packed, bias_M, affine=affine, out=given) is given
            yield finding(case, given, truth) | {"last": True}
        else:
            yield finding(case, head_conv.head(x, packed, bias_M, affine=affine), truth)


def of_lines(draw):
    for case in LINES[:3] if draw.whole else LINES:
        batch, channels, voxels, out, bias = case
        x, weight = channels_last(draw(batch, channels, *voxels)), draw(out, channels, 3, 3, 3)
        bias_M = draw(out) if bias else None
        truth = head_lines.lines_reference(x.double(), weight.double(), wide(bias_M))
        packed = head_lines.pack_lines(weight, draw.dtype)
        assert head_lines.why_not_lines(x, out) is None
        with patch.object(head_lines, "ENOUGH", 1 if draw.whole else 10**6):  # long walks, and the shortest
            for bulk in (True, False):
                y = channels_last(torch.empty(truth.shape, dtype=draw.dtype))
                head_lines.head_lines(x, packed, bias_M, y, bulk=bulk)
                yield finding((*case, bulk), y, truth)
        y = torch.empty(truth.shape)  # of other strides and type
        head_lines.head_lines(x, packed, bias_M, y)
        yield finding((*case, "float32"), y, truth) | {"last": True}


def numerics(what, whole):
    # Poison what is not written: fresh memory is filled with NaN.
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    made = {
        "pointwise": [(of_pointwise, t) for t in PRODUCT_TYPES],
        "add": [(of_add, t) for t in ALL_TYPES],
        "linear": [(lambda draw: of_upsample(draw, "linear"), t) for t in ALL_TYPES],
        "nearest": [(lambda draw: of_upsample(draw, "nearest"), t) for t in ALL_TYPES],
        "stem": [(of_stem, t) for t in PRODUCT_TYPES],
        "head": [(of_head, t) for t in PRODUCT_TYPES],
        "lines": [(of_lines, torch.float16)],
    }[what]
    return [{"type": str(t), **row} for function, t in made for row in function(Draw(t, whole))]


def build(kernel, arch, pointers, constants, num_warps=4, num_stages=3, **tile):
    """Registers, spills and products of a kernel, compiled as for aligned pointers and sizes that divide by 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {**constants, **tile}
    types = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in kernel.arg_names}
    odd = {"M"} if constants.get("BLOCK_M", 64) < 64 else set()
    odd |= {"eighths", "walk"}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if types[name] != "constexpr" and name not in odd and not types[name].startswith("tensordesc")
    }
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": num_warps, "num_stages": num_stages},
    )
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        asked = [tool, "--dump-resource-usage", file.name]
        text = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
    ptx = compiled.asm["ptx"]
    return {
        "name": f"{compiled.metadata.name} {pointers} {tile}",
        "registers": int(registers),
        "spills": int(stack),
        "shared": compiled.metadata.shared,
        "products": ptx.count("wgmma.mma_async") + ptx.count("tcgen05.mma") + len(re.findall(r"\bmma\.sync", ptx)),
        "bulk": ptx.count("cp.async.bulk.tensor"),
        "wide": len(re.findall(r"(?:ld|st)\.global[a-zA-Z0-9_:.]*\.v4|cp\.async[a-z.]*\s[^;]*0x10", ptx)),
    }


def typed(names, kind):
    return dict.fromkeys(names.split(), f"*{kind}")


KINDS = {"bf16": torch.bfloat16, "fp32": torch.float32}


def compile_pointwise(arch, kinds):
    for kind, precision in (("bf16", "ieee"), ("fp32", "ieee"), ("fp32", "tf32")):
        if kind not in kinds:
            continue
        shapes = [(64, 64, 64, 128**3), (192, 128, 128, 32**3), (256, 256, 256, 8**3)]
        # Heads; in float32 their products need no check of their own.
        shapes += [(32, 0, 14, 128**3), (24, 0, 3, 128**3), (40, 0, 4, 128**3)] if kind == "bf16" else []
        for CA, CB, M, V in shapes:
            tile = pointwise.tile_of(1, V, CA, CB, M, KINDS[kind])
            constants = {"CA": CA, "CB": CB, "HAS_SHIFT": True, "HAS_RESIDUAL": True, "PRECISION": precision}
            pointers = typed("a_ptr b_ptr w_ptr shift_ptr residual_ptr y_ptr", kind)
            yield build(pointwise.voxtune_pointwise, arch, pointers, constants, **tile)
    pointers = typed("a_ptr b_ptr shift_ptr y_ptr", "bf16")
    yield build(pointwise.voxtune_add, arch, pointers, {"HAS_SHIFT": True, "BLOCK_V": 64, "BLOCK_C": 64})


def compile_upsample(arch, kinds):
    for kind in kinds:
        constants = {"VOLUME": True, "BLOCK_Q": 16, "BLOCK_C": 64}
        pointers = typed("x_ptr y_ptr", kind)
        yield build(upsample.voxtune_upsample_linear, arch, pointers, constants, WALK=8)
        yield build(upsample.voxtune_upsample_nearest, arch, pointers, constants)


def compile_stem(arch, kinds):
    for kind in kinds:
        dtype = KINDS[kind]
        # On one GPU and in one type (the quick check) fewer shapes are enough.
        for channels in ((3,), (1, 2), (4, 4), (8,))[: 2 if kinds == ["bf16"] else 4]:
            packed = stem_conv.pack_stem(torch.zeros(64, sum(channels), 3, 3, 3), channels, dtype)
            constants = {"CA": channels[0], "CB": (*channels, 0)[1], "TAPS": 27, "HAS_SHIFT": True, "PRECISION": "ieee"}
            constants |= {"CHUNK_A": packed.chunks[0], "CHUNK_B": packed.chunks[-1], "a_w": 1, "b_w": 1}
            pointers = typed("w_ptr shift_ptr y_ptr", kind) | typed("a_ptr b_ptr", "fp32")
            run = stem_conv.stem_run(128, dtype)
            yield build(stem_conv.voxtune_stem, arch, pointers, constants, BLOCK_W=run, BLOCK_M=packed.block_m)


def compile_head(arch, kinds):
    shapes = [(64, M, norm, True) for M in (1, 4) for norm in (False, True)]
    shapes += [(128, 1, True, True), (320, 4, True, False), (640, 4, False, True)]  # the widths of others' networks
    for kind in kinds:
        dtype = KINDS[kind]
        for C, M, norm, volume in shapes[-4:] if kinds == ["bf16"] else shapes:
            constants = {"C": C, "WALK": 32, "VOLUME": volume, "NORM": norm, "HAS_BIAS": True, "PRECISION": "ieee"}
            constants |= {"BLOCK_K": head_conv.chunk_of(C, dtype), "COLUMNS": head_conv.COLUMNS, "y_w": 1}
            pointers = typed("x_ptr w_ptr bias_ptr", kind) | typed("affine_ptr y_ptr", "fp32")
            tile = head_conv.head_tile(C, M, dtype, volume=volume)
            yield build(head_conv.voxtune_head, arch, pointers, constants, **tile)


def compile_lines(arch, _kinds):
    for C, M in ((64, 1), (64, 4), (32, 8), (8, 2)):
        tile, bulk, K = head_lines.lines_tile(C), arch >= 90, head_lines.block_k(C)
        constants = {"BLOCK_M": head_lines.block_m(M), "BLOCK_K": K, "BULK": bulk, "y_w": M, "y_m": 1}
        block = f"tensordesc<bf16[1,1,1,{tile['BLOCK_W']},{K}]>"
        pointers = typed("w_ptr bias_ptr y_ptr", "bf16") | {"x": block if bulk else "*bf16"}
        yield build(head_lines.voxtune_head_lines, arch, pointers, constants, **tile)


if __name__ == "__main__":
    job, what, option, *kinds = sys.argv[1:]
    if job == "numerics":
        result = numerics(what, option == "whole")
    else:
        kernels = {
            "pointwise": compile_pointwise,
            "upsample": compile_upsample,
            "stem": compile_stem,
            "head": compile_head,
            "lines": compile_lines,
        }
        result = list(kernels[what](int(option), kinds[0].split(",")))
    print(json.dumps(result))

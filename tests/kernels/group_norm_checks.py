"""Run by test_group_norm.py in a process of its own: prints its findings as one line of JSON."""

from __future__ import annotations

import json
import sys

import torch
import triton

from voxtune.kernels import group_norm as gn

# (batch, channels of each source, voxels, groups, shift, activation, residual): powers of two and not, seams inside groups,
# one group, one channel a group, odd counts of channels.
CASES = [
    (1, (64,), (4, 5, 6), 32, False, "silu", False),
    (2, (64,), (3, 3, 3), 32, True, "silu", True),
    (1, (192,), (2, 5, 3), 32, True, "none", False),
    (1, (128, 64), (3, 4, 5), 32, False, "silu", False),
    (2, (192, 128), (2, 2, 3), 32, True, "relu", True),
    (1, (256, 192), (2, 3, 2), 32, True, "silu", False),
    (1, (32,), (9, 7, 5), 32, False, "silu", False),
    (1, (96, 32), (3, 5, 2), 32, True, "gelu", True),
    (1, (7,), (5, 3, 2), 7, False, "silu", False),
    (1, (10, 5), (4, 3, 3), 3, True, "silu", False),
    (2, (96,), (8, 9), 1, True, "none", True),
    (1, (384,), (8, 8), 1, False, "none", False),
    (1, (64,), (1, 1, 1), 32, False, "silu", False),
    (1, (64,), (17, 13, 11), 32, True, "silu", False),
    (1, (320,), (3, 2, 5), 320, False, "leaky_relu", True),
    (2, (13,), (7, 5, 3), 13, True, "leaky_relu", False),
    (2, (24, 40), (5, 4, 6), 64, False, "prelu", True),
    (1, (33,), (6, 5, 4), 11, False, "prelu_one", False),
    (2, (136,), (4, 3, 5), 136, True, "gelu_tanh", False),
    (1, (1,), (9, 8, 7), 1, False, "gelu", True),
    (2, (72,), (5, 6), 8, False, "relu", False),
    (1, (600,), (3, 2, 2), 600, False, "none", True),
]
QUICK = (1, 9, 14, 15, 16, 17, 18)


def channels_last(x):
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def moments_of(source, stretch):
    """Count, mean and sum of squares about the mean of each stretch of voxels, in plain PyTorch: (N, P, 3, C)."""
    parts = source.double().flatten(2).split(stretch, dim=2)
    counts = [torch.full_like(p[..., 0], p.shape[2]) for p in parts]
    rows = [(n, p.mean(2), (p - p.mean(2, keepdim=True)).square().sum(2)) for n, p in zip(counts, parts, strict=True)]
    return torch.stack([torch.stack(row, dim=1) for row in rows], dim=1).float()


def case(dtype, batch, channels, voxels, groups, shift, activation, residual, offset=0.0, given=False):
    generator = torch.Generator().manual_seed(batch * 1000 + sum(channels))

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    total = sum(channels)
    sources = tuple(
        channels_last((draw(batch, c, *voxels) * 2 + offset + draw(1, c, *[1] * len(voxels))).to(dtype))
        for c in channels
    )
    weight, bias = draw(total).to(dtype), draw(total).to(dtype)
    # A slice of a wider tensor, as blocks' time embeddings are.
    shift_NC = draw(batch, total + 5).to(dtype)[:, 3 : total + 3] if shift else None
    added = channels_last(draw(batch, total, *voxels).to(dtype)) if residual else None
    slopes = draw(1 if activation == "prelu_one" else total).to(dtype) if activation.startswith("prelu") else None
    activation, slope = activation.removesuffix("_one"), 0.2

    def double(x):
        return None if x is None else x.double()

    truth = gn.norm_act_reference(
        *(tuple(s.double() for s in sources), weight.double(), bias.double(), groups, 1e-5, double(shift_NC)),
        *(activation, slope, double(slopes), double(added)),
    )
    # What a convolution would leave: other stretches than this kernel's own, for the last source only.
    known = [None] * (len(sources) - 1) + [moments_of(sources[-1], 7)] if given else None
    y = gn.norm_act(sources, weight, bias, groups, 1e-5, shift_NC, activation, slope, slopes, added, known)
    written = bool(torch.isfinite(y).all()) and y.movedim(1, -1).is_contiguous()
    return {
        "case": [batch, channels, voxels, groups, shift, activation, residual],
        "error": ((y.double() - truth).norm() / truth.norm()).item(),
        "written": written,
    }


def numerics(dtype, extent):
    # Poison what is not written: fresh memory is filled with NaN.
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    cases = [CASES[i] for i in QUICK] if extent == "quick" else CASES
    return [case(getattr(torch, dtype), *c, given=given) for c in cases for given in (False, True)]


def compile_all(arch):
    """Registers and spills of each kernel at the network's shapes, read off the cubin."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def build(kernel, signature, constants):
        keys = dict.fromkeys(constants, "constexpr")
        compiled = triton.compile(
            ASTSource(fn=kernel, signature={**signature, **keys}, constexprs=constants),
            target=GPUTarget("cuda", arch, 32),
            options={"num_warps": 8},
        )
        metadata = compiled.metadata
        return resources(compiled.asm["cubin"], metadata.name)

    found = []
    for dtype in ("*bf16", "*fp32"):
        moments = {"x_ptr": dtype, "statistics_ptr": "*fp32", "V": "i32", "CS": "i32", "stretch": "i32"}
        found.append(build(gn.voxtune_moments, moments, {"UNIT": 1, "BLOCK_V": 64, "BLOCK_C": 64}))
        pointers = {"x_ptr": dtype, "affine_ptr": "*fp32", "slopes_ptr": "*fp32", "residual_ptr": dtype, "y_ptr": dtype}
        numbers = {**dict.fromkeys(("V", "CS", "C", "first"), "i32"), "slope": "fp32", "slopes_stride": "i32"}
        for activation in gn.ACTIVATIONS if dtype == "*bf16" else ("silu",):
            for residual in (False, True):
                constants = {"ACTIVATION": activation, "HAS_RESIDUAL": residual, "UNIT": 8 if residual else 1}
                constants |= {"ROWS": 4 if residual else 2, "BLOCK_V": 64, "BLOCK_C": 64}
                found.append(build(gn.voxtune_normalize, pointers | numbers, constants))
    finalize = dict.fromkeys(("a_ptr", "b_ptr", "affine_ptr"), "*fp32")
    finalize |= dict.fromkeys(("shift_ptr", "weight_ptr", "bias_ptr"), "*bf16")
    finalize |= dict.fromkeys(("V", "C", "CA", "PA", "PB", "shift_stride"), "i32") | {"eps": "fp32"}
    finalize = {name: finalize[name] for name in gn.voxtune_finalize.arg_names if name in finalize}
    for group, columns in ((2, 64), (14, 448), (1, 32), (1, 320), (1, 1024)):
        block = gn.lanes(group, columns)
        constants = {
            "GROUP": group,
            "BLOCK_G": block,
            "BLOCK_P": min(2048, 4096 // block),
            "HAS_SHIFT": True,
            "ROWS": 4,
        }
        found.append(build(gn.voxtune_finalize, finalize, constants))
    return found


def resources(cubin, name):
    """What cuobjdump says of the kernel."""
    import re
    import subprocess
    import tempfile
    from pathlib import Path

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
    return {"name": name, "registers": int(registers), "spills": int(stack)}


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "numerics":
        result = numerics(*rest)
    elif what == "offset":
        result = case(torch.float32, 1, (64,), (9, 9, 9), 32, False, "silu", False, offset=1000.0)
    else:
        result = compile_all(int(rest[0]))
    print(json.dumps(result))

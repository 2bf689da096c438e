"""Checks of the elementwise kernel; test_elementwise.py runs them in a process of its own, test_gpu.py on a GPU."""

from __future__ import annotations

import json
import random
import re
import sys

import torch

from voxtune.kernels import elementwise as kernels
from voxtune.kernels.elementwise_program import OPERATIONS, elementwise_reference

# Programs of one step, where they are not the operation of one input.
SINGLE = {
    "add": ["add 0 1", "add 0 0.3", "add -2.5 0"],
    "sub": ["sub 0 1", "sub 0 0.3", "sub 1.0 0"],
    "mul": ["mul 0 1", "mul 0 0.7071", "mul 2.0 0"],
    "div": ["div 0 1", "div 0 3.0", "div 3.0 0"],
    "maximum": ["maximum 0 1", "maximum 0 -0.5", "maximum 0.5 0"],
    "minimum": ["minimum 0 1", "minimum 0 1.25", "minimum 0.5 0"],
    "leaky_relu": ["leaky_relu 0 0.01", "leaky_relu 0 -0.5"],
    "elu": ["elu 0 1.0 1.0 1.0", "elu 0 1.6732632423543772 1.0507009873554805 1.0", "elu 0 0.5 1.0 2.0"],
    "softplus": ["softplus 0 1.0 20.0", "softplus 0 2.5 6.0"],
}
POSITIVE = ("log", "sqrt", "rsqrt", "reciprocal", "div")
# Results are compared where they do not overflow half precision.
SCALE = {"exp": 1.5, "cube": 2.0, "reciprocal": 1.0, "div": 1.0, "rsqrt": 1.0}
# (program, shapes of the inputs, dtypes other than the checked one by index)
CHAINS = [
    ("sigmoid 1; mul 0 3; add 4 2; mul 5 0.7071", [(1, 48, 4, 5, 6)] * 3, {}),
    ("gelu 1; mul 0 2", [(2, 7, 40)] * 2, {}),
    ("add 0 1; gelu 2", [(2, 24, 5, 7), (1, 24, 1, 1)], {1: torch.float32}),
    ("sigmoid 0; mul 2 1", [(2, 1, 3, 4, 5), (2, 16, 3, 4, 5)], {}),
    ("mul 0 1; add 3 2; silu 4", [(2, 20, 3, 5), (2, 20, 1, 1), (20, 1, 1)], {1: torch.float32, 2: torch.float32}),
    ("mul 0 2; add 3 1", [(3, 4), (), ()], {1: torch.float32}),
    ("add 0 1; add 8 2; add 9 3; add 10 4; add 11 5; add 12 6; mul 13 7", [(1, 8, 4, 4)] * 8, {3: torch.float32}),
    ("add 0 0; mul 1 1", [(1,)], {}),
    ("add 0 1; tanh 2", [(1, 5, 300, 3)] * 2, {}),
]


def draw(shape, dtype, device, seed, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(device, dtype)


def laid(x, layout, seed):
    """The same values in another layout: channels-last, a slice of a wider tensor, dimensions in any order."""
    rng = random.Random(f"{seed} {layout}")
    rank = x.dim()
    if rank < 2 or layout == "contiguous":
        return x
    if layout == "last":
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "slices":  # of the channels of a channels-last volume
        first, width = (8, 24) if x.shape[1] % 8 == 0 else (3, 7)
        wide = x.new_full((x.shape[0], *x.shape[2:], x.shape[1] + width), 99.0)
        part = wide[..., first : first + x.shape[1]].movedim(-1, 1)
        return part.copy_(x)
    if layout == "offset":  # not aligned
        flat = x.new_empty(x.numel() + 1)[1:].view(x.shape)
        return flat.copy_(x)
    assert layout == "any"
    order = rng.sample(range(rank), rank)
    base = x.new_full([x.shape[d] + rng.choice((0, 2)) for d in order], 99.0)
    part = base.permute([order.index(d) for d in range(rank)])
    return part[tuple(slice(0, s) for s in x.shape)].copy_(x)


def finding(program, inputs, dtype):
    assert kernels.why_not(inputs, program, dtype) is None
    truth = elementwise_reference([x.double() for x in inputs], program, torch.float64)
    y = kernels.elementwise(inputs, program, dtype)
    plain = elementwise_reference(inputs, program, dtype)
    return {
        "case": [program, str(dtype), *(f"{tuple(x.shape)} {x.stride()}" for x in inputs)],
        "error": ((y.double() - truth).norm() / truth.norm().clamp_min(1e-30)).item(),
        "written": bool(torch.isfinite(y).all()) and y.shape == truth.shape,
        "as_pytorch": _strides(y) == _strides(plain),
        "type": str(y.dtype),
    }


def _strides(x):
    return [st for st, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def singles():
    """(operation, program of one step, number of inputs)"""
    for name in OPERATIONS:
        for program in SINGLE.get(name, [f"{name} 0"]):
            yield name, program, len({word for word in program.split() if word.isdigit()})


def operations(dtype, device):
    """Each operation once, on the values that it is defined for."""
    for name, program, count in singles():
        inputs = [draw((3, 40, 7), dtype, device, i, SCALE.get(name, 3.0)) for i in range(count)]
        if name in POSITIVE:
            inputs = [x.abs() + 0.25 for x in inputs]
        yield finding(program, inputs, dtype)


def chains(dtype, device):
    for seed, (program, shapes, types) in enumerate(CHAINS):
        for layout in ("contiguous", "last", "slices", "offset", "any"):
            inputs = [
                laid(draw(shape, types.get(i, dtype), device, 10 * seed + i, 1.0), layout, seed)
                for i, shape in enumerate(shapes)
            ]
            yield finding(program, inputs, dtype)
            mixed = [laid(x, ("last", "contiguous", "slices")[i % 3], seed) for i, x in enumerate(inputs)]
            yield finding(program, mixed, torch.float32 if seed % 2 else dtype)


def special(device, limit=3e-6):
    """Infinite values and NaN, values near zero and large ones, against PyTorch in float32."""
    small = [1e-7, 1e-4, 0.1, 0.39, 0.41, 1.0, 9.0, 30.0, 88.0]
    x = torch.tensor([0.0, float("nan"), float("inf"), -float("inf"), *small, *(-v for v in small)], device=device)
    for _, program, count in singles():
        if count > 1:
            continue
        truth = elementwise_reference([x.double()], program, torch.float64).float()
        y = kernels.elementwise([x], program, torch.float32)
        alike = torch.isclose(y, truth, rtol=limit, atol=1e-12, equal_nan=True)
        wrong = [(a, b, c) for a, b, c, d in zip(x.tolist(), y.tolist(), truth.tolist(), alike, strict=True) if not d]
        yield {"program": program, "wrong": wrong}


def wide(device):
    """Offsets of 64 bits, on small tensors."""
    kernels.launch_of.cache_clear()
    before, kernels.WIDE_FROM = kernels.WIDE_FROM, 1
    try:
        found = list(chains(torch.float32, device))
        assert kernels.launch_of("neg 0", ((3,),), ((1,),)).wide
    finally:
        kernels.WIDE_FROM = before
        kernels.launch_of.cache_clear()
    return found


def every_operation():
    """A program of two inputs with each operation once, and the sum of their results."""
    steps = [next(p for name, p, _ in singles() if name == operation) for operation in OPERATIONS]
    total = 2
    for index in range(1, len(OPERATIONS)):
        steps.append(f"add {total} {2 + index}")
        total = len(steps) + 1
    return "; ".join(steps)


def compile_all(arch):
    from voxtune.kernels.compiled import compiled

    def last(*shape):
        return torch.empty(*shape, device="meta").to(memory_format=torch.channels_last_3d)

    both, volume = last(1, 96, 96, 96, 96), last(1, 48, 96, 96, 96)
    halves, column = [both[:, :48], both[:, 48:]], torch.empty(48, 1, 1, 1, device="meta")
    gate = "sigmoid 1; mul 0 3; add 2 4; mul 5 0.7071"
    cases = [
        (gate, [*halves, volume], ["bf16"] * 3, "bf16"),
        (gate, [volume] * 3, ["bf16", "fp32", "bf16"], "bf16"),
        ("add 0 1; gelu 2", [volume, column], ["bf16", "fp32"], "bf16"),
        ("mul 0 1; elu 2 1.0 1.0 1.0", [volume] * 2, ["fp32"] * 2, "fp32"),
        (every_operation(), [volume] * 2, ["bf16"] * 2, "bf16"),
    ]
    found = []
    for program, inputs, types, result in cases:
        launch = kernels.launch_of(program, tuple(tuple(x.shape) for x in inputs), tuple(x.stride() for x in inputs))
        kernel = kernels.kernel_of(program, launch.dimensions, launch.modes)
        signature = {f"x{i}_ptr": f"*{t}" for i, t in enumerate(types)} | {"y_ptr": f"*{result}"}
        signature |= {name: "i32" for name in kernel.arg_names if name not in signature and not name.isupper()}
        constants = {"WIDE": launch.wide, "UNIT": launch.unit, "ROWS": launch.rows}
        binary = compiled(kernel, signature, constants, arch=arch, warps=4)
        moves = re.findall(r"(?:ld|st)\.global[\w.:]*", binary.ptx)
        found.append(
            {
                "program": program,
                "spills": binary.spills,
                "registers": binary.registers,
                "moves": moves,
                "narrow": [move for move in moves if "v4" not in move],
            }
        )
    return found


def main(what, *given):
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    if what == "compile":
        return compile_all(int(given[0]))
    if what in ("special", "wide"):
        return list({"special": special, "wide": wide}[what]("cpu"))
    return list({"operations": operations, "chains": chains}[what](getattr(torch, given[0]), "cpu"))


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))

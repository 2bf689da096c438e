"""Any chain of elementwise operators in one kernel, generated from its program (elementwise_program.py).

Why: PyTorch runs sigmoid, mul, add, mul as four kernels, each of which reads and writes whole volumes; on slices of the channels,
as in gates, with a strided copy each. All of these are bound by memory: in one kernel each input is read once, where it lies, and
the result is written once.

Dimensions that are adjacent in all tensors are merged; few remain. The result is written in the order of its memory, in units of
up to 8 elements of its innermost dimension, so that a thread loads and stores 16 bytes, and divides an index once for a unit.

Legend: UNIT elements, ROWS units in a program; d0, d1, ... index of the merged dimensions, outermost first, the last in units.
Modes of an input along the innermost dimension: c contiguous, s strided, b broadcast; 1: one number for all elements.
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import gcd, prod
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from voxtune.kernels.elementwise_program import (
    MAX_INPUTS,
    Instruction,
    Sizes,
    elementwise_reference,
    expanded,
    parse,
    result_layout,
    text_of,
)
from voxtune.kernels.group_norm import TYPES, activate  # noqa: F401 - generated kernels call activate
from voxtune.kernels.precompile import ready

__all__ = ["elementwise", "elementwise_reference", "kernel_of", "why_not"]

PREFIX = "voxtune_elementwise_"
MAX_DIMENSIONS = 5
# Elements of a program; fewer where there would be less than two programs for each multiprocessor of a large GPU.
BLOCK, SMALL_BLOCK, ENOUGH = 1024, 256, 264
# Offsets from here on take 64 bits.
WIDE_FROM = 2**31


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def expm1(x):
    # The series near zero, where exp(x) - 1 cancels.
    series = x * (1.0 / 720.0 + x * (1.0 / 5040.0))
    series = x * (1.0 / 6.0 + x * (1.0 / 24.0 + x * (1.0 / 120.0 + series)))
    return tl.where(tl.abs(x) < 0.4, x * (1.0 + x * 0.5 + x * series), tl.exp(x) - 1.0)


@triton.jit
def tanh(x):
    t = expm1(-2.0 * tl.abs(x))
    y = t / (2.0 + t)
    return tl.where(x < 0.0, y, -y)


@triton.jit
def elu(x, alpha, scale, input_scale):
    return tl.where(x > 0.0, x * scale, expm1(x * input_scale) * (alpha * scale))


@triton.jit
def softplus(x, beta, threshold):
    e = tl.exp(x * beta)
    u = 1.0 + e
    # log(1 + e) with the rounding of 1 + e taken back.
    y = tl.where(u == 1.0, e, tl.log(u) * (e / (u - 1.0)))
    return tl.where(x * beta > threshold, x, y / beta)


@triton.jit
def mish(x):
    # tanh(log(1 + e)) = n / (n + 2), n = e (e + 2)
    e = tl.exp(tl.where(x > 20.0, 0.0, x))
    n = e * (e + 2.0)
    return tl.where(x > 20.0, x, x * n / (n + 2.0))


@cache
def kernel_of(program: str, dimensions: int, modes: str) -> Any:
    """The kernel of a program, for inputs of these modes."""
    steps = parse(program, len(modes))
    if not 1 <= dimensions <= MAX_DIMENSIONS or set(modes) - set("csb1"):
        raise ValueError(f"{dimensions} dimensions, modes {modes[:20]!r}")
    # The canonical text, which contains nothing but operations and numbers.
    key = f"{dimensions} {modes} {text_of(steps)}"
    name = PREFIX + hashlib.sha256(key.encode()).hexdigest()[:16]
    source = _source(name, steps, dimensions, modes)
    file = f"<{name}>"
    # Triton reads the source through inspect.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope: dict[str, Any] = {}
    exec(compile(source, file, "exec"), globals(), scope)
    function = scope[name]
    # Another process finds the kernel by this name: see __getattr__.
    function.lookup_name = PREFIX + key.encode().hex()
    return triton.jit(function, do_not_specialize=list(_integers(dimensions, modes)))


def __getattr__(name: str) -> Any:
    """Kernels by the name that encodes their program: a worker process looks them up to compile them."""
    if name.startswith(PREFIX):
        try:
            dimensions, modes, program = bytes.fromhex(name.removeprefix(PREFIX)).decode("ascii").split(" ", 2)
            return kernel_of(program, int(dimensions), modes)
        except ValueError as error:
            raise AttributeError(f"{name[:80]} names no kernel: {error}") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _integers(dimensions: int, modes: str) -> list[str]:
    """Names of a kernel's run-time sizes and strides, in the order of its arguments."""
    names = ["units", *(f"size{d}" for d in range(1, dimensions))]
    for k, mode in enumerate(modes):
        if mode != "1":
            names += [f"stride{k}_{d}" for d in range(dimensions - 1)] + ([f"step{k}"] if mode == "s" else [])
    return names


def _source(name: str, steps: Sequence[Instruction], dimensions: int, modes: str) -> str:
    last = dimensions - 1
    pointers = [*(f"x{k}_ptr" for k in range(len(modes))), "y_ptr"]
    arguments = [*pointers, *_integers(dimensions, modes), *(f"{c}: tl.constexpr" for c in ("WIDE", "UNIT", "ROWS"))]
    lines = ["row = tl.program_id(0)", "if WIDE:", "    row = row.to(tl.int64)"]
    lines += ["row = row * ROWS + tl.arange(0, ROWS)", "inside = (row < units)[:, None]"]
    lines += ["lane = tl.arange(0, UNIT)[None, :]", "d0 = row"]
    for d in range(last, 0, -1):
        lines += [f"d{d} = d0 % size{d}", f"d0 = d0 // size{d}"]
    for k, mode in enumerate(modes):
        lines.append(f"v{k} = {_load(k, mode, last)}.to(tl.float32)")
    for index, step in enumerate(steps):
        operands = [f"v{x}" if isinstance(x, int) else f"({x!r})" for x in step.operands]
        numbers = [f"({x!r})" for x in step.numbers]
        lines.append(f"v{len(modes) + index} = {step.operation.expression.format(*operands, *numbers)}")
    lines.append(f"y = tl.broadcast_to(v{len(modes) + len(steps) - 1}, (ROWS, UNIT)).to(y_ptr.dtype.element_ty)")
    lines.append("tl.store(y_ptr + (row * UNIT)[:, None] + lane, y, mask=inside)")
    return f"def {name}({', '.join(arguments)}):\n" + "".join(f"    {line}\n" for line in lines)


def _load(k: int, mode: str, last: int) -> str:
    if mode == "1":
        return f"tl.load(x{k}_ptr)"
    terms = [f"d{d} * stride{k}_{d}" for d in range(last)]
    if mode == "b":
        return f"tl.load(x{k}_ptr + ({' + '.join(terms)})[:, None], mask=inside, other=0.0)"
    if mode == "s":
        along = [*terms, f"d{last} * UNIT * step{k}"]
        return f"tl.load(x{k}_ptr + ({' + '.join(along)})[:, None] + lane * step{k}, mask=inside, other=0.0)"
    along = [*terms, f"d{last}"]
    return f"tl.load(x{k}_ptr + (({' + '.join(along)}) * UNIT)[:, None] + lane, mask=inside, other=0.0)"


@dataclass(frozen=True)
class ElementwiseLaunch:
    """How a program runs on tensors of certain shapes and strides."""

    shape: Sizes
    strides: Sizes
    dimensions: int
    modes: str
    integers: Sizes
    unit: int
    rows: int
    wide: bool


@lru_cache(maxsize=4096)
def launch_of(program: str, shapes: tuple[Sizes, ...], strides: tuple[Sizes, ...]) -> ElementwiseLaunch:
    shape, result = result_layout(program, shapes, strides)
    given = [expanded(s, st, shape) for s, st in zip(shapes, strides, strict=True)]
    sizes, along = _merged(shape, result, given)
    modes = "".join(_mode(st) for st in along)
    last = len(sizes) - 1
    aligned = gcd(sizes[last], *(x for st, mode in zip(along, modes, strict=True) if mode == "c" for x in st[:last]))
    unit = next(u for u in (8, 4, 2, 1) if aligned % u == 0)
    integers = [prod(sizes) // unit, *sizes[1:last], *([sizes[last] // unit] if last else [])]
    for st, mode in zip(along, modes, strict=True):
        if mode != "1":
            integers += [x // unit if mode == "c" else x for x in st[:last]] + ([st[last]] if mode == "s" else [])
    block = BLOCK if prod(sizes) >= ENOUGH * BLOCK else SMALL_BLOCK
    furthest = max(sum((n - 1) * x for n, x in zip(sizes, st, strict=True)) for st in along)
    wide = max(furthest, prod(sizes)) + block >= WIDE_FROM
    return ElementwiseLaunch(shape, result, len(sizes), modes, tuple(integers), unit, block // unit, wide)


def _merged(shape: Sizes, result: Sizes, given: list[Sizes]) -> tuple[list[int], list[Sizes]]:
    """Sizes of the merged dimensions, in the order of the result's memory, and each input's strides along them."""
    order = sorted((d for d, size in enumerate(shape) if size != 1), key=lambda d: -result[d])
    if not order:
        return [1], [(1,) for _ in given]
    groups = [[order[0]]]
    for dim in order[1:]:
        if all(st[groups[-1][-1]] == st[dim] * shape[dim] for st in given):
            groups[-1].append(dim)
        else:
            groups.append([dim])
    return [prod(shape[d] for d in group) for group in groups], [tuple(st[g[-1]] for g in groups) for st in given]


def _mode(strides: Sizes) -> str:
    if not any(strides):
        return "1"
    return {1: "c", 0: "b"}.get(strides[-1], "s")


def why_not(inputs: Sequence[Tensor], program: str, dtype: torch.dtype) -> str | None:
    """The reason why the kernel does not apply, or None."""
    if len(inputs) > MAX_INPUTS:
        return f"{len(inputs)} inputs: up to {MAX_INPUTS} are supported"
    unknown = next((t for t in (*(x.dtype for x in inputs), dtype) if t not in TYPES), None)
    if unknown is not None:
        return f"type {unknown} has no kernel"
    if any(x.device != inputs[0].device for x in inputs):
        return "inputs on several devices"
    launch = launch_of(program, *_forms(inputs))
    if launch.dimensions > MAX_DIMENSIONS:
        return f"{launch.dimensions} dimensions that cannot be merged: up to {MAX_DIMENSIONS} are supported"
    return "an empty result" if 0 in launch.shape else None


def _forms(inputs: Sequence[Tensor]) -> tuple[tuple[Sizes, ...], tuple[Sizes, ...]]:
    return tuple(tuple(x.shape) for x in inputs), tuple(x.stride() for x in inputs)


def empty_result(inputs: Sequence[Tensor], program: str, dtype: torch.dtype) -> Tensor:
    shape, strides = result_layout(program, *_forms(inputs))
    return torch.empty_strided(shape, strides, dtype=dtype, device=inputs[0].device)


def elementwise(inputs: Sequence[Tensor], program: str, dtype: torch.dtype, *, checked: bool = False) -> Tensor:
    """The program by one kernel; `why_not` must be None.

    `checked`: the caller has called `why_not`.
    """
    assert checked or (reason := why_not(inputs, program, dtype)) is None, reason
    launch = launch_of(program, *_forms(inputs))
    y = torch.empty_strided(launch.shape, launch.strides, dtype=dtype, device=inputs[0].device)
    kernel = kernel_of(program, launch.dimensions, launch.modes)
    ready(kernel)[(triton.cdiv(launch.integers[0], launch.rows),)](
        *inputs, y, *launch.integers, WIDE=launch.wide, UNIT=launch.unit, ROWS=launch.rows, num_warps=4
    )
    return y

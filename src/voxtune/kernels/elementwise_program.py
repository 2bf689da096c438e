"""Chains of elementwise operators as text: a small strict language, its reference in plain PyTorch, the layout of its result.

A program is steps separated by semicolons: "sigmoid 1; mul 0 2; mul 3 0.7071". A whole number is a value: of n inputs, 0 to
n - 1; the first step's result is n, the next one's n + 1; the last step is the result. A number with a point or an exponent is a
constant. Each value is used. A program may come from a file: it is parsed into the operations below and finite numbers, and
nothing else is accepted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

MAX_INPUTS, MAX_STEPS = 8, 64
_VALUE = re.compile(r"[0-9]{1,3}", re.ASCII)
# As Python writes a float.
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+(e[+-]?[0-9]+)?|e[+-]?[0-9]+)", re.ASCII)
# Constants are float32; smaller ones would be flushed to zero on some devices.
_SMALLEST, _LARGEST = 2.0**-126, 3.4e38


@dataclass(frozen=True)
class Operation:
    """Its reference, and the expression of the kernel, with a place for each operand and number.

    Of two operands one may be a constant.
    """

    operands: int
    reference: Callable[..., Any]
    expression: str
    numbers: int = 0


def _one(reference: Callable[..., Any], expression: str, numbers: int = 0) -> Operation:
    return Operation(1, reference, expression, numbers)


def _two(reference: Callable[..., Any], expression: str) -> Operation:
    return Operation(2, reference, expression)


def _tensors(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    """For operators that take no plain number."""

    def call(a: Any, b: Any) -> Tensor:
        like = a if isinstance(a, Tensor) else b
        return function(*(x if isinstance(x, Tensor) else like.new_full((), x) for x in (a, b)))

    return call


def _elu(x: Tensor, alpha: float, scale: float, input_scale: float) -> Tensor:
    return torch.where(x > 0, x * scale, torch.expm1(x * input_scale) * (alpha * scale))


# Functions of the expressions are those of elementwise.py.
OPERATIONS: dict[str, Operation] = {
    "add": _two(lambda a, b: a + b, "{} + {}"),
    "sub": _two(lambda a, b: a - b, "{} - {}"),
    "mul": _two(lambda a, b: a * b, "{} * {}"),
    "div": _two(lambda a, b: a / b, "{} / {}"),
    "maximum": _two(_tensors(torch.maximum), "larger({}, {})"),
    "minimum": _two(_tensors(torch.minimum), "smaller({}, {})"),
    "neg": _one(torch.neg, "-{}"),
    "abs": _one(torch.abs, "tl.abs({})"),
    "exp": _one(torch.exp, "tl.exp({})"),
    "log": _one(torch.log, "tl.log({})"),
    "sqrt": _one(torch.sqrt, "tl.sqrt({})"),
    "rsqrt": _one(torch.rsqrt, "tl.rsqrt({})"),
    "reciprocal": _one(torch.reciprocal, "1.0 / {}"),
    "square": _one(torch.square, "{0} * {0}"),
    "cube": _one(lambda x: x * x * x, "{0} * {0} * {0}"),
    "sigmoid": _one(torch.sigmoid, "1.0 / (1.0 + tl.exp(-{}))"),
    "tanh": _one(torch.tanh, "tanh({})"),
    "silu": _one(F.silu, "activate({}, 0.0, 'silu')"),
    "relu": _one(torch.relu, "activate({}, 0.0, 'relu')"),
    "gelu": _one(F.gelu, "activate({}, 0.0, 'gelu')"),
    "gelu_tanh": _one(lambda x: F.gelu(x, approximate="tanh"), "activate({}, 0.0, 'gelu_tanh')"),
    "mish": _one(F.mish, "mish({})"),
    "leaky_relu": _one(F.leaky_relu, "activate({}, {}, 'leaky_relu')", numbers=1),
    # alpha, scale, input scale
    "elu": _one(_elu, "elu({}, {}, {}, {})", numbers=3),
    # beta, threshold
    "softplus": _one(F.softplus, "softplus({}, {}, {})", numbers=2),
}


@dataclass(frozen=True)
class Instruction:
    """`operands` are values (int) or constants (float)."""

    name: str
    operands: tuple[int | float, ...]
    numbers: tuple[float, ...] = ()

    @property
    def operation(self) -> Operation:
        return OPERATIONS[self.name]

    @property
    def values(self) -> tuple[int, ...]:
        return tuple(x for x in self.operands if isinstance(x, int))

    def __str__(self) -> str:
        return " ".join([self.name, *(repr(x) for x in (*self.operands, *self.numbers))])


@lru_cache(maxsize=1024)
def parse(program: str, inputs: int) -> tuple[Instruction, ...]:
    """The steps of a program for a number of inputs; ValueError for anything that is not one."""
    parts = [part.split() for part in program.split(";")]
    if not 1 <= inputs <= MAX_INPUTS or len(parts) > MAX_STEPS:
        raise ValueError(f"{inputs} inputs and {len(parts)} steps: up to {MAX_INPUTS} and {MAX_STEPS} are supported")
    steps = tuple(_step(words, inputs + index) for index, words in enumerate(parts))
    unused = set(range(inputs + len(steps) - 1)) - {value for step in steps for value in step.values}
    if unused:
        raise ValueError(f"the program does not use value {min(unused)}")
    return steps


def _step(words: list[str], known: int) -> Instruction:
    operation = OPERATIONS.get(words[0]) if words else None
    if operation is None:
        raise ValueError(f"{' '.join(words)[:80]!r} is not an elementwise operation")
    given = [_operand(word, known) for word in words[1:]]
    values, numbers = given[: operation.operands], given[operation.operands :]
    if len(given) != operation.operands + operation.numbers or any(isinstance(x, int) for x in numbers):
        raise ValueError(
            f"{' '.join(words)[:80]!r}: {operation.operands} operands and {operation.numbers} numbers are required"
        )
    if not any(isinstance(x, int) for x in values):
        raise ValueError(f"{' '.join(words)[:80]!r} has no value")
    return Instruction(words[0], tuple(values), tuple(map(float, numbers)))


def _operand(word: str, known: int) -> int | float:
    if _VALUE.fullmatch(word):
        if int(word) >= known:
            raise ValueError(f"value {word} is used before it is computed")
        return int(word)
    if len(word) > 40 or not _NUMBER.fullmatch(word) or not is_constant(float(word)):
        raise ValueError(f"{word[:40]!r} is not a number")
    return float(word)


def is_constant(number: float) -> bool:
    """Whether a number can be a constant of a program."""
    return number == 0 or (math.isfinite(number) and _SMALLEST <= abs(number) <= _LARGEST)


def text_of(steps: Sequence[Instruction]) -> str:
    return "; ".join(map(str, steps))


def elementwise_reference(inputs: Sequence[Tensor], program: str, dtype: torch.dtype) -> Tensor:
    """The program in plain PyTorch, in float32 or wider, rounded once to `dtype`."""
    wide = torch.float32
    for x in inputs:
        wide = torch.promote_types(wide, x.dtype)
    values: list[Any] = [x.to(wide) for x in inputs]
    for step in parse(program, len(inputs)):
        operands = (values[x] if isinstance(x, int) else x for x in step.operands)
        values.append(step.operation.reference(*operands, *step.numbers))
    return values[-1].to(dtype)


Sizes = tuple[int, ...]


@lru_cache(maxsize=4096)
def result_layout(program: str, shapes: tuple[Sizes, ...], strides: tuple[Sizes, ...]) -> tuple[Sizes, Sizes]:
    """Shape and strides of the result: as if PyTorch ran the operators one by one."""
    forms = list(zip(shapes, strides, strict=True))
    for step in parse(program, len(shapes)):
        forms.append(_layout([forms[value] for value in step.values]))
    return forms[-1]


def _layout(operands: list[tuple[Sizes, Sizes]]) -> tuple[Sizes, Sizes]:
    """The dense result of one operator: PyTorch orders its dimensions as the first operand that decides orders its own."""
    shape = tuple(torch.broadcast_shapes(*(s for s, _ in operands)))
    rank = len(shape)
    given = [expanded(s, st, shape) for s, st in operands]
    same = [s for s, _ in operands if s == shape]
    if len(same) == len(operands) and all(_is_dense(shape, st, range(rank)) for st in given):
        return shape, dense(shape, range(rank))
    channels_last = (0, *range(2, rank), 1)
    if len(same) == len(operands) and rank in (4, 5) and all(_is_dense(shape, st, channels_last) for st in given):
        return shape, dense(shape, channels_last)
    # Insertion sort, the innermost dimension first: the comparison is not transitive, so the algorithm matters.
    order = list(range(rank))[::-1]
    for start in range(1, rank):
        place = start
        for other in range(start - 1, -1, -1):
            swap = _should_swap(order[other], order[place], shape, given)
            if swap > 0:
                order[other], order[place] = order[place], order[other]
                place = other
            elif swap < 0:
                break
    return shape, dense(shape, order[::-1])


def _should_swap(inner: int, outer: int, shape: Sizes, strides: list[Sizes]) -> int:
    for given in strides:
        a, b = given[inner], given[outer]
        if a == 0 or b == 0:
            continue
        if a != b:
            return 1 if a > b else -1
        if shape[inner] > shape[outer]:
            return 1
    return 0


def expanded(shape: Sizes, strides: Sizes, target: Sizes) -> Sizes:
    """Strides of a tensor expanded to `target`."""
    missing = len(target) - len(shape)
    kept = (0 if s == 1 and t != 1 else st for s, st, t in zip(shape, strides, target[missing:], strict=True))
    return (*[0] * missing, *kept)


def dense(shape: Sizes, order: Sequence[int]) -> Sizes:
    """Strides of a tensor without gaps; `order` lists its dimensions from the outermost to the innermost."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(1, shape[dim])
    return tuple(strides)


def _is_dense(shape: Sizes, strides: Sizes, order: Sequence[int]) -> bool:
    return all(s == 1 or a == b for s, a, b in zip(shape, strides, dense(shape, order), strict=True))

"""A restricted interpreter for pickles of untrusted files: plain values, and objects of named functions only.

A pickle is a program. This interpreter executes only the opcodes that files of data require, calls only the functions that
the caller names, and allocates nothing before the bytes are there.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from typing import Any

from voxtune.errors import InputError

# An empty list takes one byte in the file and 56 in memory; the largest published checkpoints have 50,000 opcodes.
MAX_OPCODES = 2**20
# Longer whole numbers, such as hashes, are no data of a checkpoint.
MAX_INT_BITS = 128
# A call may copy its arguments, and one tuple can be the arguments of many calls.
MAX_ARGUMENTS = 20
KEYS = (str, bytes, int, float, bool, type(None))
REFUSED = "which is not allowed; nothing was executed"

# (module, name) in the pickle -> a function to call with the arguments in the pickle, or a value.
Names = Mapping[tuple[str, str], Any]


class StandIn:
    """Stores the arguments and the state of an object in the file, instead of the object."""

    __slots__ = ("arguments", "state")

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None


class Interpreter:
    """`stored` returns the value of a persistent id, such as the storage of a tensor; None: the pickle has none."""

    def __init__(self, names: Names, stored: Callable[[Any], Any] | None = None) -> None:
        self.names, self.stored = names, stored
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> tuple[Any, int]:
        """The object in `data`, and the number of bytes up to the end of its pickle."""
        for count, (opcode, argument, place) in enumerate(pickletools.genops(data)):
            if count >= MAX_OPCODES:
                raise InputError(f"this pickle has more than {MAX_OPCODES} opcodes, {REFUSED}")
            if opcode.name == "STOP":
                return self.stack.pop(), (place or 0) + 1
            action = ACTIONS.get(opcode.name)
            if action is None:
                raise InputError(f"this pickle uses {opcode.name}, {REFUSED}")
            action(self, argument)
        raise EOFError("no end of the pickle")

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def number(self, value: int) -> None:
        if value.bit_length() > MAX_INT_BITS:
            raise InputError(f"this pickle has a number of {value.bit_length()} bits, {REFUSED}")
        self.push(value)

    def mark(self, _: Any) -> None:
        self.marks.append(len(self.stack))

    def marked(self) -> list[Any]:
        """Removes and returns the values after the last mark."""
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def last(self, count: int) -> list[Any]:
        if len(self.stack) < count + (self.marks[-1] if self.marks else 0):
            raise EOFError("missing values")
        values = self.stack[-count:]
        del self.stack[-count:]
        return values

    def remember(self, number: int | None) -> None:
        self.memo[len(self.memo) if number is None else number] = self.stack[-1]

    def append(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise TypeError(f"values appended to a {type(target).__name__}")
        target.extend(values)

    def set_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise TypeError(f"items set in a {type(target).__name__}")
        for key, value in zip(values[::2], values[1::2], strict=True):
            # Hashing deeply nested tuples takes for ever, or crashes the process.
            if not isinstance(key, (*KEYS, StandIn)):
                raise InputError(f"this pickle has a key of type {type(key).__name__}, {REFUSED}")
            target[key] = value

    def named(self, text: str) -> None:
        module, _, name = text.partition(" ")
        self.find(module, name)

    def named_on_stack(self, _: Any) -> None:
        module, name = self.last(2)
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a name that is not text")
        self.find(module, name)

    def find(self, module: str, name: str) -> None:
        if (module, name) not in self.names:
            raise InputError(f"this pickle refers to {f'{module}.{name}'[:80]!r}, {REFUSED}")
        self.push(self.names[module, name])

    def call(self, _: Any) -> None:
        function, arguments = self.last(2)
        # Plain values and stand-ins are not callable: a function is one of the caller's.
        if not callable(function) or not isinstance(arguments, tuple):
            raise TypeError(f"a call of a {type(function).__name__}")
        if len(arguments) > MAX_ARGUMENTS:
            raise InputError(f"this pickle has a call with {len(arguments)} arguments, {REFUSED}")
        self.push(function(*arguments))

    def set_state(self, _: Any) -> None:
        target, state = self.last(2)
        if isinstance(target, StandIn):
            target.state = state
        elif not isinstance(target, dict):  # of an ordered dictionary, the attributes do not matter
            raise TypeError(f"attributes of a {type(target).__name__}")
        self.push(target)

    def persistent(self, _: Any) -> None:
        if self.stored is None:
            raise InputError(f"this pickle refers to data outside of it, {REFUSED}")
        self.push(self.stored(*self.last(1)))


def _same(machine: Interpreter, argument: Any) -> None:
    machine.push(argument)


ACTIONS: dict[str, Callable[[Interpreter, Any], None]] = {
    "PROTO": lambda machine, _: None,
    "FRAME": lambda machine, _: None,
    "MARK": Interpreter.mark,
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1"), Interpreter.number),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"), _same),
    # Text of Python 2, which pickletools decodes as Latin-1.
    **dict.fromkeys(("BINFLOAT", "BYTEARRAY8", "BINSTRING", "SHORT_BINSTRING"), _same),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.marked())),
    "TUPLE1": lambda machine, _: machine.push(tuple(machine.last(1))),
    "TUPLE2": lambda machine, _: machine.push(tuple(machine.last(2))),
    "TUPLE3": lambda machine, _: machine.push(tuple(machine.last(3))),
    "APPEND": lambda machine, _: machine.append(machine.last(1)),
    "APPENDS": lambda machine, _: machine.append(machine.marked()),
    "SETITEM": lambda machine, _: machine.set_items(machine.last(2)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.marked()),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), Interpreter.remember),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda machine, number: machine.push(machine.memo[number])),
    "GLOBAL": Interpreter.named,
    "STACK_GLOBAL": Interpreter.named_on_stack,
    "REDUCE": Interpreter.call,
    "BUILD": Interpreter.set_state,
    "BINPERSID": Interpreter.persistent,
}

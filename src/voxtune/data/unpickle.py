"""Pickles of people we do not know, as far as a file of plain values and byte arrays needs them.

A pickle is a program. Two fences stand around it: only the instructions that such a file needs are run at all, and every
name that it asks for is one of a few stand-ins, which keep what they are given and do nothing. NumPy itself never sees a
file's values before they have been checked.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from typing import Any

import numpy as np

from voxtune.errors import InputError
from voxtune.files import one_line

# Containers, text, bytes and whole numbers; arrays are made by GLOBAL or STACK_GLOBAL, REDUCE and BUILD.
OPCODES = frozenset({
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "EMPTY_LIST",
    "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
    "BINSTRING", "SHORT_BINSTRING", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
    "BYTEARRAY8", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET", "GLOBAL", "STACK_GLOBAL", "REDUCE",
    "BUILD",
})  # fmt: skip
# An empty list is one byte here and 56 in memory; a batch of 10,000 images takes 30,000 instructions.
MAX_OPCODES = 2**19
# The interpreter makes room for every number up to the one named: a file of 20 bytes could ask for gigabytes.
MAX_MEMO = 2**20
# Hashing a tuple inside a tuple inside a tuple, ten thousand deep, ends the process; an array takes six.
MAX_TUPLES = 100


class StandIn:
    """Keeps what the file gives it. `__setstate__` is there so that no file can set other attributes."""

    __slots__ = ("arguments", "state")

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class StoredArray(StandIn):
    """An array in NumPy's older form: its state is (version, shape, dtype, Fortran order, bytes)."""


class StoredBuffer(StandIn):
    """An array in the form of protocol 5: its arguments are (bytes, dtype, shape, order)."""


class StoredDtype(StandIn):
    """A dtype: its first argument is its code, such as u1."""


class StoredBytes(StandIn):
    """Bytes as Python 3 writes them for Python 2: text and the name of its encoding, which is always latin1."""


NAMES: dict[tuple[str, str], type[StandIn]] = {
    ("numpy", "ndarray"): StoredArray,
    ("numpy", "dtype"): StoredDtype,
    ("_codecs", "encode"): StoredBytes,
    # NumPy 2 has renamed numpy.core.
    **{(f"numpy.{core}.multiarray", "_reconstruct"): StoredArray for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): StoredBuffer for core in ("core", "_core")},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[StandIn]:
        if (module, name) not in NAMES:
            raise InputError(f"asks for {f'{module}.{name}'[:80]!r}, which no data needs; nothing was executed")
        return NAMES[module, name]


def unpickle(data: bytes) -> Any:
    """The object in `data`, with nothing of it executed; text of Python 2 comes as bytes."""
    try:
        _check_program(data)
        return _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except InputError as error:
        raise InputError(f"this pickle {error}") from None
    except Exception as error:
        # A parser of untrusted bytes fails in many ways (EOFError, KeyError, TypeError, UnicodeDecodeError, ...).
        raise InputError(f"damaged or truncated pickle ({type(error).__name__}: {one_line(error)})") from None


def _check_program(data: bytes) -> None:
    tuples = 0
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        tuples += opcode.name.startswith("TUPLE")
        if opcode.name not in OPCODES:
            what = f"uses {opcode.name}"
        elif opcode.name == "LONG_BINPUT" and isinstance(argument, int) and argument > MAX_MEMO:
            what = f"numbers an object {argument}"
        elif tuples > MAX_TUPLES or count > MAX_OPCODES:
            what = f"has more than {MAX_TUPLES} tuples or {MAX_OPCODES} instructions"
        else:
            continue
        raise InputError(f"{what}, which no data needs; nothing was executed")


def stored_text(value: Any) -> str | None:
    """A name as Python 2 or 3 wrote it; None for anything else."""
    if isinstance(value, StoredBytes):
        value = next(iter(value.arguments), None)
    if isinstance(value, bytes):
        return value.decode("latin1")
    return value if isinstance(value, str) else None


def stored_array(value: Any, what: str) -> np.ndarray:
    """The array of whole numbers from 0 to 255 that a stand-in describes; `what` names it in the message."""
    match value:
        case StoredArray(state=(_, shape, StoredDtype() as dtype, fortran, raw)):
            order = "F" if fortran else "C"
        case StoredBuffer(arguments=(raw, StoredDtype() as dtype, shape, str() as order)):
            pass
        case _:
            raise InputError(f"{what} is no NumPy array (found {type(value).__name__})")
    code = stored_text(next(iter(dtype.arguments), None))
    if code != "u1":
        raise InputError(f"{what} holds {(code or 'unknown')[:20]!r} values, expected 'u1' (uint8)")
    if not isinstance(shape, tuple) or not all(type(side) is int and 0 <= side < 2**40 for side in shape):
        raise InputError(f"{what} has no usable shape")
    pixels = _bytes(raw)
    if pixels is None or len(pixels) != math.prod(shape):
        found = "none" if pixels is None else f"{len(pixels)}"
        raise InputError(f"{what} of shape {shape[:8]} needs {math.prod(shape)} bytes, found {found}")
    return np.frombuffer(pixels, dtype=np.uint8).reshape(shape, order="F" if order == "F" else "C")


def _bytes(value: Any) -> bytes | bytearray | None:
    if isinstance(value, StoredBytes):
        text = next(iter(value.arguments), None)
        try:
            return text.encode("latin1") if isinstance(text, str) else None
        except UnicodeEncodeError:
            return None
    return value if isinstance(value, bytes | bytearray) else None

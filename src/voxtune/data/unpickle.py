"""A restricted unpickler for untrusted files of plain values and byte arrays.

A pickle is a program. Two measures make it safe: only the opcodes that such a file requires are executed, and every class
is replaced by a stand-in that stores its arguments and does nothing. NumPy receives values only after they were checked.
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

# Containers, text, bytes and integers; arrays use GLOBAL or STACK_GLOBAL, REDUCE and BUILD.
OPCODES = frozenset({
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "EMPTY_LIST",
    "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
    "BINSTRING", "SHORT_BINSTRING", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
    "BYTEARRAY8", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET", "GLOBAL", "STACK_GLOBAL", "REDUCE",
    "BUILD",
})  # fmt: skip
# An empty list takes one byte in the file and 56 in memory; a batch of 10,000 images has 30,000 opcodes.
MAX_OPCODES = 2**19
# The unpickler allocates a memo up to the highest number: a file of 20 bytes could allocate gigabytes.
MAX_MEMO = 2**20
# Hashing tuples nested ten thousand deep crashes the process; an array uses six.
MAX_TUPLES = 100


class StandIn:
    """Stores the arguments and the state from the file. `__setstate__` prevents a file from setting other attributes."""

    __slots__ = ("arguments", "state")

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class StoredArray(StandIn):
    """An array in NumPy's older format: the state is (version, shape, dtype, Fortran order, bytes)."""


class StoredBuffer(StandIn):
    """An array of pickle protocol 5: the arguments are (bytes, dtype, shape, order)."""


class StoredDtype(StandIn):
    """A dtype: the first argument is its code, such as u1."""


class StoredBytes(StandIn):
    """Bytes as Python 3 writes them for Python 2: text and its encoding, which is always latin1."""


NAMES: dict[tuple[str, str], type[StandIn]] = {
    ("numpy", "ndarray"): StoredArray,
    ("numpy", "dtype"): StoredDtype,
    ("_codecs", "encode"): StoredBytes,
    # NumPy 2 renamed numpy.core.
    **{(f"numpy.{core}.multiarray", "_reconstruct"): StoredArray for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): StoredBuffer for core in ("core", "_core")},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[StandIn]:
        if (module, name) not in NAMES:
            raise InputError(f"refers to {f'{module}.{name}'[:80]!r}, which is not allowed; nothing was executed")
        return NAMES[module, name]


def unpickle(data: bytes) -> Any:
    """Loads the object in `data` without executing anything; text of Python 2 is returned as bytes."""
    try:
        _check_program(data)
        return _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except InputError as error:
        raise InputError(f"this pickle {error}") from None
    except Exception as error:
        # Untrusted bytes raise many exceptions (EOFError, KeyError, TypeError, UnicodeDecodeError, ...).
        raise InputError(f"damaged or truncated pickle ({type(error).__name__}: {one_line(error)})") from None


def _check_program(data: bytes) -> None:
    tuples = 0
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        tuples += opcode.name.startswith("TUPLE")
        if opcode.name not in OPCODES:
            problem = f"uses {opcode.name}"
        elif opcode.name == "LONG_BINPUT" and isinstance(argument, int) and argument > MAX_MEMO:
            problem = f"uses memo number {argument}"
        elif tuples > MAX_TUPLES or count > MAX_OPCODES:
            problem = f"has more than {MAX_TUPLES} tuples or {MAX_OPCODES} opcodes"
        else:
            continue
        raise InputError(f"{problem}, which is not allowed; nothing was executed")


def stored_text(value: Any) -> str | None:
    """Text written by Python 2 or 3; None for anything else."""
    if isinstance(value, StoredBytes):
        value = next(iter(value.arguments), None)
    if isinstance(value, bytes):
        return value.decode("latin1")
    return value if isinstance(value, str) else None


def stored_array(value: Any, name: str) -> np.ndarray:
    """The uint8 array that a stand-in describes; `name` is its name in error messages."""
    match value:
        case StoredArray(state=(_, shape, StoredDtype() as dtype, fortran, raw)):
            order = "F" if fortran else "C"
        case StoredBuffer(arguments=(raw, StoredDtype() as dtype, shape, str() as order)):
            pass
        case _:
            raise InputError(f"{name} is not a NumPy array but {type(value).__name__}")
    code = stored_text(next(iter(dtype.arguments), None))
    if code != "u1":
        raise InputError(f"{name} has dtype {(code or 'unknown')[:20]!r}, expected 'u1' (uint8)")
    if not isinstance(shape, tuple) or not all(type(n) is int and 0 <= n < 2**40 for n in shape):
        raise InputError(f"{name} has an invalid shape")
    pixels = _bytes(raw)
    if pixels is None or len(pixels) != math.prod(shape):
        size = "none" if pixels is None else f"{len(pixels)}"
        raise InputError(f"{name} of shape {shape[:8]} requires {math.prod(shape)} bytes, got {size}")
    return np.frombuffer(pixels, dtype=np.uint8).reshape(shape, order="F" if order == "F" else "C")


def _bytes(value: Any) -> bytes | bytearray | None:
    if isinstance(value, StoredBytes):
        text = next(iter(value.arguments), None)
        try:
            return text.encode("latin1") if isinstance(text, str) else None
        except UnicodeEncodeError:
            return None
    return value if isinstance(value, bytes | bytearray) else None

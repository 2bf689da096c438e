"""NumPy arrays of bytes in untrusted pickles: stand-ins for NumPy's functions, and arrays made of them after a check."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from voxtune.errors import InputError
from voxtune.unpickle import Interpreter, StandIn


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


def unpickle(data: bytes) -> Any:
    """The object in `data`; nothing is executed. Call it within `reading`."""
    return Interpreter(NAMES).run(data)[0]


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
        value = next(iter(value.arguments), None)
    if isinstance(value, str):  # bytes of Python 2
        try:
            return value.encode("latin1")
        except UnicodeEncodeError:
            return None
    return value if isinstance(value, bytes | bytearray) else None

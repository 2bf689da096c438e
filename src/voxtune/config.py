"""Configuration dataclasses to and from JSON or YAML mappings; the annotations of a dataclass are its schema.

Every configuration class of this project is a frozen, keyword-only dataclass that validates its values when constructed.
A class variable `OLD_NAMES` maps names of settings in older files to the names of today.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from voxtune.errors import InputError

T = TypeVar("T")
# Larger than any meaningful setting, and small enough for every conversion.
MAX_NUMBER = 10**30
# Lists in a configuration are those of a person; checks take time that grows with the square of their length.
MAX_ITEMS = 4096


def from_mapping(cls: type[T], data: Any, where: str) -> T:
    """Builds dataclass `cls` from untrusted `data`; `where` is the file and field named in error messages."""
    if not isinstance(data, Mapping):
        raise InputError(f"{where}: expected a mapping of settings, got {type(data).__name__}")
    data = current_names(cls, data)
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    unknown = [k for k in data if k not in fields]
    if unknown:
        raise InputError(f"{where}: unknown setting {unknown[0]!r}; choose from {', '.join(sorted(fields))}")
    absent = dataclasses.MISSING
    missing = [n for n, f in fields.items() if f.default is absent and f.default_factory is absent and n not in data]
    if missing:
        raise InputError(f"{where}: missing setting {missing[0]!r}")
    values = {name: _value(hints[name], value, f"{where}: {name}") for name, value in data.items()}
    try:
        return cls(**values)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def current_names(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """`data` with the names that older files use for settings of `cls` replaced by those of today."""
    old = getattr(cls, "OLD_NAMES", {})
    return {old[name] if name in old and old[name] not in data else name: value for name, value in data.items()}


def to_mapping(config: Any) -> dict[str, Any]:
    """A configuration as a JSON mapping; `from_mapping` reads it back to an equal object."""
    return dataclasses.asdict(config)


def check_values(function: Callable[..., Any], **values: Any) -> None:
    """Raises unless the type of each value is the one in the annotations of `function`."""
    hints = typing.get_type_hints(function)
    for name, value in values.items():
        _value(hints[name], value, name)


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _optional(args, value, where)
    if origin is tuple:
        return _tuple(args, value, where)
    if origin is typing.Literal:
        if value not in args:
            raise InputError(f"{where}: {repr(value)[:80]} is not one of {', '.join(map(repr, args))}")
        return value
    if dataclasses.is_dataclass(hint):
        return from_mapping(hint, value, where)  # type: ignore[arg-type]
    return _scalar(hint, value, where)


def _optional(args: tuple[Any, ...], value: Any, where: str) -> Any:
    assert type(None) in args and len(args) == 2, "configuration classes may use only X | None"
    if value is None:
        return None
    return _value(next(a for a in args if a is not type(None)), value, where)


def _tuple(args: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise InputError(f"{where}: expected a list, got {repr(value)[:80]}")
    if len(value) > MAX_ITEMS:
        raise InputError(f"{where}: a list of {len(value)} values, more than {MAX_ITEMS}")
    if args[-1] is Ellipsis:
        return tuple(_value(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if len(value) != len(args):
        raise InputError(f"{where}: expected {len(args)} values, got {len(value)}")
    return tuple(_value(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(args, value, strict=True)))


def _scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is bool and isinstance(value, bool):
        return value
    # Integral and Real include the numbers of NumPy.
    if hint is int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        whole = int(value)
        if abs(whole) > MAX_NUMBER:
            raise InputError(f"{where}: a number of {whole.bit_length()} bits is out of range")
        return whole
    if hint is float and isinstance(value, numbers.Real) and not isinstance(value, bool):
        number = int(value) if isinstance(value, numbers.Integral) else float(value)
        if abs(number) > MAX_NUMBER or not math.isfinite(number):
            raise InputError(f"{where}: {str(value)[:40]} is out of range")
        return float(number)
    if hint is str and isinstance(value, str):
        return value
    raise InputError(f"{where}: expected {getattr(hint, '__name__', hint)}, got {str(value)[:80]!r}")

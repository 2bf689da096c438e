"""The kernels as PyTorch operators (`torch.ops.voxtune.*`), so that captured graphs can hold them.

On a GPU (or with Triton's interpreter) an operator runs its kernel, elsewhere its plain reference: a rewritten graph computes the
same on a CPU. Sources that are not channels-last are copied first, since the kernels read no other layout.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import Tensor, library
from torch.utils.weak import WeakIdKeyDictionary

from voxtune.kernels import conv3d as _conv3d
from voxtune.kernels import doubling_conv as _doubling
from voxtune.kernels import elementwise as _elementwise
from voxtune.kernels import group_norm as _norm
from voxtune.kernels import head_conv as _head
from voxtune.kernels import pointwise as _pointwise
from voxtune.kernels import rms_norm as _rms
from voxtune.kernels import stem_conv as _stem
from voxtune.kernels import strided_conv as _strided
from voxtune.kernels import upsample as _upsample
from voxtune.kernels.conv3d_tiles import simulates_device
from voxtune.kernels.group_norm import empty_channels_last

log = logging.getLogger("voxtune")
_logged: set[str] = set()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_use_references: ContextVar[bool] = ContextVar("voxtune_references", default=False)
# Registered directly: torch's decorator imports its compiler at the first call, which costs every process seconds.
_LIBRARY = library.Library("voxtune", "DEF")
# By the operators' names: a simulation calls them with fake tensors, for which PyTorch would call `shapes_of`.
IMPLEMENTATIONS: dict[str, Callable[..., object]] = {}
Function = TypeVar("Function", bound=Callable[..., object])
Packed = TypeVar("Packed")


def operator(schema: str) -> Callable[[Function], Function]:
    def register(function: Function) -> Function:
        _LIBRARY.define(schema)
        name = schema.partition("(")[0]
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        IMPLEMENTATIONS[name] = function
        return function

    return register


def shapes_of(name: str) -> Callable[[Function], Function]:
    """Registers the function that gives an operator's result shapes and types without computing."""
    return library.register_fake(f"voxtune::{name}", lib=_LIBRARY)


def _runs_kernel(x: Tensor, reason: str | None, name: str) -> bool:
    """Whether the kernel runs; a fallback on a GPU is logged once with its reason."""
    if not (x.is_cuda or INTERPRETED or simulates_device()) or _use_references.get():
        return False
    if reason is not None and (key := f"{name}: {reason}") not in _logged:
        _logged.add(key)
        log.info("%s falls back to plain PyTorch: %s", name, reason)
    return reason is None


@contextmanager
def plain_operators() -> Iterator[None]:
    """Operators run their references inside the block, to check a graph independently of the kernels."""
    token = _use_references.set(True)
    try:
        yield
    finally:
        _use_references.reset(token)


def _lasting(x: Tensor) -> Tensor:
    """Channels-last in any number of dimensions; no copy if it is already."""
    moved = x.movedim(1, -1)
    return x if moved.is_contiguous() else moved.contiguous().movedim(-1, 1)


@operator(
    "norm_act(Tensor[] sources, Tensor weight, Tensor bias, int groups, float eps, Tensor? shift, str activation, "
    "float slope, Tensor? slopes, Tensor? residual, Tensor[] statistics) -> Tensor"
)
def norm_act(
    sources: list[Tensor],
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float,
    shift: Tensor | None,
    activation: str,
    slope: float,
    slopes: Tensor | None,
    residual: Tensor | None,
    statistics: list[Tensor],
) -> Tensor:
    lasting = tuple(_lasting(s) for s in sources)
    residual = None if residual is None else _lasting(residual)
    known = [s if s.numel() else None for s in statistics] or None
    after = (activation, slope, slopes, residual)
    if _runs_kernel(lasting[0], _norm.why_not(lasting, groups, activation, slopes, residual), "norm_act"):
        return _norm.norm_act(lasting, weight, bias, groups, eps, shift, *after, known, checked=True)
    return _lasting(_norm.norm_act_reference(lasting, weight, bias, groups, eps, shift, *after))


@shapes_of("norm_act")
def _(sources, weight, bias, groups, eps, shift, activation, slope, slopes, residual, statistics):
    return empty_channels_last(sources[0], sum(s.shape[1] for s in sources))


@operator("rms_norm_act(Tensor x, Tensor weight, Tensor? bias, float eps, float floor, str activation) -> Tensor")
def rms_norm_act(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, floor: float, activation: str) -> Tensor:
    x = _lasting(x)
    if _runs_kernel(x, _rms.why_not(x, activation), "rms_norm_act"):
        return _rms.rms_norm_act(x, weight, bias, eps, floor, activation, checked=True)
    return _lasting(_rms.rms_norm_act_reference(x, weight, bias, eps, floor, activation))


@shapes_of("rms_norm_act")
def _(x, weight, bias, eps, floor, activation):
    return empty_channels_last(x, x.shape[1])


@operator(
    "conv3d(Tensor[] sources, Tensor packed, Tensor? shift, Tensor? residual, bool statistics, "
    "int[] kernel=[3, 3, 3], int[] padding=[1, 1, 1, 1, 1, 1]) -> (Tensor, Tensor)"
)
def conv3d(
    sources: list[Tensor],
    packed: Tensor,
    shift: Tensor | None,
    residual: Tensor | None,
    statistics: bool,
    kernel: Sequence[int] = _conv3d.CUBE,
    padding: Sequence[int] = _conv3d.AROUND,
) -> tuple[Tensor, Tensor]:
    """`padding` is (before, after) along depth, height and width."""
    lasting = tuple(_lasting(s) for s in sources)
    residual = None if residual is None else _lasting(residual)
    given = (lasting, packed, shift, residual)
    window = (tuple(kernel), tuple(padding))
    if _runs_kernel(lasting[0], _conv3d.why_not(*given, *window), "conv3d"):
        y, sums = _conv3d.conv3d(*given, statistics, *window, checked=True)
    else:
        y, sums = _conv3d.conv3d_reference(*given, statistics, *window)
    return _lasting(y), y.new_empty(0, dtype=torch.float32) if sums is None else sums


@shapes_of("conv3d")
def _(sources, packed, shift, residual, statistics, kernel=_conv3d.CUBE, padding=_conv3d.AROUND):
    size = _conv3d.result_size(sources[0], tuple(kernel), tuple(padding))
    y = empty_channels_last(sources[0], packed.shape[1], voxels=size)
    return y, y.new_empty(0, dtype=torch.float32)


@operator(
    "pointwise(Tensor[] sources, Tensor weight, Tensor? shift, Tensor? residual, ScalarType? dtype=None) -> Tensor"
)
def pointwise(
    sources: list[Tensor],
    weight: Tensor,
    shift: Tensor | None,
    residual: Tensor | None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    lasting = tuple(_lasting(s) for s in sources)
    residual = None if residual is None else _lasting(residual)
    if _runs_kernel(lasting[0], _pointwise.why_not(lasting, weight, shift, residual), "pointwise"):
        return _pointwise.pointwise(lasting, weight, shift, residual, dtype=dtype, checked=True)
    return _lasting(_pointwise.pointwise_reference(lasting, weight, shift, residual, dtype))


@shapes_of("pointwise")
def _(sources, weight, shift, residual, dtype=None):
    return empty_channels_last(sources[0], weight.shape[0], dtype)


@operator("add(Tensor a, Tensor b, Tensor? shift) -> Tensor")
def add(a: Tensor, b: Tensor, shift: Tensor | None) -> Tensor:
    a, b = _lasting(a), _lasting(b)
    if _runs_kernel(a, _pointwise.why_not_add(a, b, shift), "add"):
        return _pointwise.add(a, b, shift, checked=True)
    return _lasting(_pointwise.add_reference(a, b, shift))


@shapes_of("add")
def _(a, b, shift):
    return empty_channels_last(a, a.shape[1])


@operator("elementwise(Tensor[] inputs, str program, ScalarType dtype) -> Tensor")
def elementwise(inputs: list[Tensor], program: str, dtype: torch.dtype) -> Tensor:
    """A chain of elementwise operators; the inputs are broadcast, and the result's layout is that of PyTorch."""
    if _runs_kernel(inputs[0], _elementwise.why_not(inputs, program, dtype), "elementwise"):
        return _elementwise.elementwise(inputs, program, dtype, checked=True)
    y = _elementwise.elementwise_reference(inputs, program, dtype)
    expected = _elementwise.empty_result(inputs, program, dtype)
    return y if y.stride() == expected.stride() else expected.copy_(y)


@shapes_of("elementwise")
def _(inputs, program, dtype):
    return _elementwise.empty_result(inputs, program, dtype)


@operator("upsample(Tensor x, str mode) -> Tensor")
def upsample(x: Tensor, mode: str) -> Tensor:
    x = _lasting(x)
    if _runs_kernel(x, _upsample.why_not(x, mode), "upsample"):
        return _upsample.upsample(x, mode, checked=True)
    return _lasting(_upsample.upsample_reference(x, mode))


@shapes_of("upsample")
def _(x, mode):
    return empty_channels_last(x, x.shape[1], voxels=tuple(2 * s for s in x.shape[2:]))


@operator(
    "doubling_conv(Tensor[] sources, Tensor packed, Tensor? shift, int[] kernel, int[] stride, bool statistics) "
    "-> (Tensor, Tensor)"
)
def doubling_conv(
    sources: list[Tensor], packed: Tensor, shift: Tensor | None, kernel: list[int], stride: list[int], statistics: bool
) -> tuple[Tensor, Tensor]:
    lasting = tuple(_lasting(s) for s in sources)
    rest = (packed, shift, tuple(kernel), tuple(stride), statistics)
    reason = _doubling.why_not(lasting, packed, tuple(kernel), tuple(stride))
    if _runs_kernel(lasting[0], reason, "doubling_conv"):
        y, sums = _doubling.doubling_conv(lasting, *rest, checked=True)
    else:
        y, sums = _doubling.doubling_conv_reference(lasting, *rest)
    return _lasting(y), packed.new_empty(0, dtype=torch.float32) if sums is None else sums


@shapes_of("doubling_conv")
def _(sources, packed, shift, kernel, stride, statistics):
    voxels = tuple(size * s for size, s in zip(sources[0].shape[2:], stride, strict=True))
    y = empty_channels_last(sources[0], packed.shape[1], voxels=voxels)
    return y, packed.new_empty(0, dtype=torch.float32)


@operator(
    "strided_conv(Tensor x, Tensor packed, Tensor? shift, int[] kernel, int[] stride, bool statistics) "
    "-> (Tensor, Tensor)"
)
def strided_conv(
    x: Tensor, packed: Tensor, shift: Tensor | None, kernel: list[int], stride: list[int], statistics: bool
) -> tuple[Tensor, Tensor]:
    x = _lasting(x)
    rest = (packed, shift, tuple(kernel), tuple(stride), statistics)
    reason = _strided.why_not(x, packed, tuple(kernel), tuple(stride))
    if _runs_kernel(x, reason, "strided_conv"):
        y, sums = _strided.strided_conv(x, *rest, checked=True)
    else:
        y, sums = _strided.strided_conv_reference(x, *rest)
    return _lasting(y), x.new_empty(0, dtype=torch.float32) if sums is None else sums


@shapes_of("strided_conv")
def _(x, packed, shift, kernel, stride, statistics):
    voxels = _strided.result_voxels(tuple(x.shape[2:]), tuple(stride))
    return empty_channels_last(x, packed.shape[1], voxels=voxels), x.new_empty(0, dtype=torch.float32)


# Weights in the layout that the edge kernels read, packed at the first call; how they were packed, and the weight's version.
_packed: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _packed_by(pack: Callable[[Tensor], Packed], weight: Tensor) -> Packed:
    if weight not in _packed:
        _packed[weight] = pack, pack(weight), _version(weight)
    elif _packed[weight][2] != _version(weight):  # a parameter that is trained
        pack_again([weight])
    packed: Packed = _packed[weight][1]
    return packed


def _version(weight: Tensor) -> int:
    return 0 if weight.is_inference() else weight._version


def pack_again(weights: Iterable[Tensor]) -> None:
    """Packs weights that were written to, into the same memory: recorded graphs read it."""
    for weight in weights:
        if weight in _packed:
            pack, packed, _ = _packed[weight]
            for old, new in zip(_tensors(packed), _tensors(pack(weight)), strict=True):
                old.copy_(new)
            _packed[weight] = pack, packed, _version(weight)


def _tensors(packed: object) -> list[Tensor]:
    return [value for value in vars(packed).values() if isinstance(value, Tensor)]


@operator("stem(Tensor[] sources, Tensor weight, Tensor? shift) -> Tensor")
def stem(sources: list[Tensor], weight: Tensor, shift: Tensor | None) -> Tensor:
    channels = tuple(s.shape[1] for s in sources)
    packed = _packed_by(lambda w: _stem.pack_stem(w, channels, w.dtype), weight)
    if _runs_kernel(sources[0], _stem.why_not_stem(tuple(sources), packed, shift), "stem"):
        return _stem.stem(tuple(sources), packed, shift, checked=True)
    return _lasting(_stem.stem_reference(tuple(sources), weight, shift))


@shapes_of("stem")
def _(sources, weight, shift):
    return empty_channels_last(sources[0], weight.shape[0], dtype=weight.dtype)


@operator("head(Tensor x, Tensor weight, Tensor? bias, ScalarType? dtype=None) -> Tensor")
def head(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    x = _lasting(x)
    packed = _packed_by(lambda w: _head.pack_head(w, w.dtype), weight)
    if _runs_kernel(x, _head.why_not_head(x, packed), "head"):
        return _head.head(x, packed, bias, dtype=dtype, checked=True)
    y = _head.head_reference(x, weight, None if bias is None else bias.to(weight.dtype))
    return _lasting(y.to(dtype or y.dtype))


@shapes_of("head")
def _(x, weight, bias, dtype=None):
    return empty_channels_last(x, weight.shape[0], dtype)


# For the modules that register more operators; they are imported last because they use the functions above.
channels_innermost, runs_kernel = _lasting, _runs_kernel
importlib.import_module("voxtune.kernels.ops_2d")

"""Gradients of the operators `torch.ops.voxtune.*`, for training.

`register_gradients` adds them to the operators: registering imports PyTorch's compiler, which inference never needs. On a GPU
they run kernels of this project and cuDNN, elsewhere PyTorch's operators.

A convolution's data gradient is the same convolution with the weight flipped and its channels exchanged; the gradient of its
weight is cuDNN's or that of conv3d_weight_gradient.py, for each source, without a concatenation. They do not keep what a norm
or an upsampling returned: in `recomputing_results` they keep how to compute it again from its source.

Statistics of a result for the next norm are no function of their own: the norm's gradient contains their part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, library
from torch.nn import functional as F

from voxtune.kernels import channel_sums as _sums
from voxtune.kernels import conv3d as _conv3d
from voxtune.kernels import conv3d_weight_gradient as _own
from voxtune.kernels import doubling_conv as _doubling
from voxtune.kernels import edge_gradients as _edges
from voxtune.kernels import group_norm as _norm
from voxtune.kernels import group_norm_backward as _norm_backward
from voxtune.kernels import packing as _packing
from voxtune.kernels import strided_conv as _strided
from voxtune.kernels import upsample_backward as _upsample_backward
from voxtune.kernels.ops import _LIBRARY, _lasting, _runs_kernel, operator, shapes_of

aten = torch.ops.aten
Context = Any


@operator(
    "norm_act_kept(Tensor[] sources, Tensor weight, Tensor bias, int groups, float eps, Tensor? shift, str activation, "
    "float slope, Tensor? slopes, Tensor? residual, Tensor[] statistics) -> (Tensor, Tensor)"
)
def norm_act_kept(
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
) -> tuple[Tensor, Tensor]:
    """`norm_act`, and what its gradient needs: (N, 4, C) scale, offset, mean and 1 / standard deviation, float32 or wider."""
    lasting = tuple(_lasting(s) for s in sources)
    residual = None if residual is None else _lasting(residual)
    known = [s if s.numel() else None for s in statistics] or None
    after = (activation, slope, slopes, residual)
    if _runs_kernel(lasting[0], _norm.why_not(lasting, groups, activation, slopes, residual), "norm_act"):
        return _norm.norm_act_and_affine(lasting, weight, bias, groups, eps, shift, *after, known, checked=True)
    affine = _norm_backward.affine_reference(lasting, weight, bias, groups, eps, shift)
    return _lasting(_norm.norm_act_reference(lasting, weight, bias, groups, eps, shift, *after)), affine


@shapes_of("norm_act_kept")
def _(sources, weight, bias, groups, eps, shift, activation, slope, slopes, residual, statistics):
    C = sum(s.shape[1] for s in sources)
    y = _norm.empty_channels_last(sources[0], C)
    return y, y.new_empty((y.shape[0], 4, C), dtype=torch.float32)


def recompute_norm(
    sources: Sequence[Tensor],
    affine: Tensor,
    activation: str,
    slope: float,
    slopes: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    """The norm's result from what was kept of it."""
    lasting = tuple(_lasting(s) for s in sources)
    residual = None if residual is None else _lasting(residual)
    reason = _norm.why_not(lasting, affine.shape[2], activation, slopes, residual)
    if _runs_kernel(lasting[0], reason, "norm_act"):
        return _norm.normalize(lasting, affine, activation, slope, slopes, residual)
    x = torch.cat(lasting, dim=1)
    scale, offset = (affine[:, row].view(*affine.shape[::2], *[1] * (x.dim() - 2)) for row in (0, 1))
    y = x.to(affine.dtype) * scale + offset
    y = y if residual is None else y + residual.to(y.dtype)
    return _lasting(_norm.activation_reference(y, activation, slope, slopes).to(x.dtype))


def _keep_norm(ctx: Context, inputs: Sequence[Any], output: tuple[Tensor, Tensor]) -> None:
    sources, weight, bias, groups, eps, shift, activation, slope, slopes, residual, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*sources, weight, bias, shift, slopes, residual, output[1])
    ctx.options = groups, eps, activation, slope


def _norm_gradient(ctx: Context, dy: Tensor, _affine: None) -> tuple[Any, ...]:
    gradients, dweight, dbias = _norm_gradients(ctx, dy, ())
    shift, slopes, residual = gradients.shift_NC, gradients.slopes, gradients.residual
    return list(gradients.sources), dweight, dbias, None, None, shift, None, None, slopes, residual, None


def _norm_gradients(
    ctx: Context, dy: Tensor, addends: Sequence[Tensor | None]
) -> tuple[_norm_backward.NormGradients, Tensor, Tensor]:
    """All gradients, with those of weight and bias in their types. `addends` are added to the gradients of the sources."""
    groups, eps, activation, slope = ctx.options
    *sources, weight, bias, shift, slopes, residual, affine = ctx.saved_tensors
    given = tuple(_lasting(s) for s in sources)
    added = None if residual is None else _lasting(residual)
    dy = _lasting(dy)
    reason = _norm.why_not(given, groups, activation, slopes, added)
    if _runs_kernel(given[0], reason, "the gradient of norm_act"):
        lasting = [None if a is None else _lasting(a) for a in addends]
        gradients = _norm_backward.norm_act_backward(
            dy, given, affine, weight, groups, shift, activation, slope, slopes, added, lasting
        )
        for dx, sums_NPC in zip(gradients.sources, gradients.sums_NPC, strict=True):
            _sums.remember_sums(dx, sums_NPC)
    else:
        gradients = _norm_backward.norm_act_backward_reference(
            dy, given, weight, bias, groups, eps, shift, activation, slope, slopes, added
        )
        pairs = zip(gradients.sources, addends or [None] * len(given), strict=True)
        gradients = replace(gradients, sources=tuple(dx if a is None else dx + a for dx, a in pairs))
    return gradients, gradients.weight.to(weight.dtype), gradients.bias.to(bias.dtype)


class _NormBefore(torch.autograd.Function):
    """`norm_act_kept`, which returns its sources too, for those that read them later: see `norm_before`."""

    @staticmethod
    def forward(
        ctx: Context, handed_on: Sequence[bool], arguments: tuple[Any, ...], *tensors: Tensor
    ) -> tuple[Any, ...]:
        weight, bias, shift, slopes, residual, *sources = tensors
        groups, eps, activation, slope, statistics = arguments
        inputs = (sources, weight, bias, groups, eps, shift, activation, slope, slopes, residual, statistics)
        y, affine = torch.ops.voxtune.norm_act_kept(*inputs)
        _keep_norm(ctx, inputs, (y, affine))
        ctx.handed_on = handed_on
        return y, affine, *(s.view_as(s) for s, on in zip(sources, handed_on, strict=True) if on)

    @staticmethod
    def backward(ctx: Context, *gradients: Any) -> tuple[Any, ...]:
        dy, _, *rest = gradients
        others = iter(rest)
        addends = [next(others) if on else None for on in ctx.handed_on]
        if dy is None:
            return *([None] * 7), *addends
        own, dweight, dbias = _norm_gradients(ctx, dy, addends)
        return None, None, dweight, dbias, own.shift_NC, own.slopes, own.residual, *own.sources


def norm_before(handed_on: Sequence[bool], *arguments: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    """`norm_act_kept` with its arguments; and the values of the sources that `handed_on` marks, once more.

    Operators that read these instead of the sources give their gradients to the norm's own, which adds them in the pass in
    which it writes the source's gradient. PyTorch would add them in a pass of its own.
    """
    sources, weight, bias, groups, eps, shift, activation, slope, slopes, residual, statistics = arguments
    given = (groups, eps, activation, slope, statistics)
    y, affine, *again = _NormBefore.apply(tuple(handed_on), given, weight, bias, shift, slopes, residual, *sources)
    for source, same in zip((s for s, on in zip(sources, handed_on, strict=True) if on), again, strict=True):
        if (recipe := recipe_of(source)) is not None:
            recompute_later(same, recipe)
    return y, affine, again


def _keep_conv3d(ctx: Context, inputs: Sequence[Any], output: tuple[Tensor, Tensor]) -> None:
    sources, packed, shift, residual, _, kernel, padding = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*sources, packed)
    ctx.options = None if shift is None else tuple(shift.shape), residual is not None, tuple(kernel), tuple(padding)


def _conv3d_gradient(ctx: Context, dy: Tensor, _statistics: None) -> tuple[Any, ...]:
    shift, has_residual, kernel, padding = ctx.options
    *sources, packed = ctx.saved_tensors
    dy = _lasting(dy)
    around = tuple(k - 1 - p for k, pair in zip(kernel, _pairs(padding), strict=True) for p in pair)
    channels = [source.shape[1] for source in sources]
    dpacked = _packed_gradient(dy, sources, packed, kernel, padding)
    # A source may have been computed again for its weight's gradient: not in memory beside its own gradient.
    del sources
    data, first = [], 0
    for C in channels:
        # Each tap's matrix, with its channels exchanged, at the opposite tap.
        data.append(_plain_conv3d(dy, _packing.opposite(packed, first, C), kernel, around))
        first += C
    return data, dpacked, _shift_gradient(dy, shift), dy if has_residual else None, None, None, None


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    """The concatenation, without a copy of a single part."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _pairs(padding: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(padding[::2], padding[1::2], strict=True))


def _plain_conv3d(x: Tensor, packed: Tensor, kernel: tuple[int, ...], padding: tuple[int, ...]) -> Tensor:
    """The convolution without an epilogue; a padding may be negative where the forward pass padded more than the kernel."""
    if min(padding) < 0:
        crop = [max(0, -p) for p in padding]
        sizes = zip(crop[::2], crop[1::2], x.shape[2:], strict=True)
        x = x[(slice(None), slice(None), *(slice(a, size - b) for a, b, size in sizes))]
        padding = tuple(max(0, p) for p in padding)
    y: Tensor = torch.ops.voxtune.conv3d([x], packed, None, None, False, list(kernel), list(padding))[0]
    return y


def _padded(x: Tensor, padding: Sequence[int]) -> tuple[Tensor, tuple[int, ...]]:
    """The source and the padding that PyTorch's convolution takes: equal in front and behind."""
    pairs = _pairs(padding)
    if all(before == after for before, after in pairs):
        return x, tuple(before for before, _ in pairs)
    return F.pad(x, [p for pair in pairs[::-1] for p in pair]), (0,) * len(pairs)


def _packed_gradient(
    dy: Tensor, sources: list[Tensor], packed: Tensor, kernel: tuple[int, ...], padding: tuple[int, ...]
) -> Tensor:
    """Of a packed weight, each source's columns from that source."""
    lasting = [_lasting(s) for s in sources]
    method = _own.method_for(dy, lasting, padding) if kernel == _conv3d.CUBE else "cudnn"
    if method != "cudnn":
        reason = _own.why_not(dy, lasting, kernel, padding, hopper=method == "hopper")
        if _runs_kernel(dy, reason, "the weight gradient of conv3d"):
            return _own.weight_gradient(dy, lasting, padding, packed.dtype, hopper=method == "hopper")
    return packed_by_cudnn(dy, sources, packed.dtype, kernel, padding)


def packed_by_cudnn(
    dy: Tensor, sources: Sequence[Tensor], dtype: torch.dtype, kernel: tuple[int, ...], padding: tuple[int, ...]
) -> Tensor:
    """The gradient of a packed weight by PyTorch's operators, which are cuDNN's on a GPU."""
    shapes = [(dy.shape[1], s.shape[1], *kernel) for s in sources]
    weights = [_weight_gradient(dy, _padded(s, padding), shape) for s, shape in zip(sources, shapes, strict=True)]
    return _joined([_conv3d.pack(w) for w in weights], 2).to(dtype)


def _weight_gradient(
    dy: Tensor, source: tuple[Tensor, tuple[int, ...]], shape: tuple[int, ...], stride: Sequence[int] | None = None
) -> Tensor:
    x, padding = source
    axes = len(padding)
    return aten.convolution_backward(
        *(dy, x, x.new_empty(shape), None, list(stride or [1] * axes), list(padding), [1] * axes),
        *(False, [0] * axes, 1, [False, True, False]),
    )[1]


def _shift_gradient(dy: Tensor, shape: tuple[int, ...] | None) -> Tensor | None:
    """Of a shift (N or 1, K): the sum over the voxels, in float32 or wider."""
    if shape is None:
        return None
    sums_NPK = _channel_sums(dy)
    return sums_NPK.sum(1) if shape[0] == dy.shape[0] else sums_NPK.sum((0, 1)).unsqueeze(0)


def _channel_sums(dy: Tensor) -> Tensor:
    """Known from the norm that computed this gradient, or from another operator that received it; else computed here."""
    sums_NPK = _sums.remembered_sums(dy)
    if sums_NPK is None:
        kernel = _runs_kernel(dy, _sums.why_not(dy), "the sum over voxels")
        sums_NPK = _sums.channel_sums(dy) if kernel else _sums.channel_sums_reference(dy)
        _sums.remember_sums(dy, sums_NPK)
    return sums_NPK


def _keep_pointwise(ctx: Context, inputs: Sequence[Any], output: Tensor) -> None:
    sources, weight, shift, residual, _ = inputs
    ctx.save_for_backward(*sources, weight)
    ctx.options = (
        None if shift is None else tuple(shift.shape),
        None if residual is None else residual.dtype,
        sources[0].dtype,
    )


def _pointwise_gradient(ctx: Context, dy: Tensor) -> tuple[Any, ...]:
    shift, residual, dtype = ctx.options
    *sources, weight = ctx.saved_tensors
    dy = _lasting(dy)
    half = dy.to(dtype)
    rows = half.movedim(1, -1).flatten(0, -2)
    data, parts, first = [], [], 0
    for source in sources:
        C = source.shape[1]
        part = weight[:, first : first + C]
        data.append(torch.ops.voxtune.pointwise([half], part.t().contiguous(), None, None))
        parts.append(rows.t() @ _lasting(source).movedim(1, -1).flatten(0, -2))
        first += C
    added = None if residual is None else dy.to(residual)
    return data, _joined(parts, 1), _shift_gradient(dy, shift), added, None


def _keep_add(ctx: Context, inputs: Sequence[Any], output: Tensor) -> None:
    ctx.shift = None if inputs[2] is None else tuple(inputs[2].shape)


def _add_gradient(ctx: Context, dy: Tensor) -> tuple[Any, ...]:
    return dy, dy, _shift_gradient(dy, ctx.shift)


def _keep_upsample(ctx: Context, inputs: Sequence[Any], output: Tensor) -> None:
    ctx.mode = inputs[1]


def _upsample_gradient(ctx: Context, dy: Tensor) -> tuple[Any, ...]:
    dy = _lasting(dy)
    if _runs_kernel(dy, _upsample_backward.why_not(dy, ctx.mode), "the gradient of upsample"):
        return _upsample_backward.upsample_backward(dy, ctx.mode, checked=True), None
    return _lasting(_upsample_backward.upsample_backward_reference(dy, ctx.mode)), None


def _keep_resampling(ctx: Context, inputs: Sequence[Any], output: tuple[Tensor, Tensor]) -> None:
    sources, packed, shift, kernel, stride, _ = inputs
    sources = sources if isinstance(sources, list | tuple) else [sources]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*sources, packed)
    ctx.options = None if shift is None else tuple(shift.shape), tuple(kernel), tuple(stride)


def _strided_gradient(ctx: Context, dy: Tensor, _statistics: None) -> tuple[Any, ...]:
    shift, kernel, stride = ctx.options
    x, packed = ctx.saved_tensors
    dy, weight = _lasting(dy), _strided.unpack(packed, kernel)
    padding = [size // 2 for size in kernel]
    dx, dw, _ = aten.convolution_backward(
        *(dy, x, weight, None, list(stride), padding, [1] * len(kernel), False, [0] * len(kernel), 1),
        [True, True, False],
    )
    return _lasting(dx), _strided.pack_strided(dw).to(packed.dtype), _shift_gradient(dy, shift), None, None, None


def _doubling_gradient(ctx: Context, dy: Tensor, _statistics: None) -> tuple[Any, ...]:
    shift, kernel, stride = ctx.options
    *sources, packed = ctx.saved_tensors
    dy, weight = _lasting(dy), _doubling.unpack(packed, kernel)
    padding, more = _doubling.paddings(kernel, stride)
    data, weights, first = [], [], 0
    for source in sources:
        C = source.shape[1]
        part = weight[first : first + C]
        dx, dw, _ = aten.convolution_backward(
            *(dy, source, part, None, list(stride), list(padding), [1] * len(kernel), True, list(more), 1),
            [True, True, False],
        )
        data.append(_lasting(dx))
        weights.append(dw)
        first += C
    dpacked = _doubling.pack_transposed(_joined(weights, 0)).to(packed.dtype)
    return data, dpacked, _shift_gradient(dy, shift), None, None, None


def _keep_stem(ctx: Context, inputs: Sequence[Any], output: Tensor) -> None:
    sources, weight, shift = inputs
    ctx.save_for_backward(*sources, weight)
    ctx.options = None if shift is None else tuple(shift.shape)


def _stem_gradient(ctx: Context, dy: Tensor) -> tuple[Any, ...]:
    *sources, weight = ctx.saved_tensors
    dy, shift = _lasting(dy.to(weight.dtype)), ctx.options
    data: list[Tensor | None] = [None] * len(sources)
    # An image that the network was given needs no gradient: only its weight does.
    if any(ctx.needs_input_grad[0]):
        dx = torch.ops.voxtune.head(dy, _opposite(weight), None)
        data = list(dx.split([s.shape[1] for s in sources], dim=1))
    parts = [_tap_sums(source, dy, ahead=True) for source in sources]
    dw = _joined([sums for sums, _ in parts], 1)
    dshift = parts[0][1].unsqueeze(0) if shift is not None and shift[0] == 1 else _shift_gradient(dy, shift)
    return data, dw.permute(2, 1, 0).reshape(weight.shape), dshift


def _keep_head(ctx: Context, inputs: Sequence[Any], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.biased = inputs[2] is not None


def _head_gradient(ctx: Context, dy: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    sums, M = _tap_sums(dy, _lasting(x), ahead=False)[0], weight.shape[0]
    del x  # which may have been computed again
    dx = torch.ops.voxtune.stem([dy], _opposite(weight), None) if ctx.needs_input_grad[0] else None
    total = _shift_gradient(dy, (1, M)) if ctx.biased else None
    return dx, sums.permute(1, 2, 0).reshape(weight.shape), None if total is None else total[0], None


def _opposite(weight: Tensor) -> Tensor:
    """The weight of the convolution that computes the data gradient: each tap at the opposite place, channels exchanged."""
    return weight.flatten(2).flip(2).transpose(0, 1).unflatten(2, weight.shape[2:])


def _tap_sums(narrow: Tensor, wide: Tensor, *, ahead: bool) -> tuple[Tensor, Tensor]:
    if _runs_kernel(wide, _edges.why_not(narrow, wide), "the gradient of a stem's or head's weight"):
        return _edges.tap_sums(narrow, wide, ahead=ahead)
    return _edges.tap_sums_reference(narrow, wide, ahead=ahead)


_GRADIENTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "norm_act_kept": (_keep_norm, _norm_gradient),
    "conv3d": (_keep_conv3d, _conv3d_gradient),
    "pointwise": (_keep_pointwise, _pointwise_gradient),
    "add": (_keep_add, _add_gradient),
    "upsample": (_keep_upsample, _upsample_gradient),
    "strided_conv": (_keep_resampling, _strided_gradient),
    "doubling_conv": (_keep_resampling, _doubling_gradient),
    "stem": (_keep_stem, _stem_gradient),
    "head": (_keep_head, _head_gradient),
}


@functools.cache
def register_gradients() -> None:
    for name, (keep, gradient) in _GRADIENTS.items():
        library.register_autograd(f"voxtune::{name}", _for_arguments(gradient), setup_context=keep, lib=_LIBRARY)


def differentiable(target: Any) -> bool:
    """Whether gradients pass through an operator: one of PyTorch's, or one of this project's that has a gradient."""
    if getattr(target, "namespace", "") != "voxtune":
        return True
    name = target._schema.name.split("::")[1]
    return name in _GRADIENTS or f"{name}_kept" in _GRADIENTS


def _for_arguments(gradient: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Gradients in the structure of the arguments that were given: PyTorch leaves out those that equal their defaults."""

    def call(ctx: Context, *dy: Any) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad
        return tuple(_matching(n, g) for n, g in zip(needed, gradient(ctx, *dy), strict=False))

    return call


def _matching(needed: Any, gradient: Any) -> Any:
    return [None] * len(needed) if isinstance(needed, list) and gradient is None else gradient


class Recomputed(Protocol):
    """How to compute a result again; `kept` is what that needs."""

    @property
    def kept(self) -> tuple[Any, ...]: ...

    def __call__(self) -> Tensor: ...


@dataclass(frozen=True)
class RecomputedNorm:
    """A norm's result, computed again; `arguments` are those of `recompute_norm` after the affine."""

    sources: tuple[Tensor | Recomputed, ...]
    affine: Tensor
    arguments: tuple[Any, ...]

    @property
    def kept(self) -> tuple[Any, ...]:
        return self.sources, self.affine, self.arguments

    def __call__(self) -> Tensor:
        with torch.no_grad():
            activation, slope, slopes, residual = self.arguments
            sources = tuple(map(computed, self.sources))
            return recompute_norm(sources, self.affine, activation, slope, slopes, computed(residual))


@dataclass(frozen=True)
class RecomputedUpsampling:
    """A doubled volume, computed again from its source, which is an eighth of it."""

    x: Tensor | Recomputed
    mode: str

    @property
    def kept(self) -> tuple[Any, ...]:
        return (self.x,)

    def __call__(self) -> Tensor:
        with torch.no_grad():
            y: Tensor = torch.ops.voxtune.upsample(computed(self.x), self.mode)
            return y


@dataclass(frozen=True)
class RecomputedInGroup:
    """A result of a group of operators that is computed again as a whole."""

    values: Callable[[Any], Tensor]
    node: Any

    @property
    def kept(self) -> tuple[Any, ...]:
        return ()

    def __call__(self) -> Tensor:
        return self.values(self.node)


RECOMPUTED = (RecomputedNorm, RecomputedUpsampling, RecomputedInGroup)


def computed(x: Any) -> Any:
    return x() if isinstance(x, RECOMPUTED) else x


def recipe_or_value(x: Any) -> Any:
    """What to keep of a result."""
    return (recipe_of(x) or x) if isinstance(x, Tensor) else x


_RECIPE = "_voxtune_recomputed"


def recompute_later(y: Tensor, recipe: Recomputed) -> None:
    """Inside `recomputing_results`, operators that need this result for their gradients keep how to compute it again."""
    setattr(y, _RECIPE, recipe)


def recipe_of(y: Tensor) -> Recomputed | None:
    return getattr(y, _RECIPE, None)


@contextmanager
def recomputing_results() -> Iterator[None]:
    def pack(x: Tensor) -> Tensor | Recomputed:
        return recipe_of(x) or x

    def unpack(kept: Tensor | Recomputed) -> Tensor:
        y: Tensor = computed(kept)
        return y

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield

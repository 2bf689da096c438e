"""The kernels of small 2D images as PyTorch operators; imported by ops.py."""

from __future__ import annotations

import torch
from torch import Tensor

from voxtune.kernels import conv2d as _conv2d
from voxtune.kernels import depthwise2d as _depthwise2d
from voxtune.kernels import embedding as _embedding
from voxtune.kernels import gate2d as _gate2d
from voxtune.kernels import stem2d as _stem2d
from voxtune.kernels.group_norm import empty_channels_last
from voxtune.kernels.ops import channels_innermost, operator, runs_kernel, shapes_of


@operator(
    "conv2d(Tensor[] sources, Tensor packed, Tensor shift, Tensor? slope, Tensor? sums, Tensor? term, Tensor[] residual, "
    "Tensor? residual_packed, str activation, int channels, int side, int stride, bool double, float eps, "
    "bool statistics) -> (Tensor, Tensor)"
)
def conv2d(
    sources: list[Tensor],
    packed: Tensor,
    shift: Tensor,
    slope: Tensor | None,
    sums: Tensor | None,
    term: Tensor | None,
    residual: list[Tensor],
    residual_packed: Tensor | None,
    activation: str,
    channels: int,
    side: int,
    stride: int,
    double: bool,
    eps: float,
    statistics: bool,
) -> tuple[Tensor, Tensor]:
    images, more = (tuple(channels_innermost(s) for s in part) for part in (sources, residual))
    form = (activation, channels, side, stride, double, eps)
    reason = _conv2d.why_not(images, more, activation, side, stride, double)
    if reason is None and slope is not None and (sums is None or not sums.numel()):
        reason = "the sums of the norm's input are missing"
    left = None
    if runs_kernel(images[0], reason, "conv2d"):
        y, left = _conv2d.conv2d(
            images, packed, shift, slope, sums, term, more, residual_packed, *form, statistics, checked=True
        )
    else:
        y = _conv2d.conv2d_reference(images, packed, shift, slope, term, more, residual_packed, *form)
    return channels_innermost(y), y.new_empty(0, dtype=torch.float32) if left is None else left


@shapes_of("conv2d")
def _(
    sources,
    packed,
    shift,
    slope,
    sums,
    term,
    residual,
    residual_packed,
    activation,
    channels,
    side,
    stride,
    double,
    eps,
    statistics,
):
    y = empty_channels_last(sources[0], channels, voxels=_conv2d.result_size(sources[0], stride, double))
    return y, y.new_empty(0, dtype=torch.float32)


@operator("depthwise2d(Tensor[] sources, Tensor packed, Tensor? bias, Tensor? term, int side) -> (Tensor, Tensor)")
def depthwise2d(
    sources: list[Tensor], packed: Tensor, bias: Tensor | None, term: Tensor | None, side: int
) -> tuple[Tensor, Tensor]:
    images = tuple(channels_innermost(s) for s in sources)
    if runs_kernel(images[0], _depthwise2d.why_not(images, side), "depthwise2d"):
        return _depthwise2d.depthwise2d(images, packed, bias, term, side, checked=True)
    y = _depthwise2d.depthwise2d_reference(images, packed, bias, term, side)
    return channels_innermost(y), y.new_empty(0, dtype=torch.float32)


@shapes_of("depthwise2d")
def _(sources, packed, bias, term, side):
    y = empty_channels_last(sources[0], sum(s.shape[1] for s in sources))
    return y, y.new_empty(0, dtype=torch.float32)


@operator("gate2d(Tensor x, Tensor skip, Tensor packed, Tensor bias, Tensor v, Tensor v0) -> Tensor")
def gate2d(x: Tensor, skip: Tensor, packed: Tensor, bias: Tensor, v: Tensor, v0: Tensor) -> Tensor:
    x, skip = channels_innermost(x), channels_innermost(skip)
    if runs_kernel(x, _gate2d.why_not(x, skip, packed), "gate2d"):
        return _gate2d.gate2d(x, skip, packed, bias, v, v0, checked=True)
    return channels_innermost(_gate2d.gate2d_reference(x, skip, packed, bias, v, v0))


@shapes_of("gate2d")
def _(x, skip, packed, bias, v, v0):
    return empty_channels_last(skip, skip.shape[1])


@operator("stem2d(Tensor x, Tensor packed, Tensor shift, int channels, int side) -> Tensor")
def stem2d(x: Tensor, packed: Tensor, shift: Tensor, channels: int, side: int) -> Tensor:
    if runs_kernel(x, _stem2d.why_not(x, packed, side), "stem2d"):
        return _stem2d.stem2d(x, packed, shift, channels, side, checked=True)
    return channels_innermost(_stem2d.stem2d_reference(x, packed, shift, channels, side))


@shapes_of("stem2d")
def _(x, packed, shift, channels, side):
    return empty_channels_last(x, channels, dtype=packed.dtype)


@operator(
    "embedding(Tensor x, Tensor? frequencies, bool cosines_first, Tensor[] weights, Tensor[] biases, str activation) "
    "-> Tensor"
)
def embedding(
    x: Tensor,
    frequencies: Tensor | None,
    cosines_first: bool,
    weights: list[Tensor],
    biases: list[Tensor],
    activation: str,
) -> Tensor:
    args = (x, frequencies, cosines_first, weights, biases, activation)
    if runs_kernel(x, _embedding.why_not(x, frequencies, weights, biases, activation), "embedding"):
        return _embedding.embedding(*args, checked=True)
    return _embedding.embedding_reference(*args)


@shapes_of("embedding")
def _(x, frequencies, cosines_first, weights, biases, activation):
    return weights[0].new_empty((x.shape[0], weights[-1].shape[0]))

"""Gradients of the operators against PyTorch's differentiation of the same computation, in float64 and half precision."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from voxtune.kernels import conv3d as cv
from voxtune.kernels import doubling_conv as doubling
from voxtune.kernels import packing
from voxtune.kernels import strided_conv as strided
from voxtune.kernels.gradients import (
    RecomputedNorm,
    norm_before,
    recompute_later,
    recomputing_results,
    register_gradients,
)
from voxtune.kernels.group_norm import norm_act_reference

ops = torch.ops.voxtune


@pytest.fixture(autouse=True, scope="module")
def _registered():
    register_gradients()


def last(x):
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def draw(*shape, dtype=torch.float64, seed=0):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)
    return (last(x) if x.dim() > 3 else x).to(dtype).requires_grad_()


def first(y):
    return y[0] if isinstance(y, tuple | list) else y


def check(operator, plain, tensors, *, tolerance=1e-10):
    """`operator` and `plain` are functions of the tensors; compares results and all gradients."""
    given = [t for group in tensors for t in (group if isinstance(group, list) else [group]) if t is not None]
    y, z = first(operator(*tensors)), plain(*tensors)
    assert float((y.double() - z.double()).norm()) <= tolerance * float(z.double().norm())
    dy = last(torch.randn(z.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)).to(y.dtype)
    own = torch.autograd.grad(y, given, dy)
    true = torch.autograd.grad(z, given, dy.to(z.dtype))
    for a, b, t in zip(own, true, given, strict=True):
        assert a.shape == t.shape and a.dtype == t.dtype
        assert float((a.double() - b.double()).norm()) <= tolerance * max(float(b.double().norm()), 1e-6)


def join(x):
    return torch.cat(list(x), dim=1)


def with_epilogue(y, shift, residual):
    if shift is not None:
        y = y + shift[(..., *[None] * (y.dim() - 2))]
    return y if residual is None else y + residual


@pytest.mark.parametrize("sources", [(8,), (8, 16)])
@pytest.mark.parametrize(
    ("kernel", "padding"),
    [
        ((3, 3, 3), (1, 1, 1, 1, 1, 1)),
        ((1, 3, 3), (0, 0, 1, 1, 1, 1)),
        ((3, 1, 1), (2, 0, 0, 0, 0, 0)),
        ((3, 3, 3), (2, 0, 1, 1, 0, 2)),
        ((3, 3, 3), (3, 0, 1, 1, 0, 4)),
    ],
)
@pytest.mark.parametrize(("rows", "residual"), [(None, False), (1, True), (2, False)])
def test_conv3d(sources, kernel, padding, rows, residual):
    K, voxels = 16, (3, 4, 5)
    x = [draw(2, c, *voxels, seed=c) for c in sources]
    weight = draw(K, sum(sources), *kernel)
    shift = None if rows is None else draw(rows, K)
    size = [v + a + b + 1 - k for v, k, a, b in zip(voxels, kernel, padding[::2], padding[1::2], strict=True)]
    added = draw(2, K, *size, seed=3) if residual else None
    around = [p for pair in list(zip(padding[::2], padding[1::2], strict=True))[::-1] for p in pair]
    check(
        lambda x, w, s, r: ops.conv3d(x, cv.pack(w), s, r, True, list(kernel), list(padding)),
        lambda x, w, s, r: with_epilogue(F.conv3d(F.pad(join(x), around), w), s, r),
        (x, weight, shift, added),
    )


@pytest.mark.parametrize("activation", ["none", "silu", "leaky_relu", "prelu", "gelu"])
@pytest.mark.parametrize(("sources", "groups"), [((8,), 4), ((8, 16), 3), ((8,), 8)])
@pytest.mark.parametrize("more", [False, True])
def test_norm(activation, sources, groups, more):
    C = sum(sources)
    x = [draw(2, c, 3, 4, 5, seed=c) for c in sources]
    weight, bias = draw(C, seed=1), draw(C, seed=2)
    shift, residual = (draw(2, C, seed=4), draw(2, C, 3, 4, 5, seed=5)) if more and groups < C else (None, None)
    slopes = draw(C, seed=6) if activation == "prelu" else None
    check(
        lambda x, w, b, s, p, r: ops.norm_act_kept(x, w, b, groups, 1e-5, s, activation, 0.1, p, r, []),
        lambda x, w, b, s, p, r: norm_act_reference(tuple(x), w, b, groups, 1e-5, s, activation, 0.1, p, r),
        (x, weight, bias, shift, slopes, residual),
    )


@pytest.mark.parametrize("sources", [(8,), (8, 4)])
@pytest.mark.parametrize(("rows", "residual"), [(None, False), (1, True), (2, False)])
def test_pointwise(sources, rows, residual):
    x = [draw(2, c, 3, 4, 5, seed=c) for c in sources]
    shift, added = None if rows is None else draw(rows, 6), draw(2, 6, 3, 4, 5, seed=3) if residual else None
    check(
        ops.pointwise,
        lambda x, w, s, r: with_epilogue(torch.einsum("nk...,mk->nm...", join(x), w), s, r),
        (x, draw(6, sum(sources)), shift, added),
    )


@pytest.mark.parametrize("rows", [None, 1, 2])
def test_add(rows):
    shift = None if rows is None else draw(rows, 6)
    check(ops.add, lambda a, b, s: with_epilogue(a + b, s, None), (draw(2, 6, 3, 4), draw(2, 6, 3, 4, seed=1), shift))


@pytest.mark.parametrize(
    ("voxels", "mode", "name"),
    [((3, 4, 5), "linear", "trilinear"), ((3, 4), "linear", "bilinear"), ((3, 4, 5), "nearest", "nearest")],
)
def test_upsample(voxels, mode, name):
    check(
        lambda x: ops.upsample(x, mode),
        lambda x: F.interpolate(x, scale_factor=2, mode=name),
        (draw(2, 4, *voxels),),
    )


@pytest.mark.parametrize("rows", [None, 1, 2])
def test_strided(rows):
    shift = None if rows is None else draw(rows, 16)
    check(
        lambda x, w, s: ops.strided_conv(x, strided.pack_strided(w), s, [3, 3, 3], [2, 2, 2], True),
        lambda x, w, s: with_epilogue(F.conv3d(x, w, stride=2, padding=1), s, None),
        (draw(2, 8, 5, 4, 6), draw(16, 8, 3, 3, 3), shift),
    )


@pytest.mark.parametrize(("kernel", "sources"), [((2, 2, 2), (8,)), ((4, 4, 4), (8, 16)), ((3, 3, 3), (8,))])
def test_doubling(kernel, sources):
    stride = (2, 2, 2)
    padding, more = doubling.paddings(kernel, stride)
    check(
        lambda x, w, s: ops.doubling_conv(x, doubling.pack_transposed(w), s, list(kernel), list(stride), True),
        lambda x, w, s: with_epilogue(F.conv_transpose3d(join(x), w, None, stride, padding, more), s, None),
        ([draw(2, c, 3, 2, 4, seed=c) for c in sources], draw(sum(sources), 8, *kernel), draw(1, 8)),
    )


def test_nearest_upsampling_folded_into_a_convolution():
    check(
        lambda x, w: ops.doubling_conv([x], doubling.pack_nearest(w, (2, 2, 2)), None, [4, 4, 4], [2, 2, 2], True),
        lambda x, w: F.conv3d(F.interpolate(x, scale_factor=2, mode="nearest"), w, padding=1),
        (draw(1, 8, 3, 4, 2), draw(8, 8, 3, 3, 3)),
    )


@pytest.mark.parametrize("images", [True, False])
def test_stem_and_head(images):
    x = [draw(2, 1, 3, 4, 5, seed=1), draw(2, 2, 3, 4, 5, seed=2)]
    if not images:  # as a network's own inputs
        for image in x:
            image.requires_grad_(False)
    weight, shift = draw(16, 3, 3, 3, 3), draw(1, 16)
    y = ops.stem(x, weight, shift)
    z = with_epilogue(F.conv3d(join(x), weight, padding=1), shift, None)
    given = [*(x if images else []), weight, shift]
    dy = last(torch.randn(z.shape, dtype=torch.float64))
    for a, b in zip(torch.autograd.grad(y, given, dy), torch.autograd.grad(z, given, dy), strict=True):
        torch.testing.assert_close(a, b)
    check(
        ops.head,
        lambda x, w, b: F.conv3d(x, w, b, padding=1),
        (draw(2, 16, 3, 4, 5), draw(2, 16, 3, 3, 3), draw(2)),
    )


def test_half_precision_errs_like_autocast():
    x, weight = draw(1, 16, 4, 4, 4, dtype=torch.bfloat16), draw(16, 16, 3, 3, 3, dtype=torch.bfloat16)
    check(
        lambda x, w: ops.conv3d([x], cv.pack(w), None, None, False),
        lambda x, w: F.conv3d(x.double(), w.double(), padding=1),
        (x, weight),
        tolerance=1e-2,
    )


@pytest.mark.parametrize("handed_on", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("reads_result", [True, False])
def test_sources_that_a_norm_hands_on(handed_on, reads_result):
    """Operators after the norm read its sources from it; the gradients are the same."""
    x = [draw(2, c, 3, 4, 5, seed=c) for c in (8, 4)]
    weight, bias, shift = draw(12, seed=1), draw(12, seed=2), draw(2, 12, seed=3)
    residual = draw(2, 12, 3, 4, 5, seed=4)

    def total(y, sources):
        value = sum((i + 1) * s.square().sum() for i, s in enumerate(sources))
        return value + y.square().sum() if reads_result else value

    y, _affine, again = norm_before(handed_on, x, weight, bias, 3, 1e-5, shift, "silu", 0.0, None, residual, [])
    assert len(again) == sum(handed_on)
    given = iter(again)
    own = total(y, [next(given) if on else s for s, on in zip(x, handed_on, strict=True)])
    z = norm_act_reference(tuple(x), weight, bias, 3, 1e-5, shift, "silu", residual=residual)
    inputs = [*x, *([weight, bias, shift, residual] if reads_result else [])]
    for a, b in zip(*(torch.autograd.grad(loss, inputs) for loss in (own, total(z, x))), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_packing_and_its_gradient(dtype):
    weight = draw(6, 5, 3, 1, 3).detach().to(dtype).requires_grad_()
    half = torch.float64 if dtype == torch.float64 else torch.bfloat16
    packed, expected = packing.pack_as(weight, half), cv.pack(weight).to(half)
    assert torch.equal(packed, expected)
    gradient = torch.randn(packed.shape, dtype=torch.float64).to(half)
    (own,), (true,) = (torch.autograd.grad(p, weight, gradient) for p in (packed, expected))
    assert torch.equal(own, true) and own.dtype == dtype and own.is_contiguous()


def test_a_norms_result_is_computed_again():
    """The convolution keeps the norm's source; its gradients are the same."""
    x, weight, bias = draw(1, 8, 3, 4, 5), draw(8, seed=1), draw(8, seed=2)
    matrix, computed = draw(8, 8, 3, 3, 3), []
    arguments = ("silu", 0.1, None, None)

    class Counted(RecomputedNorm):
        def __call__(self):
            computed.append(self)
            return super().__call__()

    def gradients(*, hidden):
        y, affine = ops.norm_act_kept([x], weight, bias, 4, 1e-5, None, *arguments, [])
        if hidden:
            recompute_later(y, Counted((x,), affine, arguments))
        with recomputing_results():
            z = ops.conv3d([y], cv.pack(matrix), None, None, False)[0]
        del y
        return torch.autograd.grad(z.square().sum(), [x, weight, bias, matrix])

    kept, again = gradients(hidden=False), gradients(hidden=True)
    assert len(computed) == 1, "once, for the gradient of the convolution's weight"
    for a, b in zip(kept, again, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_weights_without_memory_are_packed_without_a_kernel(monkeypatch):
    """A simulation's parameters: their packed weights have shapes only, and so have their gradients."""
    monkeypatch.setattr("voxtune.kernels.ops.INTERPRETED", True)
    with FakeTensorMode() as mode:
        weight = mode.from_tensor(torch.nn.Parameter(torch.zeros(16, 8, 3, 3, 3)))
        packed = packing.pack_as(weight, torch.bfloat16)
        assert packed.shape == (27, 16, 8) and packed.dtype == torch.bfloat16
        assert packing.opposite(packed, 0, 8).shape == (27, 8, 16)
        packed.float().sum().backward()
    assert weight.grad.shape == weight.shape

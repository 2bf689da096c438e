"""Gradients of the operators on a real GPU, through autograd and with the real kernels, against float64."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.nn import functional as F

from voxtune.kernels.group_norm import norm_act_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
HALVES = [torch.bfloat16, torch.float16]
TYPES = [*HALVES, torch.float32]
# Relative errors of results that are rounded once, and of sums in float32 of rounded values.
BAR = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 2e-6}
SUM_BAR = 2e-5
ops = torch.ops.voxtune


@pytest.fixture(autouse=True)
def _operators(caplog, monkeypatch):
    from voxtune.kernels import ops
    from voxtune.kernels.gradients import register_gradients

    register_gradients()
    monkeypatch.setattr(ops, "_logged", set())  # each reason is logged once
    caplog.set_level(logging.INFO, logger="voxtune")
    yield
    assert "falls back" not in caplog.text


def lasting(x):
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def draw(*shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    x = torch.randn(*shape, generator=generator).to("cuda", dtype)
    return lasting(x) if x.dim() > 3 else x


def leaf(x):
    return x.detach().requires_grad_()


def error(y, truth):
    return float((y.double() - truth).norm() / truth.norm())


def gradients(y, inputs, dy):
    return torch.autograd.grad(y, inputs, dy.to(y.dtype))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("mode", ["linear", "nearest"])
@pytest.mark.parametrize(("channels", "voxels"), [(64, (7, 5, 9)), (64, (32, 33, 64)), (40, (33, 16)), (7, (3, 1, 2))])
def test_upsample(dtype, mode, channels, voxels):
    x = leaf(draw(2, channels, *voxels, dtype=dtype))
    dy = draw(2, channels, *(2 * side for side in voxels), dtype=dtype, seed=1)
    (dx,) = gradients(ops.upsample(x, mode), [x], dy)
    name = mode if mode == "nearest" else {2: "bilinear", 3: "trilinear"}[len(voxels)]
    wide = leaf(x.double())
    (truth,) = gradients(F.interpolate(wide, scale_factor=2, mode=name), [wide], dy.double())
    assert dx.dtype == dtype and dx.movedim(1, -1).is_contiguous()
    assert error(dx, truth) < BAR[dtype]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("activation", ["none", "silu", "leaky_relu", "prelu", "gelu"])
@pytest.mark.parametrize(
    ("channels", "groups", "voxels"),
    [((64,), 32, (33, 32, 31)), ((64, 64), 32, (16, 17, 9)), ((24, 40), 64, (17, 9, 11)), ((13,), 13, (33, 31))],
)
def test_norm(dtype, activation, channels, groups, voxels):
    total = sum(channels)
    sources = [leaf(draw(2, c, *voxels, dtype=dtype, seed=i) + 1) for i, c in enumerate(channels)]
    weight, bias = (leaf(draw(total, dtype=torch.float32, seed=i)) for i in (5, 6))
    slopes = leaf(draw(total, dtype=torch.float32, seed=8)) if activation == "prelu" else None
    residual = leaf(draw(2, total, *voxels, dtype=dtype, seed=9))
    dy = draw(2, total, *voxels, dtype=dtype, seed=10)
    given = [t for t in (*sources, weight, bias, residual, slopes) if t is not None]
    y = ops.norm_act_kept(sources, weight, bias, groups, 1e-5, None, activation, 0.2, slopes, residual, [])[0]
    own = gradients(y, given, dy)
    wide = [leaf(t.double()) for t in given]
    parts, (w, b, r, *p) = wide[: len(sources)], wide[len(sources) :]
    z = norm_act_reference(tuple(parts), w, b, groups, 1e-5, None, activation, 0.2, p[0] if p else None, r)
    for a, t, of in zip(own, gradients(z, wide, dy.double()), given, strict=True):
        assert error(a, t) < (3e-5 if of.dim() == 1 else 2 * BAR[dtype]), tuple(of.shape)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("channels", "groups", "voxels"), [((64,), 32, (64, 33, 32)), ((24, 40), 64, (17, 9, 11))])
def test_gradients_of_later_operators_are_added_by_the_norm(dtype, channels, groups, voxels):
    from voxtune.kernels.channel_sums import remembered_sums
    from voxtune.kernels.gradients import norm_before

    total = sum(channels)
    sources = [leaf(draw(2, c, *voxels, dtype=dtype, seed=i) + 1) for i, c in enumerate(channels)]
    weight, bias = (leaf(draw(total, dtype=torch.float32, seed=i)) for i in (5, 6))
    dy, later = draw(2, total, *voxels, dtype=dtype, seed=10), [torch.randn_like(s) for s in sources]
    handed_on = (True,) * len(sources)
    y, _, again = norm_before(handed_on, sources, weight, bias, groups, 1e-5, None, "silu", 0.0, None, None, [])
    own = torch.autograd.grad([y, *again], sources, [dy, *later])
    wide = [leaf(s.double()) for s in sources]
    z = norm_act_reference(tuple(wide), weight.double(), bias.double(), groups, 1e-5, None, "silu")
    true = gradients(z, wide, dy.double())
    for dx, t, more in zip(own, true, later, strict=True):
        expected = t + more.double()
        assert error(dx, expected) < 2 * BAR[dtype]
        sums = remembered_sums(dx)
        size = float(expected.flatten(2).abs().sum(2).norm())
        assert float((sums.sum(1).double() - expected.flatten(2).sum(2)).norm()) < 5e-6 * size


def test_biases_take_their_gradients_from_norms(monkeypatch):
    """The sum over the voxels is computed only where no norm has computed the gradient."""
    from voxtune.kernels import channel_sums
    from voxtune.kernels.conv3d import pack

    counted, counting = [], channel_sums.channel_sums
    monkeypatch.setattr(channel_sums, "channel_sums", lambda x: counted.append(x.shape) or counting(x))
    x, w = draw(2, 64, 16, 17, 18, dtype=torch.bfloat16), draw(64, 64, 3, 3, 3, dtype=torch.bfloat16) * 0.02
    bias, weight, offset = (leaf(draw(*s, dtype=torch.float32, seed=i)) for i, s in enumerate([(1, 64), (64,), (64,)]))
    dy = draw(2, 64, 16, 17, 18, dtype=torch.bfloat16, seed=3)
    for uses, sums in ((1, 0), (2, 1)):
        counted.clear()
        y, statistics = ops.conv3d([x], pack(w), bias, None, True)
        norms = [
            ops.norm_act_kept([y], weight, offset, 32, 1e-5, None, "silu", 0.0, None, None, [statistics])[0]
            for _ in range(uses)
        ]
        (own,) = gradients(sum(norms), [bias], dy)
        wide = leaf(bias.double())
        z = F.conv3d(x.double(), w.double(), padding=1) + wide[..., None, None, None]
        z = uses * norm_act_reference((z,), weight.double(), offset.double(), 32, 1e-5, None, "silu")
        (truth,) = gradients(z, [wide], dy.double())
        assert len(counted) == sums
        # A bias moves the mean of its channel only, which GroupNorm partly removes: the sum cancels.
        assert float((own - truth).norm()) < 3e-3 * float(dy.double().flatten(2).norm(dim=2).norm()), uses


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("channels", "voxels"), [(64, (64, 33, 32)), (40, (5, 6, 7)), (7, (33, 31)), (192, (16, 16, 16))]
)
def test_sums_over_voxels(dtype, channels, voxels):
    a, b = (leaf(draw(2, channels, *voxels, dtype=dtype, seed=i)) for i in (0, 1))
    dy = draw(2, channels, *voxels, dtype=dtype, seed=2)
    for rows in (1, 2):
        shift = leaf(draw(rows, channels, dtype=torch.float32))
        (own,) = gradients(ops.add(a, b, shift), [shift], dy)
        truth = dy.double().flatten(2).sum(2)
        truth = truth.sum(0, keepdim=True) if rows == 1 else truth
        size = float(dy.double().flatten(2).abs().sum(2).norm())
        assert float((own.double() - truth).norm()) < 5e-6 * size


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("images", [True, False])
@pytest.mark.parametrize(
    ("few", "voxels"), [((1, 2), (16, 17, 35)), ((3,), (64, 64, 64)), ((4, 4), (9, 20, 70)), ((1, 2), (33, 30))]
)
def test_stem(dtype, images, few, voxels):
    sources = [draw(2, c, *voxels, dtype=torch.float32, seed=i) for i, c in enumerate(few)]
    sources = sources if images else [leaf(s) for s in sources]
    weight = leaf(draw(64, sum(few), *[3] * len(voxels), dtype=dtype))
    shift = leaf(draw(1, 64, dtype=torch.float32))
    dy = draw(2, 64, *voxels, dtype=dtype, seed=3)
    given = [weight, shift, *([] if images else sources)]
    own = gradients(ops.stem(sources, weight, shift), given, dy)
    wide = [leaf(s.to(dtype).double()) for s in sources]
    w, s = leaf(weight.double()), leaf(shift.double())
    convolution = F.conv3d if len(voxels) == 3 else F.conv2d
    y = convolution(torch.cat(wide, 1), w, s[0], padding=1)
    true = gradients(y, [w, s, *([] if images else wide)], dy.double())
    for i, (a, t) in enumerate(zip(own, true, strict=True)):
        # The weight's gradient is rounded to its type.
        assert error(a, t) < (SUM_BAR if i == 1 else BAR[dtype]), i


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("of", [torch.float32, None])
@pytest.mark.parametrize(
    ("channels", "few", "voxels"), [(64, 1, (64, 64, 64)), (64, 4, (9, 20, 70)), (24, 8, (5, 9, 17)), (64, 3, (33, 30))]
)
def test_head(dtype, of, channels, few, voxels):
    x = leaf(draw(2, channels, *voxels, dtype=dtype))
    weight, bias = leaf(draw(few, channels, *[3] * len(voxels), dtype=dtype)), leaf(draw(few, dtype=torch.float32))
    dy = draw(2, few, *voxels, dtype=dtype, seed=3)
    own = gradients(ops.head(x, weight, bias, of), [x, weight, bias], dy)
    wide = [leaf(t.double()) for t in (x, weight, bias)]
    convolution = F.conv3d if len(voxels) == 3 else F.conv2d
    true = gradients(convolution(*wide, padding=1), wide, dy.double())
    for i, (a, t) in enumerate(zip(own, true, strict=True)):
        assert error(a, t) < (SUM_BAR if i == 2 else BAR[dtype]), i


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("K", "C", "taps"), [(64, 64, (3, 3, 3)), (256, 512, (3, 3, 3)), (40, 24, (1, 3, 3)), (8, 8, (3, 1, 1))]
)
def test_packing_is_exact(dtype, K, C, taps):
    from voxtune.kernels import conv3d, packing

    weight = leaf(draw(K, C, *taps, dtype=torch.float32).contiguous())
    packed = packing.pack_as(weight, dtype)
    assert torch.equal(packed, conv3d.pack(weight).to(dtype))
    dy = draw(*packed.shape, dtype=dtype)
    (own,) = gradients(packed, [weight], dy)
    assert torch.equal(own, conv3d.unpack(dy.float(), taps)) and own.is_contiguous()
    for first, channels in ((0, C), (C // 3, C - C // 3)):
        own = packing.opposite(packed.detach(), first, channels)
        assert torch.equal(own, packing.opposite_reference(packed.detach(), first, channels))


def test_kernels_are_deterministic():
    from voxtune.kernels import channel_sums, edge_gradients, upsample_backward

    wide, narrow = draw(1, 64, 64, 64, 64, dtype=torch.bfloat16), draw(1, 2, 64, 64, 64, dtype=torch.float32)
    for function in (
        lambda: channel_sums.channel_sums(wide),
        lambda: edge_gradients.tap_sums(narrow, wide, ahead=True)[0],
        lambda: upsample_backward.upsample_backward(wide, "linear"),
    ):
        expected = function()
        assert all(torch.equal(function(), expected) for _ in range(5))

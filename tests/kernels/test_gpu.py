"""The kernels on a real GPU, through their operators, in every type, over odd shapes, against float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
HALVES = [torch.bfloat16, torch.float16]
TYPES = [*HALVES, torch.float32]
BAR = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 2e-6}


@pytest.fixture(autouse=True)
def _operators():
    from voxtune.kernels import ops  # noqa: F401


def lasting(x):
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def draw(*shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to("cuda", dtype)


def error(y, truth):
    return float((y.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("channels", [(64,), (64, 64), (128, 64), (192, 128), (256, 192), (40,)])
@pytest.mark.parametrize("voxels", [(5, 9, 17), (32, 32, 32), (31, 33)])
def test_group_norm(dtype, channels, voxels):
    groups = 32 if sum(channels) % 32 == 0 else 8
    sources = [lasting(draw(2, c, *voxels, dtype=dtype, seed=i)) + 3 for i, c in enumerate(channels)]
    weight, bias = (draw(sum(channels), dtype=torch.float32, seed=i) for i in (5, 6))
    shift = draw(2, sum(channels) + 5, dtype=torch.float32, seed=7)[:, 3:-2]
    y = torch.ops.voxtune.norm_act(sources, weight, bias, groups, 1e-5, shift, "silu", 0.0, None, None, [])
    x = torch.cat(sources, 1).double() + shift.double().view(2, -1, *[1] * len(voxels))
    truth = F.silu(F.group_norm(x, groups, weight.double(), bias.double(), 1e-5))
    assert error(y, truth) < BAR[dtype]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("activation", ["none", "silu", "relu", "leaky_relu", "prelu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("channels", "groups", "voxels"),
    [
        ((32,), 32, (64, 64, 64)),
        ((320,), 320, (4, 5, 4)),
        ((24, 40), 64, (17, 9, 11)),
        ((13,), 13, (33, 31)),
        ((136,), 8, (9, 20, 7)),
        ((600,), 600, (3, 5, 2)),
    ],
)
def test_norm_act(dtype, activation, channels, groups, voxels):
    from voxtune.kernels.group_norm import norm_act_reference, why_not

    total = sum(channels)
    sources = [lasting(draw(2, c, *voxels, dtype=dtype, seed=i)) + 3 for i, c in enumerate(channels)]
    weight, bias = (draw(total, dtype=torch.float32, seed=i) for i in (5, 6))
    slopes = draw(total, dtype=torch.float32, seed=8) if activation == "prelu" else None
    for residual in (None, lasting(draw(2, total, *voxels, dtype=dtype, seed=9))):
        assert why_not(tuple(sources), groups, activation, slopes, residual) is None
        y = torch.ops.voxtune.norm_act(
            *(sources, weight, bias, groups, 1e-5, None, activation, 0.2, slopes, residual, [])
        )
        truth = norm_act_reference(
            *(tuple(s.double() for s in sources), weight.double(), bias.double(), groups, 1e-5, None, activation, 0.2),
            *(None if x is None else x.double() for x in (slopes, residual)),
        )
        assert y.movedim(1, -1).is_contiguous()
        assert error(y, truth) < BAR[dtype]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("channels", "voxels"), [(96, (3, 40, 33)), (384, (2, 9, 8)), (24, (31, 17)), (7, (4, 5, 6))])
def test_rms_norm(dtype, channels, voxels):
    from voxtune.kernels.rms_norm import rms_norm_act_reference

    x = lasting(draw(2, channels, *voxels, dtype=dtype)) + 1
    weight, bias = (draw(channels, dtype=torch.float32, seed=i) for i in (5, 6))
    for given, wide in ((None, None), (bias, bias.double())):
        y = torch.ops.voxtune.rms_norm_act(x, weight, given, 0.0, 1e-13, "silu")
        truth = rms_norm_act_reference(x.double(), weight.double(), wide, 0.0, 1e-13, "silu")
        assert error(y, truth) < BAR[dtype]


CUBE, AROUND, CAUSAL = (3, 3, 3), (1, 1, 1, 1, 1, 1), (2, 0, 1, 1, 1, 1)
# (batch, channels of each source, output channels, voxels, kernel, padding)
CONVOLUTIONS = [
    (1, (64,), 64, (128, 128, 128), CUBE, AROUND),
    (1, (128,), 64, (64, 64, 64), CUBE, AROUND),
    (2, (64,), 128, (33, 31, 35), CUBE, AROUND),
    (1, (192,), 192, (32, 32, 32), CUBE, AROUND),
    (1, (320,), 192, (16, 16, 16), CUBE, AROUND),
    (1, (512,), 256, (8, 8, 8), CUBE, AROUND),
    (2, (256,), 256, (9, 7, 5), CUBE, AROUND),
    (1, (16,), 48, (1, 1, 1), CUBE, AROUND),
    (1, (80,), 16, (3, 40, 41), CUBE, AROUND),
    # Few channels, and numbers of them that are not multiples of 16.
    *((1, (c,), k, (37, 33, 41), CUBE, AROUND) for c in (8, 16, 24, 32, 64) for k in (8, 16, 24, 32, 40)),
    (1, (16,), 64, (37, 33, 41), CUBE, AROUND),
    (1, (32,), 72, (37, 33, 41), CUBE, AROUND),
    (2, (8,), 8, (3, 5, 9), CUBE, AROUND),
    # Two sources.
    (1, (64, 64), 64, (37, 33, 41), CUBE, AROUND),
    (1, (32, 32), 32, (37, 33, 41), CUBE, AROUND),
    (2, (16, 8), 16, (33, 31, 35), CUBE, AROUND),
    (1, (40, 72), 128, (33, 31, 35), CUBE, AROUND),
    (1, (256, 128), 256, (8, 9, 7), CUBE, AROUND),
    (1, (24, 8), 8, (5, 6, 7), CUBE, AROUND),
    # Other paddings and kernels.
    (1, (64,), 64, (37, 33, 41), CUBE, CAUSAL),
    (1, (32, 32), 32, (37, 33, 41), CUBE, (0, 2, 2, 0, 2, 0)),
    (1, (96,), 96, (35, 34, 36), CUBE, (0, 0, 0, 1, 1, 0)),
    (1, (64,), 32, (9, 33, 65), (1, 3, 3), (0, 0, 1, 1, 1, 1)),
    (1, (96,), 192, (9, 33, 65), (1, 3, 3), (0, 0, 1, 1, 1, 1)),
    (2, (64, 32), 64, (9, 33, 65), (3, 1, 1), (2, 0, 0, 0, 0, 0)),
    (1, (384,), 384, (5, 8, 9), (3, 1, 1), (1, 1, 0, 0, 0, 0)),
    (1, (8,), 8, (4, 5, 6), (3, 1, 3), (1, 1, 0, 0, 2, 1)),
]


def whole_problem(batch, channels, k, voxels, kernel, padding, dtype):
    """(sources, weight, shift, residual, result) in whole numbers that every type holds; the result by PyTorch in float32."""
    from voxtune.kernels.conv3d import result_size

    generator = torch.Generator().manual_seed(0)
    c = sum(channels)
    sources = [
        lasting(torch.randint(-2, 3, (batch, n, *voxels), generator=generator).to("cuda", dtype)) for n in channels
    ]
    taps = kernel[0] * kernel[1] * kernel[2]
    w = (torch.rand(k, c, *kernel, generator=generator) < min(0.5, 160 / (taps * c))).to("cuda", dtype)
    w *= torch.randint(0, 2, w.shape, generator=generator).to("cuda", dtype) * 2 - 1
    shift = torch.randint(-3, 4, (batch, k + 5), generator=generator).to("cuda", torch.float32)[:, 3:-2]
    size = result_size(sources[0], kernel, padding)
    residual = lasting(torch.randint(-4, 5, (batch, k, *size), generator=generator).to("cuda", dtype))
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        x = F.pad(torch.cat(sources, 1).float(), (*padding[4:], *padding[2:4], *padding[:2]))
        truth = F.conv3d(x, w.float()) + shift[:, :, None, None, None] + residual.float()
    assert float(truth.abs().max()) <= 256
    return sources, w, shift, residual, truth


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("batch", "channels", "k", "voxels", "kernel", "padding"), CONVOLUTIONS)
def test_conv3d_is_exact_on_integers_and_its_statistics_are_right(dtype, batch, channels, k, voxels, kernel, padding):
    from voxtune.kernels.conv3d import pack

    sources, w, shift, residual, truth = whole_problem(batch, channels, k, voxels, kernel, padding, dtype)
    y, statistics = torch.ops.voxtune.conv3d(sources, pack(w), shift, residual, True, kernel, padding)
    assert torch.equal(y.float(), truth)
    plain, _ = torch.ops.voxtune.conv3d(sources, pack(w), None, None, False, kernel, padding)
    assert torch.equal(plain.float(), truth - residual.float() - shift[:, :, None, None, None])
    count, mean, squares = statistics.double().unbind(2)
    total = count.sum(1)
    middle = (count * mean).sum(1) / total
    spread = (squares + count * (mean - middle[:, None]).square()).sum(1)
    flat = truth.double().flatten(2)
    assert bool((total == flat.shape[2]).all())
    assert float((middle - flat.mean(2)).abs().max()) < 1e-4
    own = (flat - flat.mean(2, keepdim=True)).square().sum(2)
    assert float((spread - own).abs().max()) <= 1e-4 * float(own.max()) + 1e-6
    weight, bias = draw(k, dtype=torch.float32), draw(k, dtype=torch.float32, seed=1)
    groups = 16 if k % 16 == 0 else 8
    for g in (groups, k) if sum(voxels) > 3 else (groups,):
        given = (weight, bias, g, 1e-5, None, "none", 0.0, None, None, [statistics])
        own = torch.group_norm(truth.double(), g, weight.double(), bias.double(), 1e-5)
        assert error(torch.ops.voxtune.norm_act([y], *given), own) < BAR[dtype]


@pytest.mark.parametrize("bulk", [True, False])
@pytest.mark.parametrize(("channels", "k"), [((64,), 64), ((32, 16), 32), ((8,), 8)])
def test_conv3d_of_any_device(channels, k, bulk):
    """The plain kernel with the tiles of devices without Hopper's instructions, by descriptors and by pointers."""
    from voxtune.kernels import conv3d as cv
    from voxtune.kernels.conv3d_tiles import Device, tiles

    sources, w, shift, residual, truth = whole_problem(1, channels, k, (9, 17, 33), CUBE, AROUND, torch.bfloat16)
    tile = tiles(1, 9, 17, 33, channels, k, device=Device(hopper=False, halo=False, shared=99 << 10))
    y, _ = cv.convolve(tuple(sources), cv.pack(w), tile, shift, residual, True, bulk=bulk)
    assert torch.equal(y.float(), truth)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("channels", "k", "voxels"), [((64, 64), 64, (9, 17, 33)), ((192,), 256, (8, 8, 8)), ((48, 16), 80, (31, 5))]
)
def test_pointwise(dtype, channels, k, voxels):
    sources = [lasting(draw(2, c, *voxels, dtype=dtype, seed=i)) for i, c in enumerate(channels)]
    w, shift = draw(k, sum(channels), dtype=dtype), draw(2, k + 5, dtype=torch.float32, seed=3)[:, 3:-2]
    residual = lasting(draw(2, k, *voxels, dtype=dtype, seed=4))
    y = torch.ops.voxtune.pointwise(sources, w, shift, residual)
    truth = torch.einsum("nc...,kc->nk...", torch.cat(sources, 1).double(), w.double())
    truth = truth + shift.double().view(2, k, *[1] * len(voxels)) + residual.double()
    assert error(y, truth) < BAR[dtype]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("channels", [8, 24, 32, 40, 64])
@pytest.mark.parametrize("k", [1, 2, 3, 14])
def test_pointwise_heads_are_stored_in_float32(dtype, channels, k):
    x, w, bias = (
        lasting(draw(2, channels, 9, 17, 33, dtype=dtype)),
        draw(k, channels, dtype=dtype),
        draw(1, k, dtype=torch.float32),
    )
    y = torch.ops.voxtune.pointwise([x], w, bias, None, torch.float32)
    truth = torch.einsum("nc...,kc->nk...", x.double(), w.double()) + bias.double().view(1, k, 1, 1, 1)
    assert y.dtype == torch.float32 and error(y, truth) < 1e-5


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("mode", ["linear", "nearest"])
@pytest.mark.parametrize("voxels", [(7, 5, 9), (33, 16)])
def test_upsample(dtype, mode, voxels):
    x = lasting(draw(2, 64, *voxels, dtype=dtype))
    name = mode if mode == "nearest" else {2: "bilinear", 3: "trilinear"}[len(voxels)]
    truth = F.interpolate(x.double(), scale_factor=2, mode=name)
    assert error(torch.ops.voxtune.upsample(x, mode), truth) < BAR[dtype]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("voxels", [(8, 9, 35), (64, 64, 64), (33, 30)])
def test_stem_and_head(dtype, voxels):
    sides, conv = len(voxels), F.conv3d if len(voxels) == 3 else F.conv2d
    x, mask = draw(1, 1, *voxels, dtype=torch.float32), draw(1, 2, *voxels, dtype=torch.float32, seed=1)
    w, shift = draw(64, 3, *[3] * sides, dtype=dtype), draw(1, 64, dtype=torch.float32, seed=2)
    y = torch.ops.voxtune.stem([x, mask], w, shift)
    truth = conv(torch.cat([x, mask], 1).to(dtype).double(), w.double(), shift[0].double(), padding=1)
    assert error(y, truth) < BAR[dtype]
    for k in (1, 4):
        h, w_h, bias = (
            lasting(draw(2, 64, *voxels, dtype=dtype)),
            draw(k, 64, *[3] * sides, dtype=dtype),
            draw(k, dtype=torch.float32),
        )
        out = torch.ops.voxtune.head(h, w_h, bias)
        assert error(out, conv(h.double(), w_h.double(), bias.double(), padding=1)) < BAR[dtype]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("channels", [8, 24, 32, 64])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 8])
def test_heads_by_lines(dtype, channels, k):
    for batch, voxels in ((2, (5, 9, 17)), (1, (33, 70, 130)), (1, (1, 1, 1))):
        x, w = lasting(draw(batch, channels, *voxels, dtype=dtype)), draw(k, channels, 3, 3, 3, dtype=dtype)
        bias = draw(k, dtype=torch.float32)
        truth = F.conv3d(x.double(), w.double(), bias.double(), padding=1)
        y = torch.ops.voxtune.head(x, w, bias, torch.float32)
        assert y.dtype == torch.float32 and error(y, truth) < 1e-5
        assert error(torch.ops.voxtune.head(x, w, bias), truth) < BAR[dtype]


def test_noise_is_the_same_as_on_a_cpu():
    from voxtune.diffusion.noise import normal_batch as plain
    from voxtune.kernels.noise import normal_batch

    for seed, indices, draw, shape in [(7, [3, 2**40 + 5], 249, (1, 65, 63, 33)), (2**63 - 1, [0], 1, (4, 64, 64, 64))]:
        found = normal_batch(seed, torch.tensor(indices, device="cuda"), draw, shape).cpu()
        assert float((found - plain(seed, indices, draw, shape)).abs().max()) < 5e-6


@pytest.mark.parametrize("dtype", TYPES)
def test_add(dtype):
    a, b = (lasting(draw(2, 40, 5, 6, 7, dtype=dtype, seed=i)) for i in (0, 1))
    shift = draw(2, 40, dtype=torch.float32)
    truth = a.double() + b.double() + shift.double()[:, :, None, None, None]
    assert error(torch.ops.voxtune.add(a, b, shift), truth) < BAR[dtype]


DOUBLING = [  # (channels of each source, output channels, voxels, kernel, stride)
    ((64,), 32, (64, 64, 64), (2, 2, 2), (2, 2, 2)),
    ((320,), 320, (4, 4, 4), (2, 2, 2), (2, 2, 2)),
    ((40,), 24, (5, 17, 9), (2, 2, 2), (2, 2, 2)),
    ((64,), 32, (3, 20, 24), (1, 2, 2), (1, 2, 2)),
    ((32, 32), 16, (32, 32, 32), (3, 3, 3), (2, 2, 2)),
    ((40, 24), 72, (5, 9, 17), (3, 3, 3), (2, 2, 2)),
    ((128,), 128, (32, 32, 32), (4, 4, 4), (2, 2, 2)),
    ((72,), 136, (7, 5, 33), (4, 4, 4), (2, 2, 2)),
    ((64,), 64, (6, 16, 16), (3, 4, 4), (1, 2, 2)),
    ((256,), 256, (1, 1, 1), (4, 4, 4), (2, 2, 2)),
    ((128,), 64, (33, 31), (4, 4), (2, 2)),
    ((64, 16), 24, (16, 70), (3, 3), (2, 2)),
]
STRIDED = [  # (channels in and out, voxels, kernel, stride)
    (32, 64, (128, 128, 128), (3, 3, 3), (2, 2, 2)),
    (64, 128, (65, 64, 32), (3, 3, 3), (2, 2, 2)),
    (320, 320, (8, 8, 8), (3, 3, 3), (2, 2, 2)),
    (40, 72, (5, 18, 34), (3, 3, 3), (2, 2, 2)),
    (32, 64, (9, 40, 48), (1, 3, 3), (1, 2, 2)),
    (64, 64, (6, 20, 24), (3, 3, 3), (1, 2, 2)),
    (64, 32, (6, 12, 15), (3, 3, 3), (2, 2, 1)),
    (64, 128, (1, 2, 2), (3, 3, 3), (2, 2, 2)),
    (64, 128, (34, 62), (3, 3), (2, 2)),
]


def whole_numbers(dtype, c, k, taps, shape):
    """Weights of -1, 0 and 1, few enough that every type holds the sums; a shift that is a slice of a wider tensor."""
    generator = torch.Generator().manual_seed(c + k)
    w = (torch.rand(shape, generator=generator) < 96 / (c * taps)).float()
    w *= torch.randint(0, 2, shape, generator=generator) * 2 - 1
    shift = torch.randint(-3, 4, (2, k + 5), generator=generator).to("cuda", torch.float32)[:, 3:-2]

    def x(c, voxels):
        return lasting(torch.randint(-2, 3, (2, c, *voxels), generator=generator).to("cuda", dtype))

    return w.to("cuda", dtype), shift, x


def check_with_statistics(y, plain, statistics, truth):
    assert float(truth.abs().max()) <= 256, "whole numbers that every type holds"
    assert torch.equal(y.float(), truth) and torch.equal(plain, y)
    count, mean, squares = statistics.double().unbind(2)
    total, flat = count.sum(1), truth.double().flatten(2)
    assert bool((total == flat.shape[2]).all())
    middle = (count * mean).sum(1) / total
    spread = (squares + count * (mean - middle[:, None]).square()).sum(1) / total
    variance = flat.var(2, correction=0)  # zero for one voxel
    assert float((middle - flat.mean(2)).abs().max()) < 1e-3
    assert float((spread - variance).abs().max()) < 1e-4 * (1 + float(variance.max()))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("channels", "k", "voxels", "kernel", "stride"), DOUBLING)
def test_doubling_conv_is_exact_on_integers(dtype, channels, k, voxels, kernel, stride, caplog):
    from voxtune.kernels.doubling_conv import pack_transposed, paddings

    w, shift, x = whole_numbers(dtype, sum(channels), k, 8, (sum(channels), k, *kernel))
    sources = [x(c, voxels) for c in channels]
    packed = pack_transposed(w)
    own = torch.ops.voxtune.doubling_conv
    y, statistics = own(sources, packed, shift, kernel, stride, True)
    plain = own(sources, packed, shift, kernel, stride, False)[0]
    padding, output_padding = paddings(kernel, stride)
    convolution = F.conv_transpose3d if len(kernel) == 3 else F.conv_transpose2d
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        truth = convolution(
            torch.cat(sources, 1).float(), w.float(), None, stride, padding, output_padding
        ) + shift.view(2, k, *[1] * len(kernel))
    check_with_statistics(y, plain, statistics, truth)
    assert "falls back" not in caplog.text


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("scale", [(2, 2, 2), (1, 2, 2), (2, 2)])
def test_nearest_upsampling_folded_into_a_convolution(dtype, scale):
    from voxtune.kernels.doubling_conv import folded_kernel, pack_nearest

    kernel = (3,) * len(scale)
    x = lasting(draw(2, 64, *(9, 17, 20)[-len(scale) :], dtype=dtype))
    w, shift = draw(72, 64, *kernel, dtype=torch.float32), draw(2, 72, dtype=torch.float32)
    packed = pack_nearest(w, scale).to(dtype)
    y, _ = torch.ops.voxtune.doubling_conv([x], packed, shift, folded_kernel(kernel, scale), scale, True)
    up = F.interpolate(x.double(), scale_factor=tuple(map(float, scale)), mode="nearest")
    convolution = F.conv3d if len(scale) == 3 else F.conv2d
    truth = convolution(up, w.double(), padding=1) + shift.double().view(2, 72, *[1] * len(scale))
    assert error(y, truth) < 1.5 * BAR[dtype]  # weights and result are rounded


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("c", "k", "voxels", "kernel", "stride"), STRIDED)
def test_strided_conv_is_exact_on_integers(dtype, c, k, voxels, kernel, stride, caplog):
    from voxtune.kernels.strided_conv import pack_strided

    w, shift, x = whole_numbers(dtype, c, k, 27, (k, c, *kernel))
    source, packed, own = x(c, voxels), pack_strided(w), torch.ops.voxtune.strided_conv
    y, statistics = own(source, packed, shift, kernel, stride, True)
    plain = own(source, packed, shift, kernel, stride, False)[0]
    convolution = F.conv3d if len(kernel) == 3 else F.conv2d
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        truth = convolution(source.float(), w.float(), None, stride, [s // 2 for s in kernel])
    check_with_statistics(y, plain, statistics, truth + shift.view(2, k, *[1] * len(kernel)))
    assert "falls back" not in caplog.text


def elementwise_rows(check, *arguments):
    """The rows of a check whose kernels were compiled before, many at a time: there are about a hundred."""
    from voxtune.kernels.compile_workers import compiling
    from voxtune.kernels.precompile import compiled_ahead

    with compiling(), compiled_ahead(lambda: list(check(*arguments))):
        pass
    return list(check(*arguments))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("what", ["operations", "chains"])
def test_elementwise(dtype, what):
    from tests.kernels import elementwise_checks

    rows = elementwise_rows(getattr(elementwise_checks, what), dtype, "cuda")
    assert len(rows) > 40
    for row in rows:
        assert row["error"] < BAR[getattr(torch, row["type"].removeprefix("torch."))], row
        assert row["written"] and row["as_pytorch"], row


def test_elementwise_with_offsets_of_64_bits_and_special_values():
    from tests.kernels import elementwise_checks

    assert all(row["error"] < BAR[torch.float32] for row in elementwise_rows(elementwise_checks.wide, "cuda"))
    for row in elementwise_rows(elementwise_checks.special, "cuda", 2e-5):
        assert not row["wrong"], row


def test_elementwise_reaches_beyond_32_bits():
    """The second half of the channels of more than 2^31 elements."""
    wide = torch.zeros(2**20 + 7, 4096, dtype=torch.bfloat16, device="cuda")
    wide[-1] = 3
    y = torch.ops.voxtune.elementwise([wide[:, :2048], wide[:, 2048:]], "add 0 1; mul 2 2.0", torch.bfloat16)
    assert torch.equal(y[-1], torch.full_like(y[-1], 12)) and not y[:-1].any()

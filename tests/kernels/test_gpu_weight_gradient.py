"""The weight gradient of the convolution on a real GPU: exact on integers, by both kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from voxtune.kernels import conv3d as cv
from voxtune.kernels import conv3d_weight_gradient as wg

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def lasting(x):
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def integers(*shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return lasting(torch.randint(-2, 3, shape, generator=generator).to("cuda", dtype))


def methods():
    """Each kernel's default tile; a device other than Hopper has the plain kernel alone."""
    return [False, True] if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) else [False]


@pytest.mark.parametrize("hopper", methods())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("N", "channels", "K", "voxels", "padding"),
    [
        (1, (64,), 64, (32, 32, 32), cv.AROUND),
        (2, (64, 128), 64, (9, 13, 21), cv.AROUND),
        (1, (40,), 72, (17, 5, 9), cv.AROUND),
        (2, (192,), 128, (8, 8, 8), cv.AROUND),
        (1, (72,), 8, (11, 10, 12), (0,) * 6),
        (1, (8,), 64, (6, 40, 3), (2, 0, 1, 1, 0, 2)),
        (1, (320,), 256, (16, 16, 16), cv.AROUND),
    ],
)
def test_exact_on_integers(hopper, dtype, N, channels, K, voxels, padding):
    sources = [integers(N, c, *voxels, dtype=dtype, seed=i) for i, c in enumerate(channels)]
    dy = integers(N, K, *cv.result_size(sources[0], cv.CUBE, padding), dtype=dtype, seed=9)
    assert wg.why_not(dy, sources, cv.CUBE, padding, hopper=hopper) is None
    dw = wg.weight_gradient(dy, sources, padding, torch.float32, hopper=hopper)
    truth = wg.weight_gradient_reference(dy.double(), [s.double() for s in sources], padding)
    assert torch.equal(dw.double(), truth)
    assert torch.equal(dw, wg.weight_gradient(dy, sources, padding, torch.float32, hopper=hopper)), "not deterministic"


@pytest.mark.parametrize("hopper", methods())
@pytest.mark.parametrize("programs", [1, 7, 131, 5000])
def test_any_division_of_the_steps_gives_the_same(hopper, programs):
    sources = [integers(1, 128, 12, 24, 24, dtype=torch.bfloat16, seed=1)]
    dy = integers(1, 64, 12, 24, 24, dtype=torch.bfloat16, seed=2)
    given = (dy, sources, cv.AROUND, torch.float32)
    truth = wg.weight_gradient_reference(dy.double(), [s.double() for s in sources], cv.AROUND)
    assert torch.equal(wg.weight_gradient(*given, hopper=hopper, programs=programs).double(), truth)


@pytest.mark.parametrize(
    "form",
    [
        {"registers": False},
        {"registers": False, "ahead": True},
        {"turns": True},
        {"w": 16, "stages": 3},
        {"h": 16, "w": 8, "stages": 3},
        {"stages": 2},
        {"warps": 8},
        {"warps": 8, "registers": False},
    ],
    ids=str,
)
@pytest.mark.skipif(len(methods()) < 2, reason="needs a Hopper device")
def test_forms_of_the_hopper_kernel(form):
    sources = [integers(2, 64, 10, 20, 28, dtype=torch.bfloat16, seed=1)]
    dy = integers(2, 128, 10, 20, 28, dtype=torch.bfloat16, seed=2)
    tile = replace(wg.default_tile(dy, hopper=True), **form)
    truth = wg.weight_gradient_reference(dy.double(), [s.double() for s in sources], cv.AROUND)
    dw = wg.weight_gradient(dy, sources, cv.AROUND, torch.float32, tile=tile)
    assert torch.equal(dw.double(), truth)


@pytest.mark.parametrize("hopper", methods())
def test_gradient_of_the_operator(hopper, monkeypatch):
    from voxtune.kernels.gradients import register_gradients

    register_gradients()
    monkeypatch.setattr(wg, "METHOD", "hopper" if hopper else "triton")
    x = [integers(1, c, 24, 20, 18, dtype=torch.bfloat16, seed=c) for c in (64, 128)]
    weight = torch.randn(64, 192, 3, 3, 3, device="cuda", dtype=torch.bfloat16)
    packed = cv.pack(weight).requires_grad_()
    y, _ = torch.ops.voxtune.conv3d(x, packed, None, None, False)
    dy = lasting(torch.randn(y.shape, device="cuda", dtype=y.dtype))
    (own,) = torch.autograd.grad(y, packed, dy)
    leaf = weight.double().requires_grad_()
    (true,) = torch.autograd.grad(F.conv3d(torch.cat(x, 1).double(), leaf, padding=1), leaf, dy.double())
    assert own.dtype == packed.dtype
    assert float((own.double() - cv.pack(true)).norm() / true.norm()) < 4e-3


@pytest.mark.parametrize("hopper", methods())
def test_in_a_cuda_graph(hopper):
    x = lasting(torch.randn(1, 64, 16, 16, 16, device="cuda", dtype=torch.bfloat16))
    dy = lasting(torch.randn(1, 64, 16, 16, 16, device="cuda", dtype=torch.bfloat16))
    eager = wg.weight_gradient(dy, [x], cv.AROUND, hopper=hopper)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = wg.weight_gradient(dy, [x], cv.AROUND, hopper=hopper)
    for _ in range(3):
        recorded.zero_()
        graph.replay()
        assert torch.equal(recorded, eager)

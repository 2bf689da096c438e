"""Doubling and strided convolutions on the CPU: interpreted against float64, and compiled for real GPUs without one."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from tests.factories.triton_checks import OTHER_ARCHS, run_checks
from voxtune.kernels import doubling_conv, strided_conv
from voxtune.kernels.conv3d_tiles import SHARED_MEMORY

run = partial(run_checks, "kernels/parity_checks.py")


@pytest.mark.parametrize("what", ["doubling", "strided"])
@pytest.mark.parametrize(
    ("dtype", "kind", "extent"),
    [
        ("float16", "integers", "quick"),
        pytest.param("float32", "integers", "all", marks=pytest.mark.slow),
        pytest.param("float32", "random", "all", marks=pytest.mark.slow),
        pytest.param("float16", "random", "all", marks=pytest.mark.slow),
    ],
)
def test_against_float64(what, dtype, kind, extent):
    rows = run("numerics", what, dtype, kind, extent, interpret=True)
    bar = {"float32": 1e-6, "float16": 1e-3}[dtype]
    assert len(rows) >= (4 if extent == "quick" else 12)
    for row in rows:
        assert row["error"] < bar, row
        assert row["exact"] or kind == "random", row
        assert row["counted"] and row["plain"] and row["last"], row
        assert row["mean"] < 1e-5 and row["spread"] < 1e-4, row


@pytest.mark.slow
@pytest.mark.parametrize("what", ["doubling", "strided"])
def test_statistics_about_a_large_mean(what):
    (row,) = run("numerics", what, "float32", "offset", "quick", interpret=True)
    assert row["spread"] < 1e-4, row


@pytest.mark.parametrize("what", ["doubling", "strided"])
def test_entry_point(what):
    row = run("entry", what, interpret=True)
    assert row["launches"] == 1 and row["error"] < 1e-3 and row["statistics"] < 1e-3, row
    assert row["reasons"][0] is None and all(row["reasons"][1:]), row


@pytest.mark.parametrize(
    ("scale", "kernel"), [((2, 2, 2), (3, 3, 3)), ((1, 2, 2), (3, 3, 3)), ((1, 2, 2), (1, 3, 3)), ((2, 2), (3, 3))]
)
def test_the_folded_weights_are_those_of_the_upsampled_source(scale, kernel):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2, 3, *kernel, generator=generator)
    x = torch.randn(2, 3, *(4, 5, 6)[-len(scale) :], generator=generator)
    bias = torch.randn(2, generator=generator)
    convolution = F.conv3d if len(scale) == 3 else F.conv2d
    up = F.interpolate(x.double(), scale_factor=tuple(map(float, scale)), mode="nearest")
    truth = convolution(up, weight.double(), bias.double(), padding=[k // 2 for k in kernel])
    folded = doubling_conv.folded_kernel(kernel, scale)
    for dtype, bar in ((torch.float64, 1e-14), (torch.float32, 1e-6)):
        packed = doubling_conv.pack_nearest(weight.to(dtype), scale)
        assert packed.dtype == dtype
        y, _ = doubling_conv.doubling_conv_reference((x.to(dtype),), packed, bias[None].to(dtype), folded, scale)
        assert float((y - truth).norm() / truth.norm()) < bar


def test_packed_weights_unpack():
    weight = torch.randn(8, 16, 3, 3, 3)
    assert torch.equal(doubling_conv.unpack(doubling_conv.pack_transposed(weight), (3, 3, 3)), weight)
    assert torch.equal(strided_conv.unpack(strided_conv.pack_strided(weight), (3, 3, 3)), weight)
    assert torch.equal(strided_conv.unpack(strided_conv.pack_strided(weight[:, :, 0]), (3, 3)), weight[:, :, 0])


@pytest.mark.parametrize("extent", ["quick", pytest.param("all", marks=pytest.mark.slow)])
def test_compiles_for_hopper(extent):
    rows = run("compile", "90", extent, interpret=False)
    assert len(rows) >= 2
    for row in rows:
        assert row["wgmma"] and row["bulk"] and not row["serialised"], row
        assert row["spills"] == 0 and row["shared"] <= 232448 // 2 + 16384, row


@pytest.mark.parametrize("arch", OTHER_ARCHS)
def test_compiles_for_other_devices(arch):
    for row in run("compile", arch, "all", interpret=False):
        # Devices without the copy engine load values one by one, and spill: the search then keeps what is faster.
        assert row["products"] and (row["bulk"] and not row["spills"] if arch >= 100 else not row["bulk"]), row
        assert row["shared"] <= SHARED_MEMORY[arch], row

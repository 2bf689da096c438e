"""The kernels of small 2D images on the CPU: interpreted against float64, and compiled for real GPUs without one."""

from __future__ import annotations

from functools import partial

import pytest

from tests.factories.triton_checks import INTERPRETER_ERRORS, run_checks

run = partial(run_checks, "kernels/small_images_checks.py", "cpu", interpret=True)
plan = partial(run_checks, "kernels/small_images_plan_checks.py", interpret=False)


@pytest.mark.parametrize("types", [("float32",), pytest.param(("float16",), marks=pytest.mark.slow)])
@pytest.mark.parametrize("what", ["convolution", "depthwise", "gate", "stem", "embedding"])
def test_against_float64(what, types):
    rows = run(what, *types)
    assert len(rows) >= 3
    for row in rows:
        assert row["error"] < INTERPRETER_ERRORS[f"torch.{row['type']}"], row


def test_launches_of_the_convnext_network():
    launches = plan("launches")
    assert launches["kernels"] == {
        "voxtune_stem2d": 1,
        "voxtune_embedding": 1,
        "voxtune_depthwise2d": 19,
        "voxtune_conv2d": 46,
        "voxtune_gate2d": 8,
    }
    assert launches["others"] == ["voxtune.pointwise.default"], "the last layer"


@pytest.mark.parametrize(
    ("arch", "which"),
    [(90, "9"), *(pytest.param(arch, "all", marks=pytest.mark.slow) for arch in (80, 90))],
)
def test_compiled_instructions(arch, which):
    kernels = plan("compile", arch, which)
    for kernel in kernels:
        # A few bytes of stack hold addresses, not values.
        assert kernel["stack"] <= 16 and kernel["registers"] <= 255 and kernel["shared"] <= 160_000, kernel
        if kernel["kernel"] in ("voxtune_conv2d", "voxtune_gate2d", "voxtune_stem2d"):
            assert kernel["products"], kernel
        # Operands are copied 16 bytes at a time; a loop of one iteration has no copies ahead.
        if kernel["kernel"] == "voxtune_conv2d" and kernel["shape"]["SIDE"] == 3:
            assert kernel["wide_copies"] >= 4 and not kernel["narrow_copies"], kernel
    assert {kernel["kernel"] for kernel in kernels} >= {"voxtune_conv2d", "voxtune_stem2d"}


@pytest.mark.parametrize("shared", [64 << 10, 99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize("columns", [16, 48, 64, 512])
def test_tiles_fit_the_gpu(columns, shared):
    from voxtune.kernels.conv2d import AMPLE_MEMORY, tile_for

    for rows, pixels, depth in ((16, 16, 64), (4096, 4096, 288), (4096, 64, 4608), (1 << 18, 4096, 1152)):
        for bytes_each, loops in ((2, 1), (2, 2), (4, 2)):
            tile = tile_for(rows, pixels, depth, columns, 108, bytes_each, shared, loops)
            assert pixels % tile.block_m == 0 and columns % tile.block_k == 0, tile
            stage = (tile.block_m + tile.block_k) * tile.block_c * tile.ways * bytes_each
            # On Hopper the stages of two loops share some of it.
            assert loops * (tile.stages - (shared >= AMPLE_MEMORY and bytes_each == 2)) * stage <= shared, tile

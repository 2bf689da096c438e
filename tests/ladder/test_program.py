"""The upper rungs: correct in every variant, with the stated number of launches, compiled to the expected instructions."""

from __future__ import annotations

from functools import partial

import pytest

from tests.factories.triton_checks import run_checks

run = partial(run_checks, "ladder/ladder_checks.py", interpret=True)


@pytest.mark.slow
def test_golden():
    assert run("golden")["error"] < 1e-6


@pytest.mark.parametrize("extent", ["quick", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_split_reductions_whole_blocks_batches_and_non_square_images(extent):
    for name, error in run("variants", extent).items():
        assert error < 1e-6, name


@pytest.mark.slow
def test_the_loop_generates_the_same_image_as_the_plain_sampler():
    result = run("loop")
    assert result["error"] < 1e-5
    assert result["again"] and result["plain"]
    assert result["launches"] == 1 + 2 * result["planned"]  # initial noise, then two steps with update and noise fused


def test_weights_are_copied_before_they_are_read():
    result = run("weights")
    for form, error in result["errors"].items():
        assert error < 1e-6, form
    assert result["bytes"] > 4 * result["parameters"]  # all of them, packed and padded


def test_launches_of_the_full_network():
    plans = run("plan", interpret=False)
    separate, whole = plans["0"], plans["256"]
    assert separate["launches"] <= 75
    assert whole["launches"] < separate["launches"]
    assert whole["kernels"]["voxtune_block"] == 10  # six at 8x8, four at 16x16
    assert separate["skips"] == whole["skips"] == 8


PRODUCTS = ("product", "conv", "conv_residual", "conv_8x8", "up", "down", "gate", "stem", "block")
COPIED = ("product", "conv", "conv_residual", "conv_8x8", "up")


@pytest.mark.parametrize(
    ("arch", "which"),
    [
        (90, "conv,gate"),
        pytest.param(90, "all", marks=pytest.mark.slow),
        pytest.param(80, "all", marks=pytest.mark.slow),
    ],
)
def test_compiled_instructions(arch, which):
    kernels = run("compiled", arch, which, interpret=False)
    for name, kernel in kernels.items():
        # A few bytes of stack hold the masks of 49 taps, not values.
        assert kernel["stack"] <= 16 and kernel["registers"] <= 255 and kernel["shared"] <= 160_000, (name, kernel)
    # Rung 2: one load of the tile's inputs per channel; the taps are read from shared memory.
    assert kernels["tiled"]["to_shared"] and kernels["tiled"]["from_shared"] > kernels["tiled"]["from_memory"]
    # Rung 3: reduction by warp shuffles.
    assert kernels["norm_warp"]["shuffles"] >= 10
    # Rungs 4 and up: tensor cores in BF16 with float32 accumulation; operands are copied 16 bytes at a time.
    for name in kernels.keys() & set(PRODUCTS):
        assert kernels[name]["products"], name
    for name in kernels.keys() & set(COPIED):
        assert kernels[name]["wide_copies"] >= 4, name
    # Rung 6: grid-wide barriers in the kernel.
    assert kernels["block"]["atomics"] >= 2 and kernels["block"]["acquires"] >= 2
    # Rung 10 on Hopper: the kernel itself waits for its predecessor, after it has started.
    for name in kernels.keys() & {"conv", "depthwise", "gate", "end"}:
        assert kernels[name]["chained"] == (arch >= 90), name

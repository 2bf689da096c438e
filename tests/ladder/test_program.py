"""The fast path: right in every form, as few launches as it says, and compiled to what it claims."""

from __future__ import annotations

from functools import partial

import pytest

from tests.factories.triton_checks import run_checks

run = partial(run_checks, "ladder/ladder_checks.py", interpret=True)


@pytest.mark.slow
def test_golden():
    assert run("golden")["error"] < 1e-6


@pytest.mark.parametrize("extent", ["quick", pytest.param("all", marks=pytest.mark.slow)])
def test_split_sums_whole_blocks_batches_and_oblong_images(extent):
    for name, error in run("variants", extent).items():
        assert error < 1e-6, name


@pytest.mark.slow
def test_the_loop_draws_what_the_plain_sampler_draws():
    found = run("loop")
    assert found["error"] < 1e-5
    assert found["again"] and found["plain"]
    assert found["launches"] == 1 + 2 * found["planned"]  # the first noise, then the steps: update and noise inside


def test_weights_arrive_before_they_are_read():
    found = run("weights")
    for form, error in found["errors"].items():
        assert error < 1e-6, form
    assert found["bytes"] > 4 * found["parameters"]  # all of them, packed and padded


def test_launches_of_the_full_network():
    found = run("plan", interpret=False)
    apart, whole = found["0"], found["256"]
    assert apart["launches"] <= 75
    assert whole["launches"] < apart["launches"]
    assert whole["kernels"]["voxtune_block"] == 10  # 8x8 and 16x16: six and four
    assert apart["skips"] == whole["skips"] == 8


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
def test_compiled_for_real_gpus(arch, which):
    found = run("compiled", arch, which, interpret=False)
    for name, one in found.items():
        # A few bytes of stack hold the masks of 49 taps, no values.
        assert one["stack"] <= 16 and one["registers"] <= 255 and one["shared"] <= 160_000, (name, one)
    # Rung 2: one load of the tile's inputs a channel, then taps out of shared memory.
    assert found["tiled"]["to_shared"] and found["tiled"]["from_shared"] > found["tiled"]["from_memory"]
    # Rung 3: warps reduce by shuffles.
    assert found["norm_warp"]["shuffles"] >= 10
    # Rungs 4 and up: the matrix units, in BF16 with float32 accumulation; operands copied 16 bytes at a time.
    for name in found.keys() & set(PRODUCTS):
        assert found[name]["products"], name
    for name in found.keys() & set(COPIED):
        assert found[name]["wide_copies"] >= 4, name
    # Rung 6: programs meet inside the kernel.
    assert found["block"]["atomics"] >= 2 and found["block"]["acquires"] >= 2
    # Rung 10 on Hopper: a launch waits for its predecessor inside, not before its start.
    for name in found.keys() & {"conv", "depthwise", "gate", "end"}:
        assert found[name]["chained"] == (arch >= 90), name

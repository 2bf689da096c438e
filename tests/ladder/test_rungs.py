"""Each rung on a CPU, by Triton's interpreter: right, and doing what its name says."""

from __future__ import annotations

from functools import partial

import pytest

from tests.factories.triton_checks import run_checks

run = partial(run_checks, "ladder/ladder_checks.py", interpret=True)

# The tiny network (two levels): its blocks, gates, and Downs and Ups; norms; 1x1 convolutions, of which three a gate, the
# residuals of five blocks that change width, one Down, and the last.
BLOCKS, GATES, BETWEEN = 11, 4, 4
NORMS, ONE_BY_ONES = 2 * BLOCKS, 3 * GATES + 5 + 1 + 1


def rows_of(rungs):
    rows = {row["number"]: row for row in run("rungs", rungs, "8x8", "float32", 1)}
    for number, row in rows.items():
        assert row["error"] < 2e-6, row
        # All blocks of so small a network are small enough to be whole.
        spared = {"voxtune_depthwise", "voxtune_depthwise_dynamic"} if number > 5 else set()
        assert not set(row["claimed"]) - set(row["kernels"]) - spared, (number, row["kernels"])
    return rows


def test_rungs_1_to_3():
    rows = rows_of("1-3")
    for row in (rows[1], rows[2]):
        # Every launch reads from the host and gives back to it; additions, products and joins read two tensors.
        assert row["down"] == row["launches"] and row["up"] > row["down"]
    assert rows[3]["down"] == rows[2]["down"] and rows[3]["up"] == rows[2]["up"]
    # Rung 2 needs no pad of its own.
    assert rows[1]["kernels"]["voxtune_pad"] == rows[1]["kernels"]["voxtune_direct"] - ONE_BY_ONES
    assert not {"voxtune_pad", "voxtune_direct"} & set(rows[2]["kernels"])
    # Rung 3 has both forms of the layer norm.
    kernels = rows[3]["kernels"]
    assert kernels["voxtune_norm_warp"] + kernels["voxtune_norm_sums"] == NORMS
    assert kernels["voxtune_norm_sums"] == kernels["voxtune_norm_reduce"] == kernels["voxtune_norm_apply"] > 0
    assert "voxtune_norm_naive" not in kernels


def test_rungs_4_and_5():
    rows = rows_of("4-5")
    before, after = rows[4], rows[5]
    assert before["kernels"]["voxtune_im2col"] == before["kernels"]["voxtune_product"]
    assert after["launches"] < 0.6 * before["launches"] and after["down"] < 0.7 * before["down"]
    # No norm, GELU of pixels, ReLU, sigmoid, multiplication or time addition of its own is left.
    assert not {"voxtune_norm_warp", "voxtune_norm_sums", "voxtune_norm_apply", "voxtune_binary"} & set(
        after["kernels"]
    )
    assert after["kernels"]["voxtune_unary"] == 1 + BLOCKS  # GELU of the time embedding alone


def test_rungs_6_to_10():
    rows = rows_of("6-10")
    # Rung 6 still crosses around each operation: blocks, gates, Down and Up, and stem, image and end.
    assert rows[6]["down"] == rows[6]["up"] == BLOCKS + GATES + BETWEEN + 3
    # From rung 7 only the image crosses.
    for number in (7, 8, 9, 10):
        assert (rows[number]["up"], rows[number]["down"]) == (1, 1), number
    # Rung 8 has its shapes compiled in.
    assert rows[7]["kernels"]["voxtune_conv_dynamic"] == rows[8]["kernels"]["voxtune_conv"]
    assert "voxtune_conv_dynamic" not in rows[8]["kernels"] and "voxtune_conv" not in rows[7]["kernels"]


@pytest.mark.slow
def test_half_precision_and_a_batch():
    for row in run("rungs", "4-10", "16x16", "float16", 2):
        assert row["error"] < 4e-3, row

"""Each rung on a CPU, in Triton's interpreter: correct results, and the expected kernels and transfers."""

from __future__ import annotations

from functools import partial

import pytest

from tests.factories.triton_checks import run_checks

run = partial(run_checks, "ladder/ladder_checks.py", interpret=True)

# Counts in the tiny network (two levels): blocks, gates, Downs and Ups; norms; 1x1 convolutions: three per gate, the residuals
# of five blocks that change the width, one Down, and the last.
BLOCKS, GATES, BETWEEN = 11, 4, 4
NORMS, ONE_BY_ONES = 2 * BLOCKS, 3 * GATES + 5 + 1 + 1


def rows_of(rungs):
    rows = {row["number"]: row for row in run("rungs", rungs, "8x8", "float32", 1)}
    for number, row in rows.items():
        assert row["error"] < 2e-6, row
        # In a network of this size, every block runs as one kernel.
        unused = {"voxtune_depthwise", "voxtune_depthwise_dynamic"} if number > 5 else set()
        assert not set(row["claimed"]) - set(row["kernels"]) - unused, (number, row["kernels"])
    return rows


@pytest.mark.slow
def test_rungs_1_to_3():
    rows = rows_of("1-3")
    for row in (rows[1], rows[2]):
        # Every launch copies its inputs from the host and its output back; binary operations and concatenation have two inputs.
        assert row["down"] == row["launches"] and row["up"] > row["down"]
    assert rows[3]["down"] == rows[2]["down"] and rows[3]["up"] == rows[2]["up"]
    # Rung 2 has no separate padding.
    assert rows[1]["kernels"]["voxtune_pad"] == rows[1]["kernels"]["voxtune_direct"] - ONE_BY_ONES
    assert not {"voxtune_pad", "voxtune_direct"} & set(rows[2]["kernels"])
    # Rung 3 uses both versions of the layer norm.
    kernels = rows[3]["kernels"]
    assert kernels["voxtune_norm_warp"] + kernels["voxtune_norm_sums"] == NORMS
    assert kernels["voxtune_norm_sums"] == kernels["voxtune_norm_reduce"] == kernels["voxtune_norm_apply"] > 0
    assert "voxtune_norm_naive" not in kernels


def test_rungs_4_and_5():
    rows = rows_of("4-5")
    before, after = rows[4], rows[5]
    assert before["kernels"]["voxtune_im2col"] == before["kernels"]["voxtune_product"]
    assert after["launches"] < 0.6 * before["launches"] and after["down"] < 0.7 * before["down"]
    # Norms, GELU of pixels, ReLU, sigmoid, multiplication and time addition are all fused.
    assert not {"voxtune_norm_warp", "voxtune_norm_sums", "voxtune_norm_apply", "voxtune_binary"} & set(
        after["kernels"]
    )
    assert after["kernels"]["voxtune_unary"] == 1 + BLOCKS  # only GELU of the time embedding


@pytest.mark.slow
def test_rungs_6_to_10():
    rows = rows_of("6-10")
    # Rung 6 still transfers activations around each operation: blocks, gates, Down and Up, stem, image and end.
    assert rows[6]["down"] == rows[6]["up"] == BLOCKS + GATES + BETWEEN + 3
    # From rung 7 on, only the image is transferred.
    for number in (7, 8, 9, 10):
        assert (rows[number]["up"], rows[number]["down"]) == (1, 1), number
    # Rung 8 has compile-time shapes.
    assert rows[7]["kernels"]["voxtune_conv_dynamic"] == rows[8]["kernels"]["voxtune_conv"]
    assert "voxtune_conv_dynamic" not in rows[8]["kernels"] and "voxtune_conv" not in rows[7]["kernels"]


@pytest.mark.slow
def test_half_precision_and_batches():
    for row in run("rungs", "4-10", "16x16", "float16", 2):
        assert row["error"] < 4e-3, row

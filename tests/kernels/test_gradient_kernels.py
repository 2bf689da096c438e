"""The kernels of the backward pass on the CPU: interpreted against float64, and compiled for real GPUs without one."""

from __future__ import annotations

from functools import partial

import pytest

from tests.factories.triton_checks import ARCHS, COMPILED, INTERPRETER_ERRORS, run_checks

run = partial(run_checks, "kernels/gradient_kernel_checks.py")


@pytest.mark.parametrize(
    ("what", "count"),
    [pytest.param("linear", 54, marks=pytest.mark.slow), ("nearest", 54), ("sums", 27), ("edges", 72)],
)
def test_against_float64(what, count):
    rows = run("numerics", what, "random", interpret=True)
    assert len(rows) >= count
    for row in rows:
        assert row["error"] < INTERPRETER_ERRORS[row["type"]], row
        assert row["written"] and row["last"], row


@pytest.mark.slow
@pytest.mark.parametrize("what", ["linear", "nearest", "edges"])
def test_whole_numbers_are_exact(what):
    for row in run("numerics", what, "whole", interpret=True):
        # The weights of a linear doubling are multiples of 1/64: half precision rounds.
        assert row["exact"] or (what == "linear" and "float16" in row["type"]), row
        assert row["error"] < INTERPRETER_ERRORS[row["type"]], row


@pytest.mark.parametrize(("arch", "kinds"), COMPILED)
def test_upsampling_compiles(arch, kinds):
    for kernel in run("compile", "upsample", arch, kinds, interpret=False):
        assert kernel["spills"] == 0, kernel
        # Two programs of 8 warps on a multiprocessor of Hopper.
        assert kernel["registers"] <= (128 if arch == 90 and "bf16" in kernel["name"] else 192), kernel
        assert kernel["wide"] >= 5, kernel


@pytest.mark.parametrize(("arch", "kinds"), COMPILED)
def test_sums_compile(arch, kinds):
    for kernel in run("compile", "sums", arch, kinds, interpret=False):
        assert kernel["spills"] == 0, kernel
        assert kernel["registers"] <= 128, kernel
        assert kernel["wide"] >= 4, kernel


@pytest.mark.parametrize(("arch", "kinds"), COMPILED)
def test_sums_of_taps_compile(arch, kinds):
    for kernel in run("compile", "edges", arch, kinds, interpret=False):
        half = "'wide_ptr': '*bf16'" in kernel["name"]
        # Float32 products may spill a little; those on the matrix units never on the card that they are made for.
        assert kernel["spills"] <= (0 if half and arch == 90 else 64), kernel
        assert kernel["wide"] >= 4 and kernel["shared"] <= 99 << 10, kernel
        assert kernel["products"] or not half, kernel


def test_sums_are_computed_where_they_are_not_known():
    rows = {row.pop("case"): row for row in run("remembered", interpret=True)}
    assert {name: row["sums"] for name, row in rows.items() if "sums" in row} == {
        "once": 0,
        "of_the_batch": 0,
        "twice": 1,
        "handed_on": 1,
    }
    for name, row in rows.items():
        if "error" in row:
            assert row["error"] < 1e-5 and row["apart"], (name, row)
    assert rows["written to"] == {"held": True, "holds": False}


def test_stem_and_head_follow_a_weight_that_is_trained():
    for row in run("trained", interpret=True):
        assert row["error"] < 1e-5, row


def test_packing_moves_weights_as_pytorch_does():
    for row in run("packing", interpret=True):
        assert row["packed"] and row["back"] and row["opposite"], row


@pytest.mark.parametrize("arch", ARCHS)
def test_packing_compiles(arch):
    for kernel in run("compile", "packing", arch, "bf16", interpret=False):
        assert kernel["spills"] == 0 and kernel["registers"] <= 128, kernel
        assert kernel["wide"] >= 1, kernel  # the side that is contiguous over channels

"""The 1x1 convolution and the sum on the CPU: interpreted against float64, and compiled for real GPUs without one."""

from __future__ import annotations

from functools import partial

import pytest

from tests.factories.triton_checks import COMPILED, INTERPRETER_ERRORS, run_checks

run = partial(run_checks, "kernels/small_kernels_checks.py")


@pytest.mark.parametrize("what", ["pointwise", "add"])
def test_against_float64(what):
    rows = run("numerics", what, "random", interpret=True)
    assert len(rows) >= 20
    for row in rows:
        assert row["error"] < INTERPRETER_ERRORS[row["type"]], row
        assert row["written"] and row["last"], row


@pytest.mark.slow
@pytest.mark.parametrize("what", ["pointwise", "add"])
def test_whole_numbers_are_exact(what):
    for row in run("numerics", what, "whole", interpret=True):
        assert row["exact"], row


@pytest.mark.parametrize(("arch", "kinds"), COMPILED)
def test_compiles(arch, kinds):
    for kernel in run("compile", "pointwise", arch, kinds, interpret=False):
        # Float32 products may spill a little; those on the matrix units never on the card that they are made for.
        half = "'y_ptr': '*bf16'" in kernel["name"] or "'x_ptr': '*bf16'" in kernel["name"]
        assert kernel["spills"] <= (0 if half and arch == 90 else 64), kernel
        assert kernel["registers"] <= 255, kernel
        assert kernel["wide"] >= 8, kernel
        assert kernel["shared"] <= 100_000, kernel

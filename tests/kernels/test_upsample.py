"""Doubling on the CPU: interpreted against float64, and compiled for real GPUs without one."""

from __future__ import annotations

from functools import partial

import pytest

from tests.factories.triton_checks import COMPILED, INTERPRETER_ERRORS, run_checks

run = partial(run_checks, "kernels/small_kernels_checks.py")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["linear", "nearest"])
def test_against_float64(what):
    rows = run("numerics", what, "random", interpret=True)
    assert len(rows) >= 24
    for row in rows:
        assert row["error"] < INTERPRETER_ERRORS[row["type"]], row
        assert row["written"] and row["last"], row


@pytest.mark.slow
@pytest.mark.parametrize("what", ["linear", "nearest"])
def test_whole_numbers_are_exact(what):
    for row in run("numerics", what, "whole", interpret=True):
        assert row["exact"], row


@pytest.mark.parametrize(("arch", "kinds"), COMPILED)
def test_compiles(arch, kinds):
    for kernel in run("compile", "upsample", arch, kinds, interpret=False):
        assert kernel["spills"] == 0, kernel
        assert kernel["registers"] <= 144, kernel
        assert kernel["wide"] >= 8, kernel

"""Stem and head on the CPU: interpreted against float64, and compiled for real GPUs without one."""

from __future__ import annotations

from functools import partial

import pytest

from tests.factories.triton_checks import ARCHS, COMPILED, INTERPRETER_ERRORS, run_checks

run = partial(run_checks, "kernels/small_kernels_checks.py")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["stem", "head", "lines"])
def test_against_float64(what):
    rows = run("numerics", what, "random", interpret=True)
    assert len(rows) >= 16
    for row in rows:
        assert row["error"] < INTERPRETER_ERRORS[row["type"]], row
        assert row["written"] and row["last"], row


@pytest.mark.slow
@pytest.mark.parametrize("what", ["stem", "head", "lines"])
def test_whole_numbers_are_exact(what):
    for row in run("numerics", what, "whole", interpret=True):
        assert row["exact"], row


@pytest.mark.parametrize(("arch", "kinds"), COMPILED)
@pytest.mark.parametrize("what", ["stem", "head"])
def test_compiles(what, arch, kinds):
    for kernel in run("compile", what, arch, kinds, interpret=False):
        # Float32 products may spill a little; those on the matrix units never on the card that they are made for.
        half = "'y_ptr': '*bf16'" in kernel["name"] or "'x_ptr': '*bf16'" in kernel["name"]
        assert kernel["spills"] <= (0 if half and arch == 90 else 64), kernel
        assert kernel["registers"] <= 255, kernel
        assert kernel["wide"] >= 4, kernel
        assert kernel["shared"] <= 100_000, kernel
        assert kernel["products"] or not half, kernel


@pytest.mark.parametrize("arch", ARCHS)
def test_head_by_lines_compiles(arch):
    for kernel in run("compile", "lines", arch, "bf16", interpret=False):
        assert kernel["spills"] == 0 and kernel["registers"] <= 255, kernel
        # At least two programs a multiprocessor of Hopper; one of every other device.
        assert kernel["shared"] <= (113_000 if arch in (80, 90, 100) else 99 << 10), kernel
        assert kernel["products"] and (kernel["bulk"] if arch >= 90 else kernel["wide"] >= 4), kernel

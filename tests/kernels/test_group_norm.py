"""The norm's kernels on the CPU: by Triton's interpreter against float64, and compiled for real GPUs without one."""

from __future__ import annotations

from functools import partial

import pytest

from tests.factories.triton_checks import ARCHS, run_checks

run = partial(run_checks, "kernels/group_norm_checks.py")


@pytest.mark.parametrize(
    ("dtype", "extent", "count"),
    [
        ("float16", "quick", 14),
        pytest.param("float16", "all", 44, marks=pytest.mark.slow),
        pytest.param("float32", "all", 44, marks=pytest.mark.slow),
    ],
)
def test_against_float64(dtype, extent, count):
    rows = run("numerics", dtype, extent, interpret=True)
    bar = {"float32": 2e-6, "float16": 2e-3}[dtype]
    assert len(rows) >= count
    for row in rows:
        assert row["error"] < bar, row
        assert row["written"], row


def test_large_mean_does_not_cancel():
    row = run("offset", interpret=True)
    assert row["error"] < 1e-4, row


@pytest.mark.parametrize("arch", ARCHS)
def test_compiles_without_spills(arch):
    for kernel in run("compile", str(arch), interpret=False):
        assert kernel["spills"] == 0, kernel
        assert kernel["registers"] <= 128, kernel

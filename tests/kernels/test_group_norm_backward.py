"""The kernels of the norm's gradients on the CPU: by Triton's interpreter against float64, and compiled for real GPUs."""

from __future__ import annotations

from functools import partial

import pytest

from tests.factories.triton_checks import run_checks

run = partial(run_checks, "kernels/group_norm_backward_checks.py")


@pytest.mark.parametrize(
    ("dtype", "extent", "count"),
    [
        ("float32", "quick", 7),
        pytest.param("float32", "all", 22, marks=pytest.mark.slow),
        pytest.param("float16", "all", 22, marks=pytest.mark.slow),
    ],
)
def test_against_float64(dtype, extent, count):
    rows = run("numerics", dtype, extent, interpret=True)
    assert len(rows) >= count
    for row in rows:
        assert row["affine"] < 2e-6, row
        for name, error in row["errors"].items():
            # A group of two values has nearly opposite normalised values, whatever the source: its gradient cancels.
            cancels = row["case"][2] == [1, 1, 1] and name.startswith(("source", "sums"))
            # A shift per channel has no effect on an InstanceNorm: its gradient is rounding.
            vanishes = name == "shift_NC" and row["case"][1] == [row["case"][3]]
            assert error < (1e-2 if cancels or vanishes else {"float32": 1e-6, "float16": 3e-3}[dtype]), (name, row)


@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_compiles_without_spills(arch):
    for kernel in run("compile", str(arch), interpret=False):
        assert kernel["spills"] == 0, kernel
        # Of the sums all programs run at once: four of 8 warps on a multiprocessor.
        assert kernel["registers"] <= (64 if kernel["name"] == "voxtune_norm_sums" else 128), kernel

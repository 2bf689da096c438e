"""The RMS norm's kernel on the CPU: by Triton's interpreter against float64, and compiled for real GPUs without one."""

from __future__ import annotations

from functools import partial

import pytest

from tests.factories.triton_checks import ARCHS, INTERPRETER_ERRORS, run_checks

run = partial(run_checks, "kernels/rms_norm_checks.py")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_against_float64(dtype):
    for row in run("numerics", dtype, interpret=True):
        assert row["error"] < 2 * INTERPRETER_ERRORS[f"torch.{dtype}"], row
        assert row["written"], row


@pytest.mark.parametrize("arch", ARCHS)
def test_compiles_without_spills(arch):
    for kernel in run("compile", str(arch), interpret=False):
        assert kernel["spills"] == 0, kernel
        assert kernel["registers"] <= 128, kernel

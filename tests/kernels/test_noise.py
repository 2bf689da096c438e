"""The noise kernel gives the noise of diffusion/noise.py: by the interpreter, and compiled for real GPUs without one."""

from __future__ import annotations

from functools import partial

import pytest

from tests.factories.triton_checks import ARCHS, run_checks

run = partial(run_checks, "kernels/noise_checks.py")


def test_the_same_noise_as_in_plain_pytorch():
    for row in run("numerics", interpret=True):
        assert row["shape"] and row["worst"] < 2e-6, row


@pytest.mark.parametrize("arch", ARCHS)
def test_compiles_for_real_gpus(arch):
    made = run("compiled", arch, interpret=False)
    assert made["registers"] <= 96 and made["spills"] == 0, made

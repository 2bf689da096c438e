"""The fastest plan of a GPU, its kernels run by Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("network", ["med_ddpm", "convnext"])
def test_kernels_of_the_whole_plan_work_together(network):
    done = subprocess.run(
        [sys.executable, "-m", "tests.plan.whole_plan_checks", network],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout.splitlines()[-1]) < 4e-3

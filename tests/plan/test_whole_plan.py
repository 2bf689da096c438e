"""The fastest plan of a GPU, its kernels run by Triton's interpreter, on a batch of two."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_kernels_of_the_whole_plan_work_together():
    done = subprocess.run(
        [sys.executable, "-m", "tests.plan.whole_plan_checks"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout.splitlines()[-1]) < 4e-3
